"""Which kernel runs a product over the experts' rows on a device, and why."""

from __future__ import annotations

import os

import jax

from dropless import _library
from dropless._activation import Activation
from dropless._devices import NamedDevice
from dropless._experts_fp8 import has_fused_kernels

# Of the result and of the contraction, in the GPU kernels that are not Hopper's own.
_SM80_TILE = (128, 256, 64)
_F32_TILE = (128, 128, 32)


def gpu_path() -> str:
    """Which kernels the grouped products use on a GPU: ``"auto"``, or ``"sm80"`` for those alone
    that run on every GPU. The environment variable ``DROPLESS_GPU_PATH`` says it; the CUDA library
    reads it at its first product.

    Raises:
      ValueError: the variable holds anything else.
    """
    path = os.environ.get("DROPLESS_GPU_PATH") or "auto"
    if path not in ("auto", "sm80"):
        raise ValueError(
            f'the environment variable DROPLESS_GPU_PATH must be "auto" or "sm80"; got {path!r}.'
        )
    return path


def kernel_of(
    op: str,
    precision: str,
    device: jax.Device | NamedDevice,
    model_dim: int,
    expert_dim: int,
    activation: Activation,
) -> tuple[str, tuple[int, ...] | None, str]:
    """Name, tile (where it is known before the call) and reason of the kernel that runs an op."""
    if device.platform == "cpu":
        bf16 = precision != "f32"
        name, tile = _library.cpu_kernel_tile(bf16=bf16)
        reason = f"the fastest micro-kernel of this CPU for {'bf16' if bf16 else 'f32'}"
        if (os.environ.get("DROPLESS_CPU_KERNELS") or "auto") != "auto":
            reason = "the environment variable DROPLESS_CPU_KERNELS asks for it"
        if precision == "fp8":
            reason += "; FP8 is emulated: codes are exact in bf16"
        return f"{op} on {name}", tile, reason
    hopper = "Hopper: TMA and wgmma"
    if precision == "fp8":
        if op == "expert_up_backward":
            fused = activation.gated
        else:
            between = op in ("expert_up", "expert_down_backward")
            fused = not between or has_fused_kernels(activation)
        if fused:
            return f"{op}_fp8_sm90", None, hopper
        reason = "no fused FP8 kernel for this activation: products by Hopper's, the rest by XLA"
        return f"{op} by grouped_gemm_fp8_sm90", None, reason
    if precision == "f32":
        return f"{op}_f32", _F32_TILE, "float32 operands: fused multiply-adds, never TF32"
    # As src/cuda/launch/product_path.cc chooses.
    capability = float(getattr(device, "compute_capability", None) or 0)
    if gpu_path() == "sm80":
        reason = "the environment variable DROPLESS_GPU_PATH asks for it: cp.async and mma.sync"
    elif not 9.0 <= capability < 9.1:  # wgmma kernels are compiled for sm_90a, which no other runs
        reason = "not Hopper: cp.async and mma.sync, which every GPU since Ampere runs"
    elif model_dim % 8 or expert_dim % 8:
        reason = (
            f"rows of H = {model_dim} or I = {expert_dim} bfloat16 are no multiple of 16 bytes, "
            "which TMA needs: cp.async and mma.sync, element by element where they must"
        )
    else:
        return f"{op}_sm90", None, hopper
    return f"{op}_sm80", _SM80_TILE, reason
