"""The picture of a run: loss curves, the parts of a step, each layer's expert load over time."""

from __future__ import annotations

import io
import statistics
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from dropless.train.config import RunConfig

# Columns of a heat map: about one pixel each at the picture's size.
_MOST_COLUMNS = 240
_MAPS_A_ROW = 4
_TRAIN, _HELD_OUT, _SMOOTH = "#9ecae1", "#d94801", "#08519c"
_PARTS = ("#08519c", "#4292c6", "#9ecae1", "#c6dbef", "#bdbdbd")
# Steps that the drawn trend of the training loss is averaged over, as a part of all steps.
_TREND_PART = 25


def draw_report(
    records: list[dict[str, Any]],
    config: RunConfig,
    parts: dict[str, float],
    title: str,
    subtitle: str,
) -> bytes:
    """The picture as the bytes of a PNG."""
    layers = len(records[0]["expert_counts"])
    rows = -(-layers // _MAPS_A_ROW)
    figure = Figure(figsize=(14, 4.8 + 3.2 * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=15, fontweight="bold")
    upper, *lower = figure.subfigures(
        1 + (rows > 0), 1, height_ratios=[4.2] + [3.2 * rows] * (rows > 0), squeeze=False
    )[:, 0]
    loss_axes, time_axes = upper.subplots(1, 2, width_ratios=[2, 1])
    upper.suptitle(subtitle, fontsize=10, color="#555555")
    _draw_loss(loss_axes, records)
    _draw_parts(time_axes, records, parts)
    if rows:
        _draw_loads(lower[0], records, config, rows)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_loss(axes: Axes, records: list[dict[str, Any]]) -> None:
    steps = np.array([record["step"] for record in records])
    loss = np.array([record["loss"] for record in records])
    width = max(1, len(loss) // _TREND_PART)
    trend = np.convolve(loss, np.ones(width) / width, mode="valid")
    axes.plot(steps, loss, color=_TRAIN, linewidth=1, label="training, each step")
    axes.plot(
        steps[width - 1 :],
        trend,
        color=_SMOOTH,
        linewidth=1.8,
        label=f"training, mean of {width} steps",
    )
    looked = [
        (record["step"], record["held_out_loss"]) for record in records if "held_out_loss" in record
    ]
    axes.plot(*zip(*looked, strict=True), "o-", color=_HELD_OUT, markersize=4, label="held out")
    axes.annotate(
        f"{looked[-1][1]:.3f}",
        looked[-1],
        xytext=(0, 10),
        textcoords="offset points",
        color=_HELD_OUT,
        ha="right",
    )
    # The first steps fall from log(256) and would flatten the rest of the curve.
    axes.set_ylim(
        min(loss.min(), min(value for _, value in looked)) * 0.95, np.quantile(loss, 0.985) * 1.05
    )
    axes.set(title="Loss", xlabel="step", ylabel="nats per byte")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_parts(axes: Axes, records: list[dict[str, Any]], parts: dict[str, float]) -> None:
    step = statistics.median(record["step_seconds"] for record in records) * 1e3
    names = list(parts)
    values = [parts[name] * 1e3 for name in names]
    bars = axes.barh(names, values, color=_PARTS[: len(names)])
    axes.bar_label(bars, [f"{value:,.1f} ms ({value / step:.0%})" for value in values], padding=4)
    axes.axvline(step, color="#555555", linestyle="--", linewidth=1)
    axes.text(
        step,
        len(names) - 0.45,
        f"whole step {step:,.1f} ms",
        ha="right",
        va="bottom",
        color="#555555",
    )
    axes.invert_yaxis()
    axes.set_xlim(0, max(step, *values) * 1.35)
    axes.set(title="Parts of a step, each timed alone", xlabel="ms")
    axes.spines[["top", "right"]].set_visible(False)


def relative_load(records: list[dict[str, Any]], columns: int = _MOST_COLUMNS) -> np.ndarray:
    """Expert load over time ``[layers, E, columns]``, 1 the mean; close steps are averaged."""
    counts = np.array(
        [record["expert_counts"] for record in records], np.float64
    )  # [steps, layers, E]
    load = counts / np.maximum(counts.mean(axis=-1, keepdims=True), 1)
    buckets = np.array_split(load, min(columns, len(load)))
    return np.stack([bucket.mean(axis=0) for bucket in buckets], axis=-1)


def _draw_loads(figure: Any, records: list[dict[str, Any]], config: RunConfig, rows: int) -> None:
    load = relative_load(records)
    layers, experts, _ = load.shape
    top = max(2.0, float(np.quantile(load, 0.995)))
    norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=top)
    across = min(layers, _MAPS_A_ROW)
    axes = figure.subplots(rows, across, squeeze=False, sharex=True, sharey=True)
    figure.suptitle("Expert load over the run (1 = the mean)", fontsize=12)
    # A column is centred on its step, so that a run of one step has a width too.
    extent = (records[0]["step"] - 0.5, records[-1]["step"] + 0.5, experts - 0.5, -0.5)
    image = None
    for layer, panel in enumerate(axes.flat):
        if layer >= layers:
            panel.set_visible(False)
            continue
        image = panel.imshow(
            load[layer],
            aspect="auto",
            cmap="RdBu_r",
            norm=norm,
            extent=extent,
            interpolation="nearest",
        )
        panel.set_title(f"layer {layer}", fontsize=10)
        if experts <= 16:
            panel.set_yticks(range(experts))
    for panel in axes[-1]:
        panel.set_xlabel("step")
    for panel in axes[:, 0]:
        panel.set_ylabel("expert")
    figure.colorbar(
        image, ax=axes, extend="max", label="tokens over the mean", shrink=0.9, pad=0.01
    )
