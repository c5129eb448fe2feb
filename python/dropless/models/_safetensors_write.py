"""Tensors written to safetensors files one at a time, whatever their number and size.

The header stands in front of the tensors and names them all. Its room is kept free until a file is
complete; what is left of it is filled with spaces, which the format allows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from dropless.models._safetensors import DTYPES, INDEX, LENGTH_BYTES, SINGLE

# Of each file; names and shapes of about five thousand tensors.
_HEADER_BYTES = 1 << 20
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_FORMAT = {"__metadata__": {"format": "pt"}}  # what transformers asks of a file


def save_checkpoint(
    folder: str | Path,
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    file_bytes: int = 5_000_000_000,
) -> None:
    """Writes tensors as a checkpoint that ``open_checkpoint`` and transformers read.

    One file is ``model.safetensors``; several are ``model-00001-of-0000N.safetensors`` with their
    index. They get these names once all is written, the index last.

    Args:
      folder: made if it is missing; must not hold a checkpoint yet.
      tensors: names and arrays, such as those of ``to_hf``. An iterator of pairs is read one pair
        at a time, and no tensor is held after it was written.
      file_bytes: about the most that a file holds; a larger tensor has a file of its own.

    Raises:
      FileExistsError: the folder holds a checkpoint.
      ValueError: a name comes twice, there is no tensor, or an array's dtype is not of the format.
    """
    folder = Path(folder)
    if not isinstance(file_bytes, int) or file_bytes < 1:
        raise ValueError(f"file_bytes: expected an int >= 1, got {file_bytes!r}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in INDEX, SINGLE:
        if (folder / name).exists():
            raise FileExistsError(f"{folder / name}: exists; expected a folder without checkpoint")
    pairs = iter(tensors.items() if isinstance(tensors, Mapping) else tensors)
    parts: list[dict[str, Any]] = []
    written: set[str] = set()
    try:
        pending = next(pairs, None)
        if pending is None:
            raise ValueError("tensors: expected at least one, got none")
        while pending is not None:
            parts.append({})
            with _part(folder, len(parts)).open("wb") as stream:
                pending = _write_part(stream, pending, pairs, parts[-1], written, file_bytes)
    except BaseException:
        for number in range(1, len(parts) + 1):
            _part(folder, number).unlink(missing_ok=True)
        raise
    if len(parts) == 1:
        _part(folder, 1).rename(folder / SINGLE)
        return
    weight_map = {}
    for number, header in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        _part(folder, number).rename(folder / file)
        weight_map |= dict.fromkeys(header, file)
    total = sum(entry["data_offsets"][1] - entry["data_offsets"][0]
                for header in parts for entry in header.values())  # fmt: skip
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (folder / INDEX).write_text(text)


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.unfinished"


def _write_part(
    stream: IO[bytes],
    pending: tuple[str, Any],
    pairs: Iterator[tuple[str, Any]],
    header: dict[str, Any],
    written: set[str],
    file_bytes: int,
) -> tuple[str, Any] | None:
    """Writes one file and fills its ``header``; returns the pair that begins the next one."""
    stream.seek(LENGTH_BYTES + _HEADER_BYTES)
    at, room = 0, _HEADER_BYTES - len(json.dumps(_FORMAT))
    following: tuple[str, Any] | None = pending
    while following is not None:
        name, entry, values = _entry(*following, at)
        room -= len(json.dumps({name: entry}))
        if header and (at + values.nbytes > file_bytes or room < 0):
            break
        if name in written:
            raise ValueError(f"tensors: {name!r} comes twice")
        written.add(name)
        header[name] = entry
        stream.write(values.data)
        at += values.nbytes
        del values
        following = next(pairs, None)
    text = json.dumps(_FORMAT | header).encode().ljust(_HEADER_BYTES)
    stream.seek(0)
    stream.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    return following


def _entry(name: Any, value: Any, at: int) -> tuple[str, dict[str, Any], np.ndarray]:
    """A tensor's name, its entry of the header, and its bytes."""
    if not isinstance(name, str):
        raise TypeError(f"tensors: expected names, got {name!r}")
    array = np.asarray(value)
    kind = _NAMES.get(array.dtype)
    if kind is None:
        raise ValueError(f"tensors: {name!r} has dtype {array.dtype}; known: {list(DTYPES)}")
    offsets = [at, at + array.nbytes]
    entry = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
    return name, entry, np.ascontiguousarray(array).reshape(-1).view(np.uint8)
