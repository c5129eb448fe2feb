"""The bounds that the other tests hold errors to: what they let through and what they do not."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import oracle

pytestmark = pytest.mark.any_jax

KINDS = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}


def rounded(values, kind, lost=0):
    """To a format, or to one that is coarser by ``lost`` bits, of any exponent."""
    mantissa, exponent = np.frexp(values)
    scale = 0.5 / oracle.ROUNDOFF[kind] / 2**lost * 2
    return np.ldexp(np.round(mantissa * scale) / scale, exponent)


@pytest.mark.parametrize("kind", KINDS)
def test_roundoff_is_that_of_the_format(kind):
    values = np.random.default_rng(0).uniform(1, 64, 999)
    np.testing.assert_array_equal(
        rounded(values, kind), np.asarray(jnp.asarray(values, KINDS[kind]), np.float64)
    )


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_one_rounding_is_within_its_bound_and_one_bit_less_is_not(kind):
    values = np.random.default_rng(1).standard_normal(5000)
    limit = oracle.bound(kind, 1, 1)
    oracle.assert_close("rounded", rounded(values, kind), values, limit)
    with pytest.raises(AssertionError, match="rms error"):
        oracle.assert_close("coarse", rounded(values, kind, lost=1), values, limit)


def test_fp8_and_bf16_roundings_count_on_their_own():
    fp8, bf16 = oracle.ROUNDOFF["fp8"], oracle.ROUNDOFF["bf16"]
    expected = 0.5 * np.sqrt(5 * fp8**2 + 2 * bf16**2)
    assert oracle.bound("fp8", 1, 7, fp8=5) == pytest.approx(expected, rel=1e-4)
    assert oracle.bound("bf16", 1, 7, fp8=5) == oracle.bound("bf16", 1, 7)


def test_few_values_may_be_off_by_the_full_roundoff():
    # Just above a power of two, all rounded down by nearly a unit.
    limit = oracle.bound("bf16", 1, 1)
    for count, fails in (1, False), (3, False), (3000, True):
        want = np.full(count, 1 + 0.9 * 2.0**-8)
        if fails:
            with pytest.raises(AssertionError, match="rms error"):
                oracle.assert_close("many", np.ones(count), want, limit)
        else:
            oracle.assert_close("few", np.ones(count), want, limit)


def test_one_wrong_element_among_many_is_found():
    want = np.random.default_rng(2).standard_normal(100_000)
    got, limit = want.copy(), oracle.bound("bf16", 1, 1)
    got[77] += 17 * limit
    with pytest.raises(AssertionError, match="largest error"):
        oracle.assert_close("one", got, want, limit)
