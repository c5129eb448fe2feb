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


def test_split_is_exact():
    a = jnp.array([1.0, -3.1415927, 1e-20, 1.0000001, 65504.1, 0.0, -0.0], jnp.float32)
    total = sum(np.asarray(p.astype(jnp.float32), np.float64) for p in router_gemm.split(a))
    np.testing.assert_array_equal(total, np.asarray(a, np.float64))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_split_keeps_non_finite_values(value):
    total = sum(p.astype(jnp.float32) for p in router_gemm.split(jnp.array([value], jnp.float32)))
    np.testing.assert_array_equal(np.asarray(total), np.array([value], np.float32))


@pytest.mark.parametrize("jit", [False, True])
def test_products_match_float64(jit):
    x, kernel, d_logits = _arrays()
    wrap = jax.jit if jit else lambda f: f
    ex, ek, ed = _exact(x, kernel, d_logits)
    _close(wrap(router_gemm.matmul_split)(x, kernel), ex @ ek, 3 * H)
    _close(wrap(router_gemm.grad_x_split)(d_logits, kernel), ed @ ek.T, 6 * E)
    _close(wrap(router_gemm.grad_kernel_split)(x, d_logits), ex.T @ ed, 3 * T)


def test_direct_products_match_float64():
    x, kernel, d_logits = _arrays()
    ex, ek, ed = _exact(x, kernel, d_logits)
    _close(router_gemm.matmul(x, kernel), ex @ ek, H)
    _close(router_gemm.grad_x(d_logits, kernel, jnp.float32), ed @ ek.T, E)
    _close(router_gemm.grad_kernel(x, d_logits), ex.T @ ed, T)
