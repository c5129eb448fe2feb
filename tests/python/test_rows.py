"""Moving rows between token order and expert order, and the gradients of that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
import oracle

pytestmark = pytest.mark.any_jax

KINDS = {"f32": jnp.float32, "bf16": jnp.bfloat16}


def plan_with_holes(t=13, k=3, e=5, capacity=6):
    ids = jnp.asarray(np.random.default_rng(8).integers(-1, e, (t, k)), jnp.int32)
    return dropless.plan(ids, e, capacity=capacity)


@pytest.mark.parametrize("kind", KINDS)
def test_permute_and_unpermute_and_their_gradients(kind):
    plan = plan_with_holes()
    slots, rows = np.asarray(plan.slot_of_row), np.asarray(plan.row_of_slot)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((13, 10)), KINDS[kind])
    d_rows = jnp.asarray(rng.standard_normal((39, 10)), KINDS[kind])
    weights = jnp.asarray(rng.standard_normal((13, 3)), jnp.float32)
    d_out = jnp.asarray(rng.standard_normal((13, 10)), KINDS[kind])
    wide_rows, wide_out = (np.asarray(a, np.float64) for a in (d_rows, d_out))
    one = oracle.bound(kind, 3, 1)

    permuted, vjp = jax.vjp(lambda x: dropless.permute(x, plan), x)
    np.testing.assert_array_equal(
        permuted, np.where((slots >= 0)[:, None], np.asarray(x)[slots // 3], 0)
    )
    summed = np.where((rows >= 0)[..., None], wide_rows[rows], 0).sum(1)
    oracle.assert_close("permute's gradient", vjp(d_rows)[0], summed, one)

    got, vjp = jax.vjp(lambda r: dropless.unpermute(r, plan), d_rows)
    oracle.assert_close("unpermute", got, summed, one)
    gathered = np.where((slots >= 0)[:, None], wide_out[slots // 3], 0)
    oracle.assert_close("unpermute's gradient", vjp(d_out)[0], gathered, one)

    got, vjp = jax.vjp(lambda r, w: dropless.unpermute(r, plan, w), d_rows, weights)
    w = np.asarray(weights, np.float64)
    want = (np.where((rows >= 0)[..., None], wide_rows[rows], 0) * w[..., None]).sum(1)
    oracle.assert_close("weighted", got, want, one)
    g_rows, g_weights = vjp(d_out)
    of_row = np.where(slots >= 0, w.reshape(-1)[slots], 0)[:, None]
    oracle.assert_close("d_rows", g_rows, gathered * of_row, one)
    want = np.where(rows >= 0, np.einsum("th,tkh->tk", wide_out, wide_rows[rows]), 0)
    oracle.assert_close("d_weights", g_weights, want, oracle.bound("f32", 10, 1))
    np.testing.assert_array_equal(np.asarray(g_weights)[rows < 0], 0)


def test_a4_slots_without_a_row_read_and_write_nothing():
    # One of two experts is here; a NaN weight of a slot that lives elsewhere must not spread.
    ids = jnp.array([[0, -1], [-1, 0], [0, -1]], jnp.int32)
    plan = dropless.plan(ids, 1)
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((6, 4)), jnp.float32)
    rows = rows.at[3:].set(jnp.nan)
    weights = jnp.array([[0.5, jnp.nan], [jnp.nan, 2.0], [1.0, jnp.nan]])
    out, vjp = jax.vjp(lambda r, w: dropless.unpermute(r, plan, w), rows, weights)
    np.testing.assert_allclose(out, np.asarray(rows[:3]) * [[0.5], [2.0], [1.0]])
    d_rows, d_weights = vjp(jnp.ones((3, 4)))
    np.testing.assert_array_equal(np.asarray(d_weights) == 0, np.asarray(ids) < 0)
    assert not np.asarray(d_rows)[3:].any()
    np.testing.assert_allclose(np.asarray(d_weights)[0, 0], np.asarray(rows)[0].sum(), rtol=1e-6)


@pytest.mark.parametrize("k", [2, 8, 32])
def test_e6_the_sum_over_choices_is_rounded_once(k):
    ids = jnp.tile(jnp.arange(k, dtype=jnp.int32), (9, 1))
    plan = dropless.plan(ids, k)
    d_rows = jnp.asarray(np.random.default_rng(k).standard_normal((9 * k, 6)), jnp.bfloat16)
    got = jax.vjp(lambda x: dropless.permute(x, plan), jnp.zeros((9, 6), jnp.bfloat16))[1](d_rows)[
        0
    ]
    total = np.zeros((9, 6), np.float32)
    for choice in range(k):
        total += np.asarray(d_rows, np.float32)[np.asarray(plan.row_of_slot)[:, choice]]
    np.testing.assert_array_equal(got, jnp.asarray(total).astype(jnp.bfloat16))


def test_rows_of_nothing():
    plan = dropless.plan(jnp.zeros((0, 2), jnp.int32), 3)
    rows = dropless.permute(jnp.zeros((0, 4)), plan)
    assert rows.shape == (0, 4) and dropless.unpermute(rows, plan).shape == (0, 4)
    assert dropless.unpermute(rows, plan, jnp.zeros((0, 2))).shape == (0, 4)
