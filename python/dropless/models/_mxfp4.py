"""gpt-oss's MXFP4 checkpoints: four-bit numbers with a scale for each 32 of them along the input.

Format: OCP Microscaling v1.0, e2m1 codes and e8m0 scales. A matrix of ours, [E, in, out], is stored
as ``<name>_blocks [E, out, in/32, 16]`` uint8, two codes a byte, the lower half first, and
``<name>_scales [E, out, in/32]`` uint8, powers of two with a bias of 127. Every product of a code
and a scale is a bfloat16, so nothing is rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dropless.models._rules import Rule, Shapes, numpy_of, transpose

BLOCK = 32
_BYTES = BLOCK // 2
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; the fourth bit is the sign
_BIAS = 127
_NAN_SCALE = 255


@dataclasses.dataclass(frozen=True)
class MXFP4Experts:
    """The experts of an MXFP4 checkpoint as they are stored, made by ``prepared_from_hf``.

    Several codes and scales make the same number, so the numbers alone do not tell which ones a
    file held. ``to_hf(..., prepared=)`` writes these.

    Attributes:
      stored: ``<name>_blocks [E,out,in/32,16]`` and ``<name>_scales [E,out,in/32]``, uint8, by the
        names of their tensors.
    """

    stored: Mapping[str, Any]


def blocks_name(name: str) -> str:
    return f"{name}_blocks"


def scales_name(name: str) -> str:
    return f"{name}_scales"


def stored_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of blocks and scales of a tensor [..., in, out]."""
    *front, width, out = shape
    if width % BLOCK:
        raise ValueError(
            f"{blocks_name(name)}: MXFP4 has blocks of {BLOCK} along the input, which must be a "
            f"multiple of it; the config says {width}"
        )
    scales = (*front, out, width // BLOCK)
    return {blocks_name(name): (*scales, _BYTES), scales_name(name): scales}


def _table() -> np.ndarray:
    """[256, 16] bfloat16: the number of each scale and code."""
    codes = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
    numbers = np.ldexp(codes, np.arange(256)[:, None] - _BIAS)
    numbers[_NAN_SCALE] = np.nan
    with np.errstate(over="ignore"):  # 2 and more times 2^127 is infinite in bfloat16
        return numbers.astype(ml_dtypes.bfloat16)


_TABLE = _table()


def decoded(name: str, blocks: Any, scales: Any) -> Any:
    """[E, in, out] in bfloat16."""
    for what, value in (blocks_name(name), blocks), (scales_name(name), scales):
        if value.dtype != np.uint8:
            raise ValueError(f"{what}: expected uint8, got {value.dtype.name}")
    if numpy_of([blocks, scales]) is jnp:
        return transpose(_numbers(jnp, jnp.asarray(_TABLE), blocks, scales))
    # One expert at a time, so that no copy of all but the result is held beside the source.
    *front, out, groups = scales.shape
    values = np.empty((*front, groups * BLOCK, out), ml_dtypes.bfloat16)
    for expert in np.ndindex(*front):
        values[expert] = _numbers(np, _TABLE, blocks[expert], scales[expert]).T
    return values


def _numbers(numpy: Any, table: Any, blocks: Any, scales: Any) -> Any:
    """[..., out, in]: looked up, since arithmetic would flush the smallest on some devices."""
    codes = numpy.stack([blocks & 15, blocks >> 4], axis=-1)
    codes = codes.reshape(*scales.shape, BLOCK)
    values = table[scales[..., None], codes]
    return values.reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)


def is_stored(tensors: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's tensors are MXFP4."""
    return any(name.endswith(blocks_name("")) for name in tensors)


def kept(rules: tuple[Rule, ...], shapes: Shapes, tensors: Mapping[str, Any]) -> MXFP4Experts:
    """Blocks and scales of all tensors that have them."""
    stored = {}
    for rule in rules:
        for name in rule.tensors(shapes):
            if blocks_name(name) in tensors:
                for part in blocks_name(name), scales_name(name):
                    stored[part] = np.asarray(tensors[part])
    return MXFP4Experts(stored)


def check_prepared(experts: MXFP4Experts, rules: tuple[Rule, ...], shapes: Shapes) -> None:
    """Raises unless these are blocks and scales of the block's tensors."""
    expected: dict[str, tuple[int, ...]] = {}
    for rule in rules:
        for name, shape in rule.tensors(shapes).items():
            if blocks_name(name) in experts.stored:
                expected |= stored_shapes(name, shape)
    given = {name: tuple(np.shape(value)) for name, value in experts.stored.items()}
    if given != expected:
        raise ValueError(f"prepared: expected {expected}, got {given}")


def written(name: str, numbers: Any, experts: MXFP4Experts) -> Iterator[tuple[str, Any]]:
    """A tensor [E, in, out] as it was stored, if it still holds the numbers that were stored."""
    names = blocks_name(name), scales_name(name)
    if names[0] not in experts.stored:
        yield name, numbers
        return
    blocks, scales = (experts.stored[part] for part in names)
    # An expert at a time. Bits, so that -0 and NaN are compared.
    for expert in np.ndindex(*scales.shape[:-2]):
        one = decoded(name, blocks[expert], scales[expert])
        got = np.ascontiguousarray(np.asarray(numbers[expert], np.float32))
        if got.tobytes() != np.ascontiguousarray(one.astype(np.float32)).tobytes():
            raise ValueError(
                f"prepared: {name} of params does not hold the numbers of {names[0]} (expert "
                f"{expert[0]}): it was edited or trained, which four bits would round; without "
                f"prepared= it is written in the dtype it has"
            )
    yield from zip(names, (blocks, scales), strict=True)
