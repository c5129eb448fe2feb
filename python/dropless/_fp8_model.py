"""How long a layer takes in bf16 and in FP8 on Hopper: what ``precision="auto"`` chooses by.

A time is a sum of terms: the products' FLOPs, rows of width H and of width I, the experts' weights,
and the call itself. Their coefficients are fitted to times of forward and backward measured on an
H200 (``bench/fp8_choice.py``, ``bench/results/gpu_fp8_choice_h200.json``); for other Hopper GPUs
they are scaled by the data sheets' rates.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from dropless._config import MoEConfig
from dropless._devices import KNOWN, NamedDevice, has_fp8, rates_of
from dropless._experts_fp8 import has_fused_kernels, padded
from dropless._kernel_choice import gpu_path

_MEASURED_ON = "NVIDIA H200"


@dataclasses.dataclass(frozen=True)
class _Terms:
    """Of forward and backward of experts with gate and up; seconds an element of each term."""

    products: float  # M * H * I
    rows_h: float  # M * H
    rows_i: float  # M * I
    weights: float  # min(E, M) * H * I
    call: float  # 1

    def seconds(self, m: int, h: int, i: int, e: int, slower: tuple[float, float]) -> float:
        """``slower``: how many times more than measured computing takes, and moving."""
        computed = self.products * m * h * i
        moved = self.rows_h * m * h + self.rows_i * m * i + self.weights * min(e, m) * h * i
        return slower[0] * computed + slower[1] * moved + self.call


# From `python bench/fp8_choice.py --fit`.
_BF16 = _Terms(
    products=2.605e-14, rows_h=3.771e-12, rows_i=5.386e-12, weights=3.341e-12, call=9.121e-5
)
# What FP8 takes less, with experts prepared.
_SAVED = _Terms(
    products=6.194e-15, rows_h=-1.657e-12, rows_i=-4.233e-12, weights=8.144e-13, call=-1.500e-5
)
# Bytes a second. Of each weight the parameter is read, and two bytes are written: a bfloat16, or
# codes in both orientations.
_PREPARE_RATES = {"bf16": 3.04e12, "fp8": 2.67e12}
# FP8 is chosen where it is expected to be so many times as fast as bf16: the fit is off by two or
# three percent, and of two equals bf16 rounds less.
MARGIN = 1.025


@dataclasses.dataclass(frozen=True)
class Fp8Choice:
    """FP8 beside bf16, forward and backward, in seconds that measured times make expect.

    Attributes:
      bf16_seconds, fp8_seconds: with experts prepared before.
      bf16_prepare_seconds, fp8_prepare_seconds: of ``prepare_experts``: a cast, nothing for
        bfloat16 parameters; or codes in both orientations.
    """

    bf16_seconds: float
    fp8_seconds: float
    bf16_prepare_seconds: float
    fp8_prepare_seconds: float

    @property
    def prepared_ratio(self) -> float:
        """How many times as fast as bf16 FP8 is, with experts prepared beforehand."""
        return self.bf16_seconds / self.fp8_seconds

    @property
    def every_call_ratio(self) -> float:
        """The same where every call prepares the experts."""
        bf16 = self.bf16_seconds + self.bf16_prepare_seconds
        return bf16 / (self.fp8_seconds + self.fp8_prepare_seconds)

    @property
    def calls_to_pay(self) -> int | None:
        """How many calls must share prepared experts for FP8 to be faster; None: no number does."""
        saved = self.bf16_seconds - self.fp8_seconds
        if saved <= 0:
            return None
        more = self.fp8_prepare_seconds - self.bf16_prepare_seconds
        return max(1, math.floor(more / saved) + 1)

    def __str__(self) -> str:
        calls = self.calls_to_pay
        if calls is None:
            verdict = "does not pay"
        elif calls == 1:
            verdict = "pays, even where every call quantises the weights"
        else:
            verdict = f"pays where {calls} calls or more share prepared experts"
        return (
            f"FP8 {verdict}: expected {self.prepared_ratio:.2f} times as fast as bf16 with experts "
            f"prepared, {self.every_call_ratio:.2f} times where each call prepares them"
        )


def not_measured(cfg: MoEConfig, model_dim: int, expert_dim: int) -> str | None:
    """Why the times below do not hold for a layer on Hopper, if so."""
    if not has_fused_kernels(cfg.glu):
        return "its activation has fused kernels in bf16 and none in FP8"
    for name, width in (("H", model_dim), ("I", expert_dim)):
        if padded(width) != width:
            return f"{name} = {width} is no multiple of 16, so FP8 would copy and pad its operands"
    if gpu_path() != "auto":
        return "the environment variable DROPLESS_GPU_PATH asks for kernels that have no FP8"
    return None


def fp8_choice(
    cfg: MoEConfig,
    tokens: int,
    model_dim: int,
    expert_dim: int,
    param_bytes: int,
    device: jax.Device | NamedDevice,
) -> Fp8Choice | None:
    """Times of a layer of T tokens, shared expert included; None where nothing is known of them.

    ``param_bytes``: of one of the experts' parameters.
    """
    if not has_fp8(device) or tokens == 0 or not_measured(cfg, model_dim, expert_dim):
        return None
    measured = KNOWN[_MEASURED_ON]
    rates = rates_of(device) or measured
    slower = measured.flops["bf16"] / rates.flops["bf16"], measured.bandwidth / rates.bandwidth
    groups = [(tokens * cfg.experts_per_token, expert_dim, cfg.num_experts)]
    if cfg.shared_expert_dim is not None:
        groups.append((tokens, cfg.shared_expert_dim, 1))
    bf16 = saved = weights = 0.0
    for m, i, e in groups:
        bf16 += _BF16.seconds(m, model_dim, i, e, slower)
        saved += _SAVED.seconds(m, model_dim, i, e, slower)
        weights += 3 * e * model_dim * i
    moved = slower[1] * weights * (param_bytes + 2)
    prepare = {name: moved / rate for name, rate in _PREPARE_RATES.items()}
    # Far from all that was measured, FLOPs' own ratio is a bound that the fit does not know.
    fp8 = max(bf16 - saved, bf16 / 2)
    cast = 0.0 if param_bytes == 2 else prepare["bf16"]
    return Fp8Choice(bf16, fp8, cast, prepare["fp8"])
