"""The router's products in three bfloat16 terms are float32 products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dropless import _router_gemm as router_gemm

T, H, E = 37, 150, 21


def _arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (T, H)).astype(jnp.bfloat16)
    return x, jax.random.normal(keys[1], (H, E)), jax.random.normal(keys[2], (T, E))


def _exact(*arrays):
    return [np.asarray(a.astype(jnp.float32), np.float64) for a in arrays]


def _close(got, want, terms):
    # Every addition may round once: a random walk of `terms` steps, and 16 of its standard
    # deviations cover the largest of all elements and of all partial sums.
    rms = np.sqrt(np.mean(want**2))
    error = np.max(np.abs(np.asarray(got, np.float64) - want)) / rms
    assert error < 16 * np.sqrt(terms) * 2.0**-24, error


# Which term of each side stands in each of the six products.
PAIRS = {router_gemm.LEFT: (2, 1, 0, 1, 0, 0), router_gemm.RIGHT: (0, 1, 2, 0, 1, 0)}


def _terms(a, side):
    """[3, R, C] and [6, R, C] in float64."""
    parts = router_gemm.split(jnp.asarray(a), side)
    shape = a.shape[0], -1, a.shape[1]
    return [
        np.asarray(p.astype(jnp.float32), np.float64).reshape(shape).swapaxes(0, 1) for p in parts
    ]


@pytest.mark.parametrize("side", PAIRS)
def test_terms_are_exact_and_in_their_places(side):
    a = np.random.default_rng(0).normal(size=(37, 21)).astype(np.float32)
    a[:1, :6] = [[-3.1415927, 1e-20, 1.0000001, 65504.1, 0.0, -0.0]]
    terms, pairs = _terms(a, side)
    np.testing.assert_array_equal(terms.sum(0), a.astype(np.float64))
    assert np.all(np.abs(terms[1]) <= 2.0**-8 * np.abs(terms[0]))
    np.testing.assert_array_equal(pairs, terms[list(PAIRS[side])])
    assert router_gemm.split(jnp.asarray(a), side, pairs=False)[1] is None


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_terms_keep_non_finite_values(value):
    a = np.array([[value, 1.5]], np.float32)
    terms, _ = _terms(a, router_gemm.LEFT)
    np.testing.assert_array_equal(terms, [[[value, 1.5]], [[0, 0]], [[0, 0]]])


@pytest.mark.parametrize("jit", [False, True])
def test_products_match_float64(jit):
    x, kernel, d_logits = _arrays()
    wrap = jax.jit if jit else lambda f: f
    ex, ek, ed = _exact(x, kernel, d_logits)
    d = wrap(lambda a: router_gemm.split(a, router_gemm.LEFT))(d_logits)
    w = wrap(lambda a: router_gemm.split(a, router_gemm.RIGHT))(kernel)
    _close(wrap(router_gemm.matmul_split)(x, w), ex @ ek, 3 * H)
    d_x = wrap(lambda d, w: router_gemm.grad_x_split(d, w, jnp.float32))(d, w)
    _close(d_x, ed @ ek.T, 6 * E)
    _close(wrap(router_gemm.grad_kernel_split)(x, d), ex.T @ ed, 3 * T)


def test_direct_products_match_float64():
    x, kernel, d_logits = _arrays()
    ex, ek, ed = _exact(x, kernel, d_logits)
    _close(router_gemm.matmul(x, kernel), ex @ ek, H)
    _close(router_gemm.grad_x(d_logits, kernel, jnp.float32), ed @ ek.T, E)
    _close(router_gemm.grad_kernel(x, d_logits), ex.T @ ed, T)
