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

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # the format's own limit: more is a damaged file
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


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
      ValueError: a file is no safetensors file, or the index names a tensor that its file lacks.
    """
    path = Path(path)
    if path.is_dir():
        names = [name for name in (_INDEX, _SINGLE) if (path / name).is_file()]
        if not names:
            raise FileNotFoundError(f"{path}: expected {_INDEX} or {_SINGLE} in this folder")
        path = path / names[0]
    if path.suffix != ".json":
        return Checkpoint(_places(path))
    weight_map = json.loads(path.read_text()).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path}: expected a safetensors index, an object with 'weight_map'")
    files = {name: _places(path.parent / name) for name in sorted(set(weight_map.values()))}
    lacking = [name for name, file in weight_map.items() if name not in files[file]]
    if lacking:
        raise ValueError(f"{path}: names {lacking[0]!r}, which {weight_map[lacking[0]]} lacks")
    return Checkpoint({name: files[file][name] for name, file in weight_map.items()})


def _places(file: Path) -> dict[str, _Place]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        text = stream.read(length) if 0 < length <= _LONGEST_HEADER else b""
    if not text or len(text) != length:
        raise ValueError(f"{file}: expected a safetensors file, got a header of {length} bytes")
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file}: expected a safetensors file, its header is no JSON") from error
    places = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{file}: {name!r} has dtype {entry['dtype']}; known: {list(_DTYPES)}")
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if end - begin != math.prod(shape) * np.dtype(dtype).itemsize:
            raise ValueError(f"{file}: {name!r} of shape {shape} has {end - begin} bytes")
        places[name] = _Place(file, dtype, shape, _LENGTH_BYTES + length + begin)
    return places
