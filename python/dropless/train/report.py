"""The report at a run's end: ``report.png`` and a self-contained ``report.html``."""

from __future__ import annotations

import base64
import dataclasses
import html
import importlib.metadata
import os
import pathlib
import statistics
import sys
from typing import Any

from dropless.train.config import RunConfig, to_json
from dropless.train.device import Device
from dropless.train.metrics import max_over_mean, read_metrics
from dropless.train.plots import draw_report

# Steps averaged for the training loss that the report calls final: one step's loss is noisy.
FINAL_STEPS = 20
_PACKAGES = ("dropless", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
color: #222; }} img {{ width: 100%; }}
table {{ border-collapse: collapse; margin: 0 0 1.5rem; }}
td, th {{ padding: .15rem 1.2rem .15rem 0; text-align: left; border-bottom: 1px solid #ddd;
vertical-align: top; }} h2 {{ font-size: 1.1rem; margin: 1.5rem 0 .3rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<table>{results}</table>
<img alt="Loss curves, expert load and step time" src="data:image/png;base64,{picture}">
<h2>Parts of a step</h2>
<p>Forward, backward and all layers, each part timed alone on this machine; a whole step's median is
beside them.</p> <table>{parts}</table>
<h2>Where this process spent its time</h2>
<table>{clock}</table>
<h2>Device and versions</h2>
<table>{device}</table>
<h2>Settings</h2>
<table>{settings}</table>
</body>
</html>
"""


def write_report(
    out: pathlib.Path,
    config: RunConfig,
    device: Device,
    clock: dict[str, float],
    parts: dict[str, float],
) -> str:
    """Writes both files from ``metrics.jsonl``; returns the result in words.

    ``clock`` is this process's wall time by activity and ``parts`` a step's time by part, in
    seconds.
    """
    records = read_metrics(out)
    results = _results(records, config)
    title = f"dropless-train: {config.preset}, {config.ffn}"
    picture = draw_report(records, config, parts, title, " · ".join(_headline(results, device)))
    step_seconds = statistics.median(record["step_seconds"] for record in records)
    page = _PAGE.format(
        title=html.escape(title),
        results=_rows(results),
        picture=base64.b64encode(picture).decode(),
        parts=_rows(
            {name: _milliseconds(seconds) for name, seconds in parts.items()}
            | {"sum of the parts": _milliseconds(sum(parts.values()))}
            | {"a whole step (median of all)": _milliseconds(step_seconds)}
        ),
        clock=_rows({name: f"{seconds:.2f} s" for name, seconds in clock.items()}),
        device=_rows(_device(device)),
        settings=_rows(to_json(config)),
    )
    _write(out / "report.png", picture)
    _write(out / "report.html", page.encode())
    lines = [f"  {name}: {value}" for name, value in results.items()]
    return "\n".join([*lines, f"  report: {out / 'report.html'}, {out / 'report.png'}"])


def _results(records: list[dict[str, Any]], config: RunConfig) -> dict[str, str]:
    last = records[-FINAL_STEPS:]
    held_out = [record["held_out_loss"] for record in records if "held_out_loss" in record]
    step_seconds = statistics.median(record["step_seconds"] for record in records)
    results = {
        "steps": f"{records[-1]['step']:,}",
        "training loss": f"{statistics.fmean(record['loss'] for record in last):.3f} nats per byte "
        f"(mean of the last {len(last)} steps)",
        "held-out loss": f"{held_out[-1]:.3f} nats per byte",
        "speed": f"{config.tokens_per_step / step_seconds:,.0f} tokens/s, "
        f"{_milliseconds(step_seconds)} a step (median)",
    }
    if config.ffn == "moe":
        results["dropped tokens"] = (
            f"{sum(record['dropped_tokens'] for record in records):,} in all steps"
        )
        loads = [max_over_mean(counts) for record in last for counts in record["expert_counts"]]
        results["busiest expert"] = (
            f"{statistics.fmean(loads):.2f} times the mean load (last {len(last)} steps)"
        )
    return results


def _headline(results: dict[str, str], device: Device) -> list[str]:
    chosen = [
        f"{name} {results[name].split(' (')[0]}" for name in ("training loss", "held-out loss")
    ]
    return [*chosen, results["speed"], f"{device.count} x {device.kind}"]


def _device(device: Device) -> dict[str, str]:
    rows = {
        name: str(value) for name, value in dataclasses.asdict(device).items() if value is not None
    }
    rows["python"] = sys.version.split()[0]
    for package in _PACKAGES:
        try:
            rows[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # run from a source tree
    return rows


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _rows(values: dict[str, Any]) -> str:
    return "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>\n"
        for name, value in values.items()
    )


def _write(path: pathlib.Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
