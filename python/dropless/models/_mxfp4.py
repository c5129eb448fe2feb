"""gpt-oss's MXFP4 checkpoints: four-bit numbers with a scale for each 32 of them along the input.

Format: OCP Microscaling v1.0, e2m1 codes and e8m0 scales. A matrix of ours, [E, in, out], is stored
as ``<name>_blocks [E, out, in/32, 16]`` uint8, two codes a byte, the lower half first, and
``<name>_scales [E, out, in/32]`` uint8, powers of two with a bias of 127. Every product of a code
and a scale is a bfloat16, so nothing is rounded.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dropless.models._rules import numpy_of, transpose

BLOCK = 32
_BYTES = BLOCK // 2
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; the fourth bit is the sign
_BIAS = 127
_NAN_SCALE = 255


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
