"""The command line: flags to settings, errors to sentences."""

from __future__ import annotations

import argparse
import datetime
import errno
import io
import math
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from dropless.train import config as settings
from dropless.train.errors import UserError
from dropless.train.folder import refuse_used_folder

# 2 is what shells and argparse use for a mistake in the command.
_USAGE_ERROR = 2
# Seeds and step numbers are 64-bit in JAX and in checkpoints.
_LARGEST = 2**63 - 1
# float32, in which the program computes: from its smallest normal number to its largest.
_SMALLEST_REAL, _LARGEST_REAL = 2.0**-126, (2 - 2.0**-23) * 2.0**127
# What a folder or a disk may refuse in the middle of a run.
_DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM,
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as ``UserError`` instead of printing the usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message.rstrip(".") + "; --help lists the flags.")


def _whole(least: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not value.strip().removeprefix("-").isdecimal() or int(value) < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {least}, not {value!r}"
            )
        if int(value) > _LARGEST:
            raise argparse.ArgumentTypeError(f"must be at most {_LARGEST}, not {value!r}")
        return int(value)

    return parse


def _path(value: str) -> str:
    # An empty path would mean the current folder: most likely an unset variable of a shell.
    if not value or "\0" in value:
        raise argparse.ArgumentTypeError(f"must be a path, not {value!r}")
    return value


def _out_path(value: str) -> str:
    # TensorBoard's and Orbax's writers take names in UTF-8 alone, text files may have any.
    try:
        value.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"must be a path in UTF-8, not {value!r}") from None
    return _path(value)


def _positive(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not _SMALLEST_REAL <= number <= _LARGEST_REAL:  # false for NaN, too
        raise argparse.ArgumentTypeError(
            f"must be a positive number that float32 can hold, not {value!r}"
        )
    return number


def make_parser() -> argparse.ArgumentParser:
    """The flags, none with a default: what is not given is the preset's or the resumed run's."""
    parser = _Parser(
        prog="dropless-train",
        description="Train a small mixture-of-experts language model on text files.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--text",
        type=_path,
        nargs="+",
        metavar="PATH",
        help="files or folders (default: Python's own library)",
    )
    add(
        "--out",
        type=_out_path,
        metavar="DIR",
        help="folder for everything the run leaves (default: a new one in runs/)",
    )
    add(
        "--resume", action="store_true", help="continue the run in --out from its newest checkpoint"
    )
    add("--preset", metavar="NAME", help=f"one of {', '.join(settings.PRESETS)} (default: tiny)")
    add("--steps", type=_whole(1), metavar="N", help="stop after step N")
    add(
        "--seed",
        type=_whole(0),
        metavar="N",
        help="seed of the parameters and the data order (default: 0)",
    )
    add(
        "--ffn",
        choices=("moe", "dense"),
        help="mixture of experts, or a dense layer of the same cost",
    )
    add(
        "--precision", choices=("f32", "bf16", "fp8", "auto"), help="of the experts (default: auto)"
    )
    add(
        "--overflow",
        choices=("rounds", "drop"),
        help="what does not fit an expert: served in a further round, or dropped (default: rounds)",
    )
    add(
        "--expert-capacity-factor",
        type=_positive,
        metavar="F",
        help="room an expert has, over the mean load",
    )
    add("--mesh", metavar="AXES", help="devices along each axis, such as data=2")
    add(
        "--tokenizer",
        type=_path,
        metavar="FILE",
        help="JSON of the tokenizers library (default: bytes)",
    )
    add("--batch-size", "--batch", type=_whole(1), metavar="N", help="windows a step")
    add("--seq-len", "--seq", type=_whole(1), metavar="N", help="tokens a window")
    add("--learning-rate", "--lr", type=_positive, metavar="F", help="at its peak")
    add("--warmup-steps", type=_whole(0), metavar="N", help="steps to the peak")
    add(
        "--eval-every",
        type=_whole(1),
        metavar="N",
        help="steps between evaluations on held-out text",
    )
    add("--checkpoint-every", type=_whole(1), metavar="N", help="steps between checkpoints")
    for name in ("layers", "model-dim", "heads", "num-experts", "experts-per-token", "expert-dim"):
        add(f"--{name}", type=_whole(1), metavar="N", help="in place of the preset's")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal's encoding may lack the bars of the expert load, or a character of a file name.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return _run(argv)
    except UserError as error:
        print(f"dropless-train: error: {error}", file=sys.stderr)
    except Exception as error:
        refused = _refused_by_disk(error)
        if refused is not None:
            print(f"dropless-train: error: {refused}.", file=sys.stderr)
            return _USAGE_ERROR
        if not _is_out_of_memory(error):
            raise
        print(
            f"dropless-train: error: there is not enough memory ({error}); lower --batch-size, "
            f"--seq-len or the model's sizes.",
            file=sys.stderr,
        )
    return _USAGE_ERROR


def _refused_by_disk(error: Exception) -> str | None:
    """What a folder or a disk refused, in words; None if the error is another."""
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    # Orbax's writer is C++ and puts the number into the words of a ValueError.
    codes = [code for code in _DISK_ERRORS if f"os_error_code='{code}'" in str(error)]
    if not codes:
        return None
    return f"a checkpoint cannot be saved: {os.strerror(codes[0])}; --resume continues the run"


def _is_out_of_memory(error: Exception) -> bool:
    """Whether Python, or XLA in its own words, found too little memory."""
    if isinstance(error, MemoryError):
        return True
    import jax  # loaded by then: an error of XLA's can come from nowhere else

    said = str(error)
    words = ("RESOURCE_EXHAUSTED", "Out of memory")
    return isinstance(error, jax.errors.JaxRuntimeError) and any(w in said for w in words)


def _run(argv: Sequence[str] | None) -> int:
    given: dict[str, Any] = vars(make_parser().parse_args(argv))
    resuming = given.pop("resume", False)
    preset = given.pop("preset", None)
    out = _out_folder(given.pop("out", None), preset or "tiny", resuming)
    if "mesh" in given:
        given["mesh"] = settings.parse_mesh(given["mesh"])
    if "text" in given:
        given["text"] = tuple(os.path.abspath(path) for path in given["text"])
    if "tokenizer" in given:
        given["tokenizer"] = os.path.abspath(given["tokenizer"])
    if resuming:
        stored, fingerprint = settings.read_run_file(out)
        config = settings.resume(stored, preset, given, out)
    else:
        refuse_used_folder(out)
        config, fingerprint = settings.resolve(preset or "tiny", given), None
    try:
        from dropless.train.loop import train
    except ImportError as error:
        raise UserError(
            f"the package {error.name or error} is missing; "
            f'pip install "dropless[train]" adds what training needs.'
        ) from error
    return train(config, out, fingerprint)


def _out_folder(named: str | None, preset: str, resuming: bool) -> pathlib.Path:
    if named is not None:
        return pathlib.Path(named)
    if resuming:
        raise UserError("--resume needs --out DIR, the folder of the run to continue.")
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return pathlib.Path("runs") / f"{preset}-{now}"
