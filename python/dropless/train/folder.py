"""The folder of a run: whether it can be used, and by whom."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from dropless.train.config import RUN_FILE
from dropless.train.errors import UserError

CHECKPOINT_FOLDER = "checkpoints"
METRICS_FILE = "metrics.jsonl"
REPORT_FILES = ("report.html", "report.png")


def refuse_used_folder(out: pathlib.Path) -> None:
    """Raises ``UserError`` if ``out`` holds what a run has made, or cannot be written.

    A run leaves its settings with its first recorded step. One that failed before, for want of
    memory, leaves nothing to lose, and its folder can be used again.
    """
    try:
        if out.exists() and not out.is_dir():
            raise UserError(f"--out {out} is a file, not a folder.")
        found = next(_traces(out), None)
        if found is not None:
            raise UserError(
                f"--out {out} already holds a run ({found}); add --resume to continue it, "
                f"or name another folder."
            )
        existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    except OSError as error:
        raise UserError(f"--out {out} cannot be used: {error.strerror}.") from error
    if not existing.is_dir():
        raise UserError(f"--out {out} cannot be written: {existing} is a file, not a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--out {out} cannot be written: permission denied in {existing}.")


def _traces(out: pathlib.Path) -> Iterator[str]:
    """Names of what a run that began leaves in its folder."""
    for name in (RUN_FILE, *REPORT_FILES):
        if (out / name).exists():
            yield name
    metrics, checkpoints = out / METRICS_FILE, out / CHECKPOINT_FOLDER
    if metrics.exists() and (not metrics.is_file() or metrics.stat().st_size):
        yield METRICS_FILE
    if checkpoints.exists() and (not checkpoints.is_dir() or any(checkpoints.iterdir())):
        yield CHECKPOINT_FOLDER


@contextlib.contextmanager
def locked(out: pathlib.Path) -> Iterator[None]:
    """Makes ``out`` and keeps a second process from training in it at the same time."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / ".lock", "w")  # noqa: SIM115 - closed below, after the checks
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another process is training in {out}.") from error
        yield
