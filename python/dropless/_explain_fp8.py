"""Whether FP8 pays on a layer, by what its products and its quantisers must do at least."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fp8Choice:
    """FP8 beside bf16 for a layer's routed experts and router, in seconds that nothing beats.

    Attributes:
      bf16_seconds: the bf16 layer with its experts prepared.
      fp8_seconds: the FP8 layer with its experts prepared; x, dy and, with
        ``wgrad_precision="fp8"``, all operands of the weight gradients are quantised in it.
      bf16_prepare_seconds: ``prepare_experts`` in bf16, a cast; 0 for bfloat16 parameters.
      fp8_prepare_seconds: ``prepare_experts`` in FP8: weights are read once, and written in both
        orientations.
    """

    bf16_seconds: float
    fp8_seconds: float
    bf16_prepare_seconds: float
    fp8_prepare_seconds: float

    @property
    def prepared_ratio(self) -> float:
        """How many times faster FP8 can be, with experts prepared beforehand."""
        return self.bf16_seconds / self.fp8_seconds

    @property
    def every_call_ratio(self) -> float:
        """The same where every call prepares the experts."""
        bf16 = self.bf16_seconds + self.bf16_prepare_seconds
        return bf16 / (self.fp8_seconds + self.fp8_prepare_seconds)

    def __str__(self) -> str:
        if self.every_call_ratio > 1:
            verdict = "can pay, even where every call quantises the weights"
        elif self.prepared_ratio > 1:
            verdict = "can pay only with experts prepared once for several calls"
        else:
            verdict = "does not pay: it moves more than it saves"
        return (
            f"FP8 {verdict}: at most {self.prepared_ratio:.2f} times bf16 with experts prepared, "
            f"{self.every_call_ratio:.2f} times when each call prepares them"
        )


def moved_by_quantisers(*, t, h, i, m, parts, x_bytes, wgrad_fp8) -> int:
    """Bytes that an FP8 layer's quantisers of activations read and write, scales left out."""
    # x and dy once per token. What a product reads of them again is counted with the product.
    moved = 2 * t * h * (x_bytes + 1)
    if wgrad_fp8:
        # From bfloat16 to codes: x and dy, gathered, and dh and p * A in their rows.
        moved += 2 * (2 * t * h + m * h) + (parts + 1) * m * i * 3
    return moved


def moved_by_preparing(*, e, h, i, parts, param_bytes) -> tuple[int, int]:
    """Bytes that ``prepare_experts`` moves in bf16 and in FP8."""
    weights = (parts + 1) * e * h * i
    return (0 if param_bytes == 2 else weights * (param_bytes + 2)), weights * (param_bytes + 2)
