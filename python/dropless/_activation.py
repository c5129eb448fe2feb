"""What stands between an expert's matrices."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from dropless._checks import check_flag, check_one_of, check_real, unwrap_numbers

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")


@dataclasses.dataclass(frozen=True)
class Activation:
    """How an expert's pre-activations become A, what its down matrix multiplies.

    Gated: A = act(g) * (u + up_offset), with g = min(gate(x), gate_limit) and u = up(x) cut to
    [-up_limit, up_limit]. Not gated: A = act(g). Beyond a limit the gradient is 0, at it not yet.
    gpt-oss: ``Activation("silu", slope=1.702, gate_limit=7.0, up_limit=7.0, up_offset=1.0)``.

    Attributes:
      kind: act: ``"silu"``, z * sigmoid(slope * z); ``"gelu"``, by erf; ``"gelu_tanh"``, its tanh
        approximation; ``"relu"``; ``"relu_squared"``, max(z, 0)^2 (arXiv 2109.08668).
      gated: False: experts have no up matrix.
      slope: of the sigmoid in ``"silu"``.
      gate_limit, up_limit: None: no limit.
      up_offset: added to u.
    """

    kind: Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"] = "silu"
    _: dataclasses.KW_ONLY
    gated: bool = True
    slope: float = 1.0
    gate_limit: float | None = None
    up_limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self):
        unwrap_numbers(self)
        check_one_of("activation", self.kind, ACTIVATIONS)
        check_flag("Activation.gated", self.gated)
        check_real("Activation.slope", self.slope, positive=True)
        for name in ("gate_limit", "up_limit"):
            if getattr(self, name) is not None:
                check_real(f"Activation.{name}", getattr(self, name), positive=True)
        offset = self.up_offset
        check_real(
            "Activation.up_offset", -offset if _is_negative(offset) else offset, positive=False
        )
        if self.slope != 1 and self.kind != "silu":
            raise ValueError(
                f'Activation.slope is of "silu" only; got slope={self.slope} and '
                f"kind={self.kind!r}."
            )
        if not self.gated and (self.up_limit is not None or self.up_offset != 0):
            raise ValueError(
                f"Activation.up_limit and up_offset need gated=True; got up_limit={self.up_limit} "
                f"and up_offset={self.up_offset}."
            )

    @property
    def parts(self) -> int:
        """Pre-activations for each element of A: gate and up, or one."""
        return 2 if self.gated else 1


def _is_negative(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0
