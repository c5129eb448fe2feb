"""What Hopper's tensor cores make of e4m3 operands, bit by bit, in numpy.

A ``wgmma`` step multiplies 32 pairs of codes exactly and adds the products and the accumulator as
one sum of 33 addends. Each is shifted to the largest exponent among them and cut, toward zero, to
13 bits after the point; a product's exponent is the sum of its operands', so that its significand
may reach 4. The integers are added exactly, and the result is cut, toward zero, to 13 bits of
fraction. Published models: arXiv 2511.10909, 2512.07004; DeepSeek-V3 (arXiv 2412.19437, section
3.3.2) speaks of 14 bits.

The kernels add four steps, 128 elements of the contraction, to a float32 sum, with one fused
multiply-add by the product of both scales. All of them agree with this model in every bit.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

F8 = ml_dtypes.float8_e4m3fn
STEP = 32  # contraction elements of a wgmma
FRACTION = 13  # bits kept after the point


def significands_and_exponents(codes):
    """value = significand * 2^(exponent - 3) of e4m3 codes given as uint8; float32 and int32."""
    field = np.int32(codes) >> 3 & 15
    mantissa = np.int32(codes) & 7
    significand = np.where(field > 0, mantissa + 8, mantissa)
    sign = np.where(np.int32(codes) & 128, -1, 1)
    return np.float32(sign * significand), np.maximum(field, 1) - 7


def _power_of_two(exponent):
    """Float32 2^exponent, -126 <= exponent <= 127."""
    return ((np.asarray(exponent, np.int32) + 127) << 23).view(np.float32)


def _cut(value):
    """Float32 cut toward zero to ``FRACTION`` bits of fraction."""
    dropped = np.uint32((1 << (23 - FRACTION)) - 1)
    return (np.ascontiguousarray(value).view(np.uint32) & ~dropped).view(np.float32)


def wgmma(acc, a, b):
    """acc [R, C] + a [R, 32] * b [C, 32]: the one step; operands are as above says of codes."""
    (a_significand, a_exponent), (b_significand, b_exponent) = a, b
    # Zeros have no exponent; the accumulator's is below all others if it is zero.
    low = np.int32(-64)
    a_top = np.where(a_significand != 0, a_exponent, low)
    b_top = np.where(b_significand != 0, b_exponent, low)
    top = np.where(acc != 0, np.frexp(acc)[1] - 1, low)
    for k in range(a_top.shape[1]):
        np.maximum(top, a_top[:, k, None] + b_top[None, :, k], out=top)
    total = np.trunc(acc * _power_of_two(FRACTION - top))
    for k in range(a_top.shape[1]):
        product = a_significand[:, k, None] * b_significand[None, :, k]
        shift = a_exponent[:, k, None] + b_exponent[None, :, k] + (FRACTION - 6) - top
        total += np.trunc(product * _power_of_two(shift))
    return _cut(total * _power_of_two(top - FRACTION))


def product(a, b):
    """a [R, K] * b [C, K] of one block of up to 128 codes (uint8), before any scale: [R, C]."""
    acc = np.zeros((a.shape[0], b.shape[0]), np.float32)
    for k in range(0, a.shape[1], STEP):
        parts = (significands_and_exponents(codes[:, k : k + STEP]) for codes in (a, b))
        acc = wgmma(acc, *parts)
    return acc


def add_scaled(acc, products, a_scale, b_scale):
    """The kernels' float32 sum: fma(products, a_scale * b_scale, acc)."""
    scale = np.float64(np.float32(a_scale) * np.float32(b_scale))
    x, y = np.float64(products) * scale, np.float64(acc)  # exact: 14 by 24 bits
    total = x + y
    # What the float64 addition lost, and with it the sum rounded to odd, which a second rounding
    # to float32 cannot spoil.
    part = total - x
    lost = (x - (total - part)) + (y - part)
    bits = np.where(lost * total < 0, np.nextafter(total, 0), total).view(np.int64)
    return np.where(lost != 0, bits | 1, bits).view(np.float64).astype(np.float32)


def grouped_product(planes, offsets):
    """Float32 sums [M, N] of ragged groups of rows; rows of no group are 0.

    ``planes``: (a [M, K], a_scale [M, blocks], b [E, N, K], b_scale [E, ceil(N/128), blocks]) of
    each part of the contraction, codes as uint8.
    """
    acc = np.zeros((planes[0][0].shape[0], planes[0][2].shape[1]), np.float32)
    for e in range(len(offsets) - 1):
        rows = slice(offsets[e], offsets[e + 1])
        if rows.start == rows.stop:
            continue
        for a, a_scale, b, b_scale in planes:
            columns = np.repeat(b_scale[e], 128, axis=0)[: b.shape[1]]
            for block in range(a_scale.shape[1]):
                k = slice(block * 128, block * 128 + 128)
                products = product(a[rows, k], b[e][:, k])
                scales = a_scale[rows, block, None], columns[None, :, block]
                acc[rows] = add_scaled(acc[rows], products, *scales)
    return acc


def block_scale(amax, pow2=False):
    """Scales of blocks whose largest finite magnitude is ``amax``, float32."""
    scale = np.maximum(np.float32(amax) / np.float32(448), np.float32(2.0**-126))
    if pow2:
        scale = ((scale.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)).view(
            np.float32
        )
    return np.where(amax == 0, np.float32(1), scale)


def encode(value):
    """e4m3 of float32 values that are finite: nearest even, saturating."""
    return np.clip(np.float32(value), -448, 448).astype(F8)


def assert_rounded(name, got, value, tolerance, dtype):
    """``got`` is a value within ``tolerance`` of ``value``, rounded to ``dtype``."""

    def rounded(v):
        v = np.float32(np.clip(v, -448, 448)) if dtype == F8 else np.float32(v)
        return np.float64(v.astype(dtype))

    got, value = np.float64(got), np.float64(value)
    low, high = rounded(value - tolerance), rounded(value + tolerance)
    wrong = ~((low <= got) & (got <= high))
    if wrong.any():
        at = tuple(int(i[0]) for i in np.nonzero(wrong))
        raise AssertionError(
            f"{name}: {wrong.sum()} of {wrong.size}; {at}: got {got[at]!r}, expected {low[at]!r} "
            f"to {high[at]!r}"
        )


def assert_quantised(name, got, value, tolerance):
    """Codes and scales, in blocks of 1 x 128, of values within ``tolerance`` of ``value``."""
    q, scale = np.asarray(got[0]), np.asarray(got[1])
    value = np.float64(value)
    tolerance = np.broadcast_to(tolerance, value.shape)
    ends = [(0, 0)] * (value.ndim - 1) + [(0, -value.shape[-1] % 128)]

    def largest(v):
        return np.pad(np.maximum(v, 0), ends).reshape(*v.shape[:-1], -1, 128).max(-1)

    low = block_scale(np.float32(largest(np.abs(value) - tolerance)))
    high = block_scale(np.float32(largest(np.abs(value) + tolerance)))
    assert np.all((low <= scale) & (scale <= high)), f"{name}: scale"
    # As the kernel scales: by a float32 inverse, with a float32 product.
    inverse = np.repeat(np.float32(1) / scale, 128, axis=-1)[..., : value.shape[-1]]
    exact = np.float32(value) * inverse
    drift = tolerance * np.float64(inverse) + (2.0**-23 * np.abs(exact) if tolerance.any() else 0)
    assert_rounded(f"{name}: codes", q, exact, drift, F8)
