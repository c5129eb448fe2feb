"""What a run writes down as it goes: ``metrics.jsonl`` and TensorBoard events."""

from __future__ import annotations

import json
import math
import os
import pathlib
import time
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dropless.train.errors import UserError
from dropless.train.folder import METRICS_FILE

EVENTS_FOLDER = "tensorboard"


def make_record(
    step: int, figures: dict[str, Any], seconds: float, tokens: int, scale: float
) -> dict[str, Any]:
    """One line of ``metrics.jsonl`` as plain numbers.

    ``figures`` are a step's fetched results (see ``step.loss_function``), ``seconds`` the step's
    wall time, ``tokens`` its tokens, ``scale`` the bytes a token stands for: losses are in nats a
    byte. Without experts their figures are ``None`` and ``expert_counts`` is empty.
    """
    record = {
        "step": step,
        "loss": _number(figures["loss"] / scale),
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "lr": _number(figures["learning_rate"]),
        "grad_norm": _number(figures["grad_norm"]),
    }
    for name in ("load_balance_loss", "z_loss"):
        record[name] = _number(figures[name]) if name in figures else None
    record["dropped_tokens"] = (
        int(figures["dropped_tokens"]) if "dropped_tokens" in figures else None
    )
    record["expert_counts"] = (
        figures["expert_counts"].tolist() if "expert_counts" in figures else []
    )
    return record


def _number(value: Any) -> float | None:
    """A float that JSON can hold; what is not finite becomes null."""
    value = float(value)
    return value if math.isfinite(value) else None


def read_metrics(out: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a run, in order; a last line that a kill cut short is left out."""
    path = out / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    if lines[-1]:
        lines[-1] = b""
    try:
        records = [json.loads(line) for line in lines if line]
        for record in records:
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError(f"{str(record)[:40]} is no record of a step")
        return records
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}.") from error


class MetricsLog:
    """Appends records to ``metrics.jsonl``."""

    def __init__(self, out: pathlib.Path, resume_after: int):
        """Opens the log; records after step ``resume_after`` are dropped: those run again."""
        path = out / METRICS_FILE
        kept = [record for record in read_metrics(out) if record["step"] <= resume_after]
        temporary = path.with_suffix(".tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Returns once every record is on disk; called before each checkpoint, so that a checkpoint
        is never ahead of the log."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Events:
    """TensorBoard scalars of the same records."""

    def __init__(self, out: pathlib.Path, resume_after: int):
        """Starts an event file; it hides earlier files' events after ``resume_after``."""
        self._writer = EventFileWriter(str(out / EVENTS_FOLDER))
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(
            Event(wall_time=time.time(), step=resume_after + 1, session_log=start)
        )

    def write(self, record: dict[str, Any]) -> None:
        """Queues one record's scalars."""
        scalars = {
            f"train/{name}": record[name]
            for name in ("loss", "grad_norm", "lr", "tokens_per_second")
        }
        scalars["held_out/loss"] = record.get("held_out_loss")
        for name in ("load_balance_loss", "z_loss", "dropped_tokens"):
            scalars[f"experts/{name}"] = record[name]
        for layer, counts in enumerate(record["expert_counts"]):
            scalars[f"experts/layer_{layer}_max_over_mean"] = max_over_mean(counts)
        values = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars.items()
            if value is not None
        ]
        event = Event(wall_time=time.time(), step=record["step"], summary=Summary(value=values))
        self._writer.add_event(event)

    def close(self) -> None:
        """Writes what is queued and closes the file."""
        self._writer.close()


def max_over_mean(counts: list[int]) -> float:
    """How many times the mean load the busiest expert carries; 1 is perfect balance."""
    return max(counts) * len(counts) / max(sum(counts), 1)
