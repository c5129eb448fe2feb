"""JAX's transformations inside one another, on full, empty and tiny batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import dropless
import oracle

CONFIG = dropless.MoEConfig(5, 2, 12, precision="f32")
CLOSE = oracle.bound("f32", 128, 14)


def case(shape, cfg=CONFIG):
    return oracle.layer_case(cfg, shape)


def same(got, want):
    for (path, a), (_, b) in zip(oracle.leaves(got), oracle.leaves(want), strict=True):
        oracle.assert_close(path, a, b, CLOSE)


def loss(x, params, dy, cfg=CONFIG, **options):
    y, aux = dropless.moe(x, params, cfg, **options)
    return jnp.sum(y.astype(jnp.float32) * dy) + aux.load_balance_loss


def two_layers(x, params, dy, remat):
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.9 * leaf]), params)

    def block(x, params):
        return x + dropless.moe(x, params, CONFIG)[0], None

    block = jax.checkpoint(block) if remat else block
    return jnp.sum(jax.lax.scan(block, x, stacked)[0] * dy)


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_vmap_of_the_gradient_of_a_scan(remat):
    x, params, dy = case((3, 6, 8))
    gradient = jax.grad(two_layers, (0, 1))
    got = jax.jit(jax.vmap(lambda x, dy: gradient(x, params, dy, remat)))(x, dy)
    each = [gradient(x[i], params, dy[i], False) for i in range(3)]
    same(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))


def mesh_of(n):
    return jax.make_mesh((n,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("tokens", [6, 0])
def test_remat_and_scan_inside_shard_map(tokens):
    x, params, dy = case((4, tokens, 8))

    def local(x, params, dy):
        def total(params):
            return jax.lax.psum(two_layers(x, params, dy, True), "data")

        return jax.grad(total)(params)

    specs = (P("data"), P(), P("data"))
    got = jax.jit(jax.shard_map(local, mesh=mesh_of(4), in_specs=specs, out_specs=P()))
    same(got(x, params, dy), jax.grad(two_layers, 1)(x, params, dy, False))


def test_donated_buffers_give_the_same_step():
    x, params, dy = case((7, 8))

    def step(x, params):
        gradient = jax.grad(loss, 1)(x, params, dy)
        return dropless.moe(x, params, CONFIG)[0], jax.tree.map(jnp.subtract, params, gradient)

    want = jax.jit(step)(x, params)
    given = jax.tree.map(jnp.copy, (x, params))
    got = jax.jit(step, donate_argnums=(0, 1))(*given)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_inside_control_flow():
    x, params, dy = case((7, 8))

    def layer(x):
        return dropless.moe(x, params, CONFIG)[0]

    def branch(x, on):
        return jnp.sum(jax.lax.cond(on, layer, lambda x: x, x) * dy)

    gradient = jax.jit(jax.grad(branch))
    same(gradient(x, True), jax.grad(lambda x: jnp.sum(layer(x) * dy))(x))
    np.testing.assert_array_equal(gradient(x, False), dy)
    got = jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, layer(s[1])), (0, x))[1]
    same(got, layer(layer(x)))
    same(jax.lax.map(layer, jnp.stack([x, dy, x]), batch_size=2)[1], layer(dy))


@pytest.mark.parametrize("precision", ["f32", "bf16", "fp8"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 3, 1, 2), (4, 4, 3, 1)], ids=str)
def test_d2_smallest_sizes_under_vmap_and_grad(sizes, precision):
    e, k, i, h = sizes
    options = {"expert_bias": True, "shared_expert_dim": 1, "precision": precision}
    cfg = dropless.MoEConfig(e, k, i, **options)
    gradient = jax.grad(loss, (0, 1))
    for tokens in (0, 1, 3):
        x, params, dy = case((2, tokens, h), cfg)
        got = jax.jit(jax.vmap(lambda x, dy, p=params: gradient(x, p, dy, cfg)))(x, dy)
        assert got[0].shape == x.shape
        each = [jax.jit(gradient, static_argnums=3)(x[n], params, dy[n], cfg) for n in range(2)]
        want = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        for (path, a), (_, b) in zip(oracle.leaves(got), oracle.leaves(want), strict=True):
            assert np.isfinite(np.asarray(b, np.float32)).all(), path
            if a.size:  # relative to what the sums add up: the router's gradient may cancel to 0
                np.testing.assert_allclose(a, b, rtol=CLOSE, atol=16 * CLOSE, err_msg=path)
