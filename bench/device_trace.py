"""What ran on the GPU during a call: kernels and copies with their times, from a profiler trace.

Device time has no time of the host in it: launches, Python, waiting.
"""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax


@dataclass(frozen=True)
class DeviceEvent:
    name: str
    start_us: float
    duration_us: float


def device_events(call: Callable[[], object], repeats: int) -> list[DeviceEvent]:
    """Events of all streams of the GPU while ``call`` runs ``repeats`` times, by their start."""
    jax.block_until_ready(call())  # compiled before
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                jax.block_until_ready(call())
        files = list(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(files[0]))
        events = [
            DeviceEvent(event.name, event.start_ns / 1e3, event.duration_ns / 1e3)
            for plane in data.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    return sorted(events, key=lambda event: event.start_us)


def device_time(call: Callable[[], object], repeats: int = 10, batches: int = 1) -> dict:
    """Events and device time of one of the ``batches`` that a call holds.

    Returns:
      {"events", "busy_us", "names", "us"}: events a batch, the sum of their durations, the median
      over the calls, how often each name appears in all batches of a call, and the time of each
      name in a batch, the mean over the calls.
    """
    events = device_events(call, repeats)
    if len(events) % repeats:
        raise RuntimeError(f"{len(events)} events in {repeats} calls: not every call runs the same")
    each = len(events) // repeats
    calls = [events[i * each : (i + 1) * each] for i in range(repeats)]
    names: dict[str, int] = {}
    for event in calls[0]:
        names[event.name] = names.get(event.name, 0) + 1
    spent: dict[str, float] = {}
    for event in events:
        spent[event.name] = spent.get(event.name, 0.0) + event.duration_us / (repeats * batches)
    busy = [sum(event.duration_us for event in one) / batches for one in calls]
    return {
        "events": each / batches,
        "busy_us": statistics.median(busy),
        "names": names,
        "us": spent,
    }
