"""The layers among JAX's own tools: devices, export, meshes, memory, deep models.

The pure function under every transformation is in test_transforms.py and test_sharding.py.
"""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dropless

T, H, I, E, K = 40, 24, 20, 6, 2  # noqa: E741
CFG = dropless.MoEConfig(num_experts=E, experts_per_token=K, expert_dim=I, precision="f32")


def inputs(tokens=T, cfg=CFG, h=H):
    params = dropless.init(jax.random.key(0), h, cfg)
    return jax.random.normal(jax.random.key(1), (tokens, h)), params


def loss(x, params, cfg=CFG):
    y, aux = dropless.moe(x, params, cfg)
    return jnp.sum(y**2) + 0.1 * aux.load_balance_loss


def value_and_grads(x, params):
    return jax.value_and_grad(loss, (0, 1))(x, params)


def assert_same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# Devices and export


def test_runs_on_a_device_chosen_by_any_means():
    x, params = inputs()
    want = jax.jit(value_and_grads)(x, params)
    device = jax.devices("cpu")[-1]
    with jax.default_device(device):
        there = inputs()
        got = jax.jit(value_and_grads)(*there)
    assert there[0].devices() == {device}
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(got))
    assert_same_bits(got, want)
    sharding = jax.sharding.SingleDeviceSharding(device)
    pinned = jax.jit(value_and_grads, in_shardings=sharding, out_shardings=sharding)
    assert_same_bits(pinned(x, params), want)


def test_j4_pmap():
    x, params = inputs()
    xs = jnp.stack([x, x[::-1]])
    got = jax.pmap(value_and_grads, in_axes=(0, None))(xs, params)
    for index in range(2):
        want = jax.jit(value_and_grads)(xs[index], params)
        assert_same_bits(jax.tree.map(lambda leaf, i=index: leaf[i], got), want)


def test_export_is_refused_without_the_published_checks():
    """What disabled_checks is for: JAX refuses custom calls that it does not know."""
    with pytest.raises(ValueError, match="dropless_"):
        jax.export.export(jax.jit(value_and_grads))(*inputs())


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda")])
def test_export_of_a_layer(platforms):
    layer = dropless.MoELayer(config=CFG, model_dim=H)
    graph, state = nnx.split(layer)

    @jax.jit
    def apply(leaves, x):
        state_there = jax.tree.unflatten(jax.tree.structure(state), leaves)
        y, aux = nnx.merge(graph, state_there)(x, return_aux=True)
        return y, aux.expert_counts

    x, _ = inputs()
    leaves = jax.tree.leaves(state)
    exported = jax.export.export(
        apply, platforms=platforms, disabled_checks=dropless.export_disabled_checks()
    )(leaves, x)
    restored = jax.export.deserialize(exported.serialize())
    assert set(restored.platforms) == set(platforms)
    assert_same_bits(restored.call(leaves, x), apply(leaves, x))


# Meshes


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_layer_trains_data_parallel_in_one_trace(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    x, _ = inputs()
    target = jax.random.normal(jax.random.key(3), x.shape)
    traces = 0

    def step(layer, optimizer, x, target):
        nonlocal traces
        traces += 1

        def objective(layer):
            return jnp.mean((layer(x) - target) ** 2) + 0.1 * layer.aux.load_balance_loss

        value, grads = nnx.value_and_grad(objective)(layer)
        optimizer.update(layer, grads)
        return value

    def train(place):
        layer = dropless.MoELayer(config=CFG, model_dim=H, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(layer, optax.sgd(0.5), wrt=nnx.Param)
        both = (layer, optimizer)
        nnx.update(both, place(nnx.state(both), replicated))
        batch = place(x, split), place(target, split)
        run = nnx.jit(step)
        values = [float(run(layer, optimizer, *batch)) for _ in range(4)]
        return values, layer.aux.get_value(), layer.params

    want = train(lambda tree, _: tree)
    assert traces == 1
    with jax.set_mesh(mesh):
        got = train(jax.device_put)
    assert traces == 2
    assert int(got[1].expert_counts.sum()) == T * K and int(got[1].dropped_tokens) == 0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Means and gradients are summed in another order over four devices, four steps long.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# Memory


def test_k1_temporary_memory_is_that_of_the_formula():
    tokens, h, i = 2048, 40, 56
    cfg = dropless.MoEConfig(48, 4, i, precision="f32")
    x, params = inputs(tokens, cfg, h)
    step = jax.jit(jax.grad(functools.partial(loss, cfg=cfg), (0, 1)))
    rows = tokens * 4
    # h and dh (2I each), p * A (I), one array of rows; the routing is the small rest.
    formula = 4 * rows * (h + 5 * i)
    used = step.lower(x, params).compile().memory_analysis().temp_size_in_bytes
    assert 0 < used <= 1.3 * formula


# Deep models


def test_j1_a_deep_scan_under_remat_compiles_in_the_time_of_a_shallow_one():
    x, params = inputs()

    def block(x, params):
        y, aux = dropless.moe(x, params, CFG)
        return x + y, aux.load_balance_loss

    def total(x, stacked):
        y, losses = jax.lax.scan(jax.checkpoint(block), x, stacked)
        return jnp.sum(y) + jnp.sum(losses)

    def compile_seconds(layers):
        stacked = jax.tree.map(lambda p: jnp.stack([p] * layers), params)
        start = time.monotonic()
        jax.jit(jax.grad(total, (0, 1))).lower(x, stacked).compile()
        return time.monotonic() - start

    compile_seconds(2)  # whatever is done once in a process
    shallow, deep = compile_seconds(3), compile_seconds(24)
    assert deep < 60 and deep < 5 * shallow + 5
