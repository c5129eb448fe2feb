"""What a layer will do and what it costs, before it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dropless import _library
from dropless._checks import check_integer
from dropless._config import MoEConfig, check_config, device_in_use
from dropless._devices import NamedDevice, Rates, device_of, rates_of
from dropless._experts import Spec, wgrad_workspaces
from dropless._experts_fp8 import padded
from dropless._explanation import Array, Explanation, Gemm
from dropless._fp8_model import fp8_choice
from dropless._kernel_choice import kernel_of
from dropless._params import check_float_dtype
from dropless._precision import LayerSizes, choose_precision
from dropless._routing import check_rows

_BYTES = {"f32": 4, "bf16": 2, "fp8": 1}
# Names of what the shared expert does not have, or not twice.
_ROUTED_ONLY = ("router", "x", "logits", "ids", "weights", "slot_", "row_", "offsets")
_SCALE_BLOCK = 128  # elements that one FP8 scale covers


def explain(
    cfg: MoEConfig,
    tokens: int,
    model_dim: int,
    device: jax.Device | str | None = None,
    *,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> Explanation:
    """Says what one forward and backward pass of a layer runs, and what it costs at least.

    Args:
      cfg: the layer.
      tokens: T on one device.
      model_dim: H.
      device: a ``jax.Device``, or the name of one that need not be here, such as ``"cpu"`` or
        ``"H200"``. None is the device in use; only then are JAX's backends initialised.
      dtype: of x, float32 or bfloat16. None: float32 on a CPU, bfloat16 elsewhere.
      param_dtype: of the parameters and of their gradients.

    Returns:
      An ``Explanation``; print it for a table.

    Raises:
      ValueError: a size below 1, a device that is not known by that name, or FP8 asked of a device
        that has none, exactly as the layer itself would refuse it.
      TypeError: a dtype that the layer does not take.
    """
    check_config(cfg)
    for name, value in (("tokens", tokens), ("model_dim", model_dim)):
        check_integer(name, value, 1)
    check_rows(tokens, cfg.experts_per_token)
    found = device_in_use(None) if device is None else device_of(device)
    if dtype is None:
        dtype = jnp.float32 if found.platform == "cpu" else jnp.bfloat16
    check_float_dtype("dtype", dtype)
    check_float_dtype("param_dtype", param_dtype)
    expert_dim, param_bytes = cfg.resolved_expert_dim(model_dim), jnp.dtype(param_dtype).itemsize
    layer = LayerSizes(tokens, model_dim, expert_dim, param_bytes)
    chosen = choose_precision(cfg, jnp.dtype(dtype), found, layer)
    precision = chosen.precision
    spec = Spec.of(cfg, precision, found.platform)
    sizes = _Sizes(
        t=tokens,
        k=cfg.experts_per_token,
        e=cfg.num_experts,
        h=model_dim,
        i=expert_dim,
        x=jnp.dtype(dtype).itemsize,
        param=param_bytes,
    )
    forward, backward = _gemms(spec, sizes, found)
    saved = _saved(spec, sizes, jnp.dtype(dtype).name)
    workspaces = _workspaces(spec, sizes, cfg.expert_bias)
    if cfg.shared_expert_dim is not None:
        # One expert that every token is routed to, without a router of its own.
        alone = dataclasses.replace(sizes, k=1, e=1, i=cfg.shared_expert_dim)

        def shared(items: Any) -> Any:
            own = [o for o in items if not o.name.startswith(_ROUTED_ONLY)]
            return tuple(dataclasses.replace(o, name=f"shared expert: {o.name}") for o in own)

        more = _gemms(spec, alone, found)
        forward, backward = forward + shared(more[0]), backward + shared(more[1])
        saved += shared(_saved(spec, alone, "float32"))
        workspaces += _workspaces(spec, alone, False)[1:]
    return Explanation(
        config=cfg,
        tokens=tokens,
        model_dim=model_dim,
        expert_dim=sizes.i,
        device=found.device_kind,
        platform=found.platform,
        precision=precision,
        precision_reason=chosen.reason,
        forward=forward,
        backward=backward,
        saved=saved,
        workspaces=workspaces,
        fp8=fp8_choice(cfg, tokens, model_dim, expert_dim, param_bytes, found),
    )


@dataclasses.dataclass(frozen=True)
class _Sizes:
    t: int
    k: int
    e: int
    h: int
    i: int
    x: int  # bytes of an element of x
    param: int  # bytes of a parameter

    @property
    def m(self) -> int:
        return self.t * self.k


def _gemms(
    spec: Spec, s: _Sizes, device: jax.Device | NamedDevice
) -> tuple[tuple[Gemm, ...], tuple[Gemm, ...]]:
    rates = rates_of(device)
    operand, wide = _BYTES[spec.precision], jnp.dtype(spec.wide).itemsize
    matrix = min(s.e, s.m) * s.h * s.i * operand  # one of an expert's matrices, for all in use
    saved_h = 1 if spec.h_fp8 else wide
    wgrad = "bf16" if spec.fp8 and not spec.wgrad_fp8 else spec.precision
    product, parts = 2 * s.m * s.h * s.i, spec.activation.parts

    def gemm(name: str, op: str, flops: int, moved: int, kind: str = spec.precision) -> Gemm:
        kernel, tile, reason = kernel_of(op, kind, device, s.h, s.i, spec.activation)
        floor = _floor(rates, kind, flops, moved)
        return Gemm(name, kernel, tile, reason, flops, moved, floor)

    def router(name: str, products: int, terms: int) -> Gemm:
        flops = 2 * s.t * s.h * s.e
        moved = products * (s.t * s.h * s.x + s.h * s.e * s.param + s.t * s.e * 4)
        if device.platform == "cpu" or s.x == 4:
            floor = _floor(rates, "f32", products * flops, moved)
            reason = "float32 products whatever the experts' operands are, never TF32"
        else:
            floor = _floor(rates, "bf16", terms * flops, moved)
            reason = "float32 arithmetic as bf16 products of terms that add up to it, never TF32"
        return Gemm(name, "XLA dot", None, reason, products * flops, moved, floor)

    x, rows_i, rows_h = s.t * s.h, s.m * s.i, s.m * s.h
    forward = (
        router("router", 1, terms=3),
        gemm(
            "gate and up, activation", "expert_up", parts * product,
            x * operand + parts * matrix + parts * rows_i * saved_h + rows_i * operand,
        ),
        gemm("down", "grouped_gemm", product, rows_i * operand + matrix + rows_h * wide),
    )  # fmt: skip
    backward = (
        gemm(
            "gradient through down", "expert_down_backward", product,
            x * operand + matrix + parts * rows_i * saved_h + (parts + 1) * rows_i * wide,
        ),
        gemm(
            "gradient of x", "expert_up_backward", parts * product,
            parts * rows_i * operand + parts * matrix + rows_h * wide,
        ),
        gemm(
            "gradients of gate and up", "grouped_wgrad", parts * product,
            x * _BYTES[wgrad] + parts * (rows_i * _BYTES[wgrad] + s.e * s.h * s.i * s.param), wgrad,
        ),
        gemm(
            "gradient of down", "grouped_wgrad", product,
            x * _BYTES[wgrad] + rows_i * _BYTES[wgrad] + s.e * s.h * s.i * s.param, wgrad,
        ),
        router("router's gradients", 2, terms=6 + 3),
    )  # fmt: skip
    return forward, backward


def _floor(rates: Rates | None, precision: str, flops: int, moved: int) -> float | None:
    if rates is None or precision not in rates.flops:
        return None
    return max(flops / rates.flops[precision], moved / rates.bandwidth)


def _saved(spec: Spec, s: _Sizes, x: str) -> tuple[Array, ...]:
    h = "float8_e4m3fn" if spec.h_fp8 else jnp.dtype(spec.wide).name
    front = (s.m, spec.activation.parts)
    arrays = [Array("x", (s.t, s.h), x), Array("h", (*front, s.i), h)]
    if spec.h_fp8:
        arrays.append(Array("h_scale", (*front, -(-s.i // _SCALE_BLOCK)), "float32"))
    return (
        *arrays,
        Array("logits", (s.t, s.e), "float32"),
        Array("ids", (s.t, s.k), "int32"),
        Array("weights", (s.t, s.k), "float32"),
        Array("slot_of_row", (s.m,), "int32"),
        Array("row_of_slot", (s.t, s.k), "int32"),
        Array("offsets", (s.e + 1,), "int32"),
    )


def _workspaces(spec: Spec, s: _Sizes, biases: bool) -> tuple[Array, ...]:
    operand = _BYTES[spec.precision]
    h, i = (padded(s.h), padded(s.i)) if spec.fp8 else (s.h, s.i)
    fused = (("expert_up", s.m, h, operand), ("expert_down_backward", s.m, h, i, operand))
    wgrads = wgrad_workspaces(spec, s.m, s.h, s.i, s.e, spec.columns_at_once(biases))
    calls = (
        ("route", s.t, s.e),
        *(() if spec.in_steps else fused),
        *(("grouped_wgrad", *sizes) for sizes in wgrads),
    )
    return tuple(
        Array(op, (_library.workspace_bytes(op, *sizes),), "uint8") for op, *sizes in calls
    )
