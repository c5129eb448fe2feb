"""What ``MoEConfig.precision`` means on a device."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp

from dropless._config import MoEConfig, first_time, warn_once
from dropless._devices import FP8_CAPABILITY, NamedDevice, has_fp8
from dropless._fp8_model import MARGIN, fp8_choice, not_measured

_log = logging.getLogger("dropless")


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """What a choice of precision depends on beside the config.

    Attributes:
      tokens, model_dim, expert_dim: T on one device, H and I.
      param_bytes: of one of the experts' parameters.
      prepared: experts are prepared apart from the call, so that it need not count.
    """

    tokens: int
    model_dim: int
    expert_dim: int
    param_bytes: int
    prepared: bool = False


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A precision, ``"f32"``, ``"bf16"`` or ``"fp8"``, and why."""

    precision: str
    reason: str


def choose_precision(
    cfg: MoEConfig, x_dtype: Any, device: jax.Device | NamedDevice, sizes: LayerSizes
) -> Chosen:
    """What ``cfg.precision`` asks of this device.

    Raises:
      ValueError: FP8 was asked of a GPU that has none and ``fallback`` is not set.
    """
    if cfg.precision == "auto":
        chosen = _auto(cfg, x_dtype, device, sizes)
        text = f'precision="auto" chose {chosen.precision} on {device}; {chosen.reason}.'
        if first_time(text):
            _log.info(text)
        return chosen
    if cfg.precision != "fp8" or device.platform == "cpu" or has_fp8(device):
        return Chosen(cfg.precision, "asked for")
    capability = getattr(device, "compute_capability", "unknown")
    problem = (
        f'precision="fp8" needs an NVIDIA Hopper GPU, compute capability {FP8_CAPABILITY} (or a '
        f"CPU, where it is emulated); got {device.device_kind} of capability {capability}"
    )
    if cfg.fallback is None or cfg.strict:
        raise ValueError(f'{problem}. Use precision="bf16", or fallback="bf16" with strict=False.')
    warn_once(f"{problem}; running bf16 instead.")
    reason = f'fp8 was asked for, but {device.device_kind} has none, and fallback="bf16" is set'
    return Chosen("bf16", reason)


def _auto(
    cfg: MoEConfig, x_dtype: Any, device: jax.Device | NamedDevice, sizes: LayerSizes
) -> Chosen:
    if device.platform == "cpu":
        chosen = "f32" if x_dtype == jnp.float32 else "bf16"
        return Chosen(chosen, f"auto: the dtype of x ({jnp.dtype(x_dtype).name}) on a CPU")
    if not has_fp8(device):
        return Chosen("bf16", f"auto: {device.device_kind} has no FP8 kernels")
    shape = (sizes.model_dim, sizes.expert_dim)
    if why_not := not_measured(cfg, *shape):
        return Chosen("bf16", f"auto: {why_not}")
    choice = fp8_choice(cfg, sizes.tokens, *shape, sizes.param_bytes, device)
    if choice is None:
        return Chosen("bf16", "auto: there are no tokens")
    ratio = choice.prepared_ratio if sizes.prepared else choice.every_call_ratio
    counted = "experts prepared once" if sizes.prepared else "quantising the weights counted"
    return Chosen(
        "fp8" if ratio >= MARGIN else "bf16",
        f"auto: FP8 is expected to be {ratio:.2f} times as fast as bf16, {counted}; it is chosen "
        f"from {MARGIN} on",
    )
