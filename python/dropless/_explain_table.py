"""An ``Explanation`` as a table that a person reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dropless._explain import Explanation


def table(e: Explanation) -> str:
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
