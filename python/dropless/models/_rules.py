"""Rules between parameters and a checkpoint's tensors: which numbers of one are which of the other.

Parameters are named by group and leaf, as in ``experts.gate``, and tensors relative to the block.
Matrices of ours are [in, out]; those of ``torch.nn.Linear`` are [out, in].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Shapes = Mapping[str, tuple[int, ...]]
# Gives a tensor by its name; each is asked for once.
Load = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class Copy:
    """A tensor that is a parameter as it is, or with its last two axes swapped.

    ``rows`` in front of its shape hold one row: a vector [E] may be stored as [1, E].
    """

    tensor: str
    leaf: str
    transposed: bool = False
    row: bool = False

    @property
    def leaves(self) -> tuple[str, ...]:
        return (self.leaf,)

    def tensors(self, shapes: Shapes) -> Shapes:
        shape = shapes[self.leaf]
        shape = (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape
        return {self.tensor: (1, *shape) if self.row else shape}

    def read(self, shapes: Shapes, load: Load) -> dict[str, Any]:
        value = load(self.tensor)
        value = value[0] if self.row else value
        return {self.leaf: transpose(value) if self.transposed else value}

    def write(self, shapes: Shapes, params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        value = params[self.leaf]
        value = transpose(value) if self.transposed else value
        yield self.tensor, value[None] if self.row else value


def linear(tensor: str, leaf: str) -> Copy:
    """The weight of a ``torch.nn.Linear``."""
    return Copy(tensor, leaf, transposed=True)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One tensor that holds gate and up: side by side, gate first, or interleaved.

    ``transposed``: [E, 2I, H] instead of [E, H, 2I]. Vectors [E, 2I] have nothing to transpose.
    """

    tensor: str
    leaf_gate: str
    leaf_up: str
    transposed: bool = False
    interleaved: bool = False

    @property
    def leaves(self) -> tuple[str, ...]:
        return (self.leaf_gate, self.leaf_up)

    def tensors(self, shapes: Shapes) -> Shapes:
        *front, width = shapes[self.leaf_gate]
        shape = (*front, 2 * width)
        return {self.tensor: (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape}

    def read(self, shapes: Shapes, load: Load) -> dict[str, Any]:
        value = load(self.tensor)
        axis = value.ndim - (2 if self.transposed else 1)
        width = value.shape[axis] // 2
        front = (slice(None),) * axis
        if self.interleaved:
            gate, up = value[(*front, slice(0, None, 2))], value[(*front, slice(1, None, 2))]
        else:
            gate, up = value[(*front, slice(None, width))], value[(*front, slice(width, None))]
        own = transpose if self.transposed else contiguous
        return {self.leaf_gate: own(gate), self.leaf_up: own(up)}

    def write(self, shapes: Shapes, params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        pair = [params[leaf] for leaf in self.leaves]
        numpy = numpy_of(pair)
        if self.interleaved:
            both = numpy.stack(pair, axis=-1).reshape(*pair[0].shape[:-1], -1)
            yield self.tensor, transpose(both) if self.transposed else both
        elif self.transposed:
            yield self.tensor, numpy.concatenate([transpose(v) for v in pair], axis=-2)
        else:
            yield self.tensor, numpy.concatenate(pair, axis=-1)


@dataclasses.dataclass(frozen=True)
class PerExpert:
    """A ``torch.nn.Linear`` for each expert, named ``pattern.format(expert)``, experts from 0."""

    pattern: str
    leaf: str

    @property
    def leaves(self) -> tuple[str, ...]:
        return (self.leaf,)

    def _names(self, shapes: Shapes) -> list[str]:
        return [self.pattern.format(expert) for expert in range(shapes[self.leaf][0])]

    def tensors(self, shapes: Shapes) -> Shapes:
        _, rows, columns = shapes[self.leaf]
        return dict.fromkeys(self._names(shapes), (columns, rows))

    def read(self, shapes: Shapes, load: Load) -> dict[str, Any]:
        names = self._names(shapes)
        first = load(names[0])
        if isinstance(first, jax.Array):
            rest = [load(name) for name in names[1:]]
            return {self.leaf: transpose(jnp.stack([first, *rest]))}
        out = np.empty((len(names), *first.shape[::-1]), first.dtype)
        out[0] = first.T
        del first

        def place(expert: int, value: np.ndarray) -> None:
            if value.dtype != out.dtype:
                raise ValueError(
                    f"{names[expert]}: expected {out.dtype.name} as {names[0]}, got "
                    f"{value.dtype.name}"
                )
            out[expert] = value.T

        # No name holds a tensor while the next is read: one alone is in memory beside the result.
        for expert in range(1, len(names)):
            place(expert, np.asarray(load(names[expert])))
        return {self.leaf: out}

    def write(self, shapes: Shapes, params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for expert, name in enumerate(self._names(shapes)):
            yield name, transpose(params[self.leaf][expert])


@dataclasses.dataclass(frozen=True)
class Table:
    """Numbers of experts, int64 in files and whole float32 numbers in our parameters."""

    tensor: str
    leaf: str

    @property
    def leaves(self) -> tuple[str, ...]:
        return (self.leaf,)

    def tensors(self, shapes: Shapes) -> Shapes:
        return {self.tensor: shapes[self.leaf]}

    def read(self, shapes: Shapes, load: Load) -> dict[str, Any]:
        value = load(self.tensor)
        if not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"{self.tensor}: expected integers, got {value.dtype.name}")
        return {self.leaf: value.astype(np.float32)}

    def write(self, shapes: Shapes, params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        value = params[self.leaf]
        # Under a trace JAX has no int64 unless it is switched on.
        traced = isinstance(value, jax.core.Tracer)
        yield self.tensor, value.astype(jnp.int32) if traced else np.asarray(value).astype(np.int64)


Rule = Copy | Pair | PerExpert | Table


def numpy_of(values: list[Any]) -> Any:
    return jnp if any(isinstance(value, jax.Array) for value in values) else np


def contiguous(value: Any) -> Any:
    """NumPy results are copies, so that no view keeps a source alive."""
    return value if isinstance(value, jax.Array) else np.ascontiguousarray(value)


def transpose(value: Any) -> Any:
    """Swaps the last two axes."""
    return contiguous(value.swapaxes(-1, -2))
