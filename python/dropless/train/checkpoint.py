"""Checkpoints that a kill at any moment leaves usable."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from dropless.train.errors import UserError
from dropless.train.folder import CHECKPOINT_FOLDER

# The newest, and two to fall back on.
_KEPT = 3


def check_folder(out: pathlib.Path, recorded: int) -> None:
    """Raises ``UserError`` if a run that has recorded steps has lost its folder of checkpoints."""
    folder = out / CHECKPOINT_FOLDER
    if recorded and not folder.exists():
        raise UserError(
            f"{folder} is missing, although the run has recorded {recorded} steps; put the folder "
            f"back, or start a new run with another --out."
        )


class Checkpoints:
    """Saves and restores a run's whole state: parameters, optimiser, step and position in the data.

    Orbax writes a checkpoint under a temporary name and renames it when it is complete, so an
    interrupted save is as if it had not begun.
    """

    def __init__(self, out: pathlib.Path):
        self._folder = (out / CHECKPOINT_FOLDER).absolute()
        if self._folder.exists() and not self._folder.is_dir():
            raise UserError(f"{self._folder} is a file, not a folder of checkpoints.")
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_KEPT,
            cleanup_tmp_directories=True,  # what an interrupted save left
            # On a CPU the arrays are written from where they lie, and the next step reuses that
            # memory; elsewhere the copy from the device lets the step go on during the write.
            enable_async_checkpointing=jax.default_backend() != "cpu",
        )
        return ocp.CheckpointManager(self._folder, options=options, item_names=("state", "data"))

    def save(self, step: int, state: dict[str, Any], data_state: dict[str, Any]) -> None:
        """Stores the state after ``step``; does nothing if that is the newest already."""
        if self._manager.latest_step() == step:
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data_state)
            ),
        )

    def restore(
        self, like: dict[str, Any], say: Callable[[str], None]
    ) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """The newest readable checkpoint as ``(step, state, data state)``, or ``None`` if there is
        none yet.

        ``like`` gives shapes, dtypes and shardings. A checkpoint that cannot be read is set aside
        with a message and the one before is taken.

        Raises:
          UserError: there are checkpoints, but none can be read.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        for step in steps:
            try:
                restored = self._manager.restore(
                    step,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore()
                    ),
                )
            except Exception as error:  # whatever a damaged file makes of the reader
                say(
                    f"checkpoint {step} is unreadable ({_first_line(error)}); trying the one before"
                )
                continue
            self._set_aside([bad for bad in steps if bad > step])
            return step, restored["state"], restored["data"]
        if steps:
            raise UserError(f"none of the checkpoints {steps} in {self._folder} can be read.")
        return None

    def _set_aside(self, steps: list[int]) -> None:
        """Moves unreadable checkpoints out of the way of the steps that will be saved again."""
        if not steps:
            return
        self._manager.close()
        for step in steps:
            target, number = self._folder.parent / f"unreadable-checkpoint-{step}", 1
            while target.exists():
                target, number = (
                    target.with_name(f"unreadable-checkpoint-{step}.{number}"),
                    number + 1,
                )
            (self._folder / str(step)).rename(target)
        self._manager = self._open()

    def close(self) -> None:
        """Returns once every save is complete."""
        self._manager.wait_until_finished()
        self._manager.close()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
