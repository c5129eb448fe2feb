"""What every benchmark shares: the machine's description and interleaved timing."""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parent.parent


def _first_line(command: list[str]) -> str | None:
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip().splitlines()[0] if out.stdout.strip() else None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _cpu_features() -> list[str]:
    wanted = {"avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16"}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return sorted(wanted & set(line.split()))
    return []


def environment(command: str) -> dict:
    """The machine, versions and commit that figures are worth nothing without."""
    import dropless

    query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit"
    gpu = None
    if jax.default_backend() == "gpu":
        gpu = _first_line(["nvidia-smi", query, "--format=csv,noheader"])
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": _first_line(["git", "-C", str(ROOT), "rev-parse", "HEAD"]) or "unknown",
        "backend": jax.default_backend(),
        "gpu": gpu,
        "cpu": _cpu_model(),
        "cpu_features": _cpu_features(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": __import__("jaxlib").__version__,
        "dropless": dropless.__version__,
        # Paths say where somebody's files lie, not what was measured.
        "info": [line for line in str(dropless.info()).splitlines() if "library" not in line],
    }


# A call slower than this is not called once more untimed before it is timed: what the variant
# before it left to be done is small beside it.
SLOW_CALL_MS = 2000.0


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    seconds: float,
    warmup: int = 2,
) -> dict[str, dict]:
    """Times the variants in turn, round after round, so that a slow moment hits all of them.

    Before a variant is timed it runs once untimed. XLA gives a program's temporary memory back
    after its results are ready: on a CPU the gigabytes of a `ragged_dot` were unmapped during the
    next call, whichever that was, which took three times as long as the calls after it.

    Args:
      variants: name -> a call that returns arrays to wait for.
      rounds: at most this many rounds.
      seconds: no new round begins after this much time; a variant always runs once at least.
      warmup: untimed calls of each variant first (compilation, caches).

    Returns:
      name -> {"median_ms", "min_ms", "max_ms", "rounds"}.
    """
    for call in variants.values():
        for _ in range(warmup):
            jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in variants}
    start = time.perf_counter()
    for _ in range(rounds):
        for name, call in variants.items():
            if not times[name] or times[name][-1] < SLOW_CALL_MS:
                jax.block_until_ready(call())
            begin = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append((time.perf_counter() - begin) * 1e3)
        if time.perf_counter() - start > seconds:
            break
    return {
        name: {
            "median_ms": statistics.median(values),
            "min_ms": min(values),
            "max_ms": max(values),
            "rounds": len(values),
        }
        for name, values in times.items()
    }


def write(path: str | Path, payload: dict) -> None:
    """Writes a result file; the folder must exist."""
    Path(path).write_text(json.dumps(payload, indent=1) + "\n")
