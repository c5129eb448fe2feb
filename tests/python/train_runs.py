"""What the tests of the training program share: a small model, a text, and ways to run it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import dropless

# Sizes all different, so that swapped axes cannot pass: 2 layers, H 24, 3 heads, E 5, K 2, I 20.
SMALL = [
    *("--layers", "2", "--model-dim", "24", "--heads", "3"),
    *("--num-experts", "5", "--experts-per-token", "2", "--expert-dim", "20"),
    *("--seq-len", "16", "--batch-size", "4"),
]
LAYERS, EXPERTS, TOKENS, CHOICES = 2, 5, 64, 128  # T = 4 * 16, T * K

# What differs between two runs of one config: the clock.
TIMES = ("tokens_per_second", "step_seconds")


def write_text(path: pathlib.Path, lines: int = 600) -> pathlib.Path:
    """A small text with some structure: about 40 bytes a line, no two lines alike."""
    path.write_text("".join(f"line {i}: {i * i} is the square of {i}.\n" for i in range(lines)))
    return path


def records(out: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def untimed(out: pathlib.Path) -> list[dict[str, Any]]:
    """The records without what the clock decides."""
    return [{k: v for k, v in record.items() if k not in TIMES} for record in records(out)]


def run_program(*arguments: Any, code: str | None = None) -> subprocess.CompletedProcess:
    """Runs the program in a process of its own, on the CPU; ``code`` runs before it."""
    package = pathlib.Path(dropless.__file__).parent.parent
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")]),
    }
    start = ["-m", "dropless.train"]
    if code is not None:
        start = ["-c", f"import sys\n{code}\nfrom dropless.train.cli import main\nsys.exit(main())"]
    command = [sys.executable, *start, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
