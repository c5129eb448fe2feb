"""What the tests of the training program share: a small model, a text, and ways to run it."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

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


@contextlib.contextmanager
def compiled_once(folder: pathlib.Path) -> Iterator[None]:
    """Runs of one config, in this process or another, compile once: most of a short run's time."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(names, (str(folder), 0.0), strict=True):
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        compilation_cache.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


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
