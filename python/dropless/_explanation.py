"""What ``explain`` tells, and the table that a person reads of it."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from dropless._config import MoEConfig
from dropless._fp8_model import Fp8Choice


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One matrix product of the layer.

    Attributes:
      name: what it computes.
      kernel: the kernel that runs it.
      tile: sizes of the tile of the result, and the depth of the contraction taken at a time, where
        they are known before the call.
      reason: why this kernel.
      flops: two for each multiplication; ``[a,b] x [b,c]`` has 2abc.
      bytes: that must at least move between memory and the device: each operand once, each result
        once, the weights of min(E, M) experts.
      floor_seconds: the time that no implementation beats, the larger of FLOPs over the device's
        peak and bytes over its bandwidth; None for a device whose rates are not known.
    """

    name: str
    kernel: str
    tile: tuple[int, ...] | None
    reason: str
    flops: int
    bytes: int
    floor_seconds: float | None


@dataclasses.dataclass(frozen=True)
class Array:
    """An array that the layer keeps or makes.

    Attributes:
      name: its name in the architecture notes.
      shape: its shape.
      dtype: its dtype's name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a layer does and costs; ``print`` shows it as a table.

    Attributes:
      config: the layer.
      tokens, model_dim, expert_dim: T, H and I. ``rows`` is M = T * K.
      device: name of the device.
      platform: of the device: ``"cpu"``, ``"gpu"``.
      precision: of the GEMMs' operands.
      precision_reason: why.
      forward, backward: the GEMMs in order.
      saved: what is kept between forward and backward beside the parameters.
      workspaces: the scratch of each call that has one, in order. A program has the same on every
        device, but a CPU does not touch them; each is needed during its call alone.
      fp8: whether FP8 is expected to pay here, requantisation counted; None where the device has no
        FP8, or where nothing like the layer was measured.
    """

    config: MoEConfig
    tokens: int
    model_dim: int
    expert_dim: int
    device: str
    platform: str
    precision: str
    precision_reason: str
    forward: tuple[Gemm, ...]
    backward: tuple[Gemm, ...]
    saved: tuple[Array, ...]
    workspaces: tuple[Array, ...]
    fp8: Fp8Choice | None

    @property
    def rows(self) -> int:
        """M = T * K."""
        return self.tokens * self.config.experts_per_token

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """All GEMMs, forward first."""
        return self.forward + self.backward

    @property
    def flops(self) -> int:
        """Of all GEMMs, forward and backward."""
        return sum(gemm.flops for gemm in self.gemms)

    @property
    def floor_seconds(self) -> float | None:
        """Sum of the GEMMs' floors; None for a device whose rates are not known."""
        floors = [gemm.floor_seconds for gemm in self.gemms]
        return None if None in floors else sum(floors)

    @property
    def saved_bytes(self) -> int:
        """Of all saved activations, x included."""
        return sum(array.bytes for array in self.saved)

    @property
    def workspace_bytes(self) -> int:
        """Of all workspaces, forward and backward together."""
        return sum(array.bytes for array in self.workspaces)

    @property
    def largest_workspace_bytes(self) -> int:
        """Of the largest workspace: what is needed at a time where calls run one by one."""
        return max(array.bytes for array in self.workspaces)

    def __str__(self) -> str:
        return _table(self)


def _table(e: Explanation) -> str:
    cfg = e.config
    lines = [
        f"MoE layer on {e.device}: T {e.tokens}, H {e.model_dim}, E {cfg.num_experts}, "
        f"K {cfg.experts_per_token}, I {e.expert_dim}, M {e.rows}",
        f"precision {e.precision} ({e.precision_reason})",
        "",
    ]
    rows = [("GEMM", "kernel", "tile", "GFLOP", "MB", "floor ms")]
    for gemm in e.gemms:
        tile = "x".join(map(str, gemm.tile)) if gemm.tile else "-"
        figures = (f"{gemm.flops / 1e9:.4g}", f"{gemm.bytes / 1e6:.4g}", _ms(gemm.floor_seconds))
        rows.append((gemm.name, gemm.kernel, tile, *figures))
    total = sum(gemm.bytes for gemm in e.gemms)
    figures = (f"{e.flops / 1e9:.4g}", f"{total / 1e6:.4g}", _ms(e.floor_seconds))
    rows.append(("all", "", "", *figures))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        left = "  ".join(cell.ljust(w) for cell, w in zip(row[:3], widths[:3], strict=True))
        right = "  ".join(cell.rjust(w) for cell, w in zip(row[3:], widths[3:], strict=True))
        lines.append(f"{left}  {right}")
    lines.append("")
    for reason in dict.fromkeys(gemm.reason for gemm in e.gemms):
        kernels = dict.fromkeys(gemm.kernel for gemm in e.gemms if gemm.reason == reason)
        lines.append(f"{', '.join(kernels)}: {reason}")
    if e.floor_seconds is None:
        lines.append(f"floor: unknown, the peak rates of {e.device} are not in the table")
    if e.fp8 is not None:
        lines.append(str(e.fp8))
    lines.append("")
    lines.append(f"saved for backward: {e.saved_bytes / 1e6:.4g} MB")
    lines += [
        f"  {array.name} {list(array.shape)} {array.dtype}: {array.bytes / 1e6:.4g} MB"
        for array in e.saved
    ]
    untouched = ", which a CPU does not touch" if e.platform == "cpu" else ""
    lines.append(
        f"workspaces{untouched}: {e.workspace_bytes / 1e6:.4g} MB in all, the largest "
        f"{e.largest_workspace_bytes / 1e6:.4g} MB"
    )
    lines += [f"  {array.name}: {array.bytes / 1e6:.4g} MB" for array in e.workspaces]
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.4g}"
