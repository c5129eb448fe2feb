"""Tensors of safetensors files, read one at a time.

The format (https://github.com/huggingface/safetensors): eight bytes, the header's length, little
endian; the header, JSON, with dtype, shape and place of every tensor; then the tensors. Reading it
takes no library, and bfloat16 and FP8 are NumPy dtypes of ``ml_dtypes``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # the format's own limit: more is a damaged file
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class _Place(NamedTuple):
    file: Path
    dtype: Any
    shape: tuple[int, ...]
    offset: int  # from the file's start


class Checkpoint(Mapping[str, np.ndarray]):
    """Tensors on disk under their names, read from the file at every look-up and held nowhere.

    ``shape_of`` and ``dtype_of`` read no tensor.
    """

    def __init__(self, places: Mapping[str, _Place]):
        self._places = dict(places)

    def __getitem__(self, name: str) -> np.ndarray:
        place = self._places[name]
        count = math.prod(place.shape)
        values = np.fromfile(place.file, place.dtype, count, offset=place.offset)
        if values.size != count:
            raise ValueError(f"{place.file}: ends within {name!r}; the file is not complete")
        return values.reshape(place.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._places  # the mixin's would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def dtype_of(self, name: str) -> np.dtype:
        return np.dtype(self._places[name].dtype)

    def block(self, prefix: str) -> Checkpoint:
        """The tensors of one block, such as ``"model.layers.3.mlp."``, without that prefix."""
        found = {
            name.removeprefix(prefix): place
            for name, place in self._places.items()
            if name.startswith(prefix)
        }
        if not found:
            some = ", ".join(list(self._places)[:3])
            raise ValueError(
                f"prefix {prefix!r}: no tensor's name starts with it; there are {some}, ..."
            )
        return Checkpoint(found)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a safetensors file, an index of several, or a folder that has either.

    Args:
      path: ``*.safetensors``, ``*.safetensors.index.json``, or a folder with
        ``model.safetensors.index.json`` or ``model.safetensors``.

    Returns:
      A mapping from names to NumPy arrays; ``checkpoint.block("model.layers.3.mlp.")`` is what
      ``from_hf`` takes. Nothing but headers is read before a tensor is asked for.

    Raises:
      FileNotFoundError: there is no such file, or one that the index names is missing.
      ValueError: a file is no safetensors file, was cut off, or has a tensor twice; or the index
        and its files do not have the same tensors.
    """
    path = Path(path)
    if path.is_dir():
        names = [name for name in (INDEX, SINGLE) if (path / name).is_file()]
        if not names:
            raise FileNotFoundError(f"{path}: expected {INDEX} or {SINGLE} in this folder")
        path = path / names[0]
    if path.suffix != ".json":
        return Checkpoint(_places(path))
    weight_map = _weight_map(path)
    files = {name: _places(path.parent / name) for name in sorted(set(weight_map.values()))}
    lacking = [name for name, file in weight_map.items() if name not in files[file]]
    if lacking:
        raise ValueError(f"{path}: names {lacking[0]!r}, which {weight_map[lacking[0]]} lacks")
    unnamed = [n for file in files for n in files[file] if weight_map.get(n) != file]
    if unnamed:
        raise ValueError(f"{path}: does not name {unnamed[0]!r}, which one of its files has")
    return Checkpoint({name: files[file][name] for name, file in weight_map.items()})


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON takes the last of equal names silently: a tensor would be lost."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} occurs twice")
        found[name] = value
    return found


def _json_object(file: Path, what: str, text: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_object_without_duplicates)
    except (ValueError, RecursionError) as error:  # no JSON, no Unicode, or nested without end
        raise ValueError(f"{file}: expected {what}, but its JSON is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected {what}, a JSON object; got {type(value).__name__}")
    return value


def _weight_map(index: Path) -> dict[str, str]:
    what = "a safetensors index"
    weight_map = _json_object(index, what, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: expected {what}, an object with 'weight_map'")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(
                f"{index}: expected a file of its own folder for {name!r}, got {file!r}"
            )
    return weight_map


def _places(file: Path) -> dict[str, _Place]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        text = stream.read(length) if 0 < length <= _LONGEST_HEADER else b""
        size = stream.seek(0, 2)
    if not text or len(text) != length:
        raise ValueError(f"{file}: expected a safetensors file, got a header of {length} bytes")
    header = _json_object(file, "a safetensors file", text)
    start = LENGTH_BYTES + length
    places = {
        name: _place(file, name, entry, start)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    # The format has no holes, so whatever overlaps, is missing or was cut off shows here.
    at = start
    for name, place in sorted(places.items(), key=lambda item: (item[1].offset, _bytes(item[1]))):
        if place.offset != at:
            raise ValueError(f"{file}: {name!r} begins at byte {place.offset}; expected {at}")
        at += _bytes(place)
        if at > size:
            raise ValueError(f"{file}: ends within {name!r}; the file is not complete")
    if at != size:
        raise ValueError(f"{file}: expected {at} bytes, got {size}")
    return places


def _bytes(place: _Place) -> int:
    return math.prod(place.shape) * np.dtype(place.dtype).itemsize


def _place(file: Path, name: str, entry: Any, start: int) -> _Place:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{file}: expected dtype, shape and data_offsets of {name!r}, got {entry!r}"
        ) from error
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{file}: expected integers >= 0 of {name!r}, got {entry!r}")
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise ValueError(f"{file}: {name!r} has dtype {kind}; known: {list(DTYPES)}")
    place = _Place(file, dtype, shape, start + begin)
    if end - begin != _bytes(place):
        raise ValueError(f"{file}: {name!r} of shape {shape} has {end - begin} bytes")
    return place
