"""The NNX layer under transformations of JAX and of Flax, before and after its first call."""

from __future__ import annotations

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx

import dropless
from small_layers import B, E, H, I, K, S, inputs, leaves_equal, loss_of, make


def by_argument(transform):
    return lambda layer, x: transform(loss_of)(layer, x)


def closed_over(transform):
    return lambda layer, x: transform(lambda x: loss_of(layer, x))(x)


TRANSFORMS = {
    "plain": lambda layer, x: loss_of(layer, x),
    "jax.jit": by_argument(jax.jit),
    "jax.jit over": closed_over(jax.jit),
    "jax.value_and_grad": lambda layer, x: jax.value_and_grad(loss_of)(layer, x)[0],
    "jax.value_and_grad over": lambda layer, x: closed_over(jax.value_and_grad)(layer, x)[0],
    "jax.jit of value_and_grad": lambda layer, x: jax.jit(jax.value_and_grad(loss_of))(layer, x)[0],
    "jax.checkpoint over": closed_over(jax.checkpoint),
    "jax.vmap over": lambda layer, x: closed_over(jax.vmap)(layer, x).sum(),
    "nnx.jit": by_argument(nnx.jit),
    "nnx.value_and_grad": lambda layer, x: nnx.value_and_grad(loss_of)(layer, x)[0],
    "nnx.jit of value_and_grad": lambda layer, x: nnx.jit(nnx.value_and_grad(loss_of))(layer, x)[0],
    "nnx.remat": by_argument(nnx.remat),
}


# A gradient of the layer itself needs parameters that exist; see the test of the refusal.
OF_THE_LAYER = [
    *("jax.value_and_grad", "jax.jit of value_and_grad"),
    *("nnx.value_and_grad", "nnx.jit of value_and_grad"),
]

# jax.grad refuses the keys that any Flax layer with dropout holds.
CASES = [
    (name, *case)
    for name in TRANSFORMS
    for case in ((None, False, 0.0), (None, True, 0.0), (H, False, 0.0), (None, True, 0.3))
    if not (case[-1] and name in ("jax.value_and_grad", "jax.jit of value_and_grad"))
    and not (case[:2] == (None, False) and name in OF_THE_LAYER)
]


@pytest.mark.parametrize(("name", "model_dim", "called", "dropout"), CASES)
def test_transforms_before_and_after_the_first_call(name, model_dim, called, dropout):
    x = inputs()
    layer = make(model_dim=model_dim, rngs=nnx.Rngs(5), dropout=dropout)
    layer.eval()
    want = loss_of(make(model_dim=H, rngs=nnx.Rngs(5)), x)
    if called:
        layer(x)
    np.testing.assert_allclose(TRANSFORMS[name](layer, x), want, rtol=1e-5)
    # Whatever it was, the layer is whole afterwards: it holds values, not tracers, and runs.
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(layer))
    np.testing.assert_allclose(loss_of(layer, x), want, rtol=1e-5)
    assert int(layer.aux.expert_counts.sum()) == B * S * K


GRADIENTS = {
    **{name: TRANSFORMS[name] for name in OF_THE_LAYER},
    "nnx.grad": by_argument(nnx.grad),
    "jax.grad of jax.jit": lambda layer, x: jax.grad(jax.jit(loss_of))(layer, x),
    "nnx.grad of nnx.jit": lambda layer, x: nnx.grad(nnx.jit(loss_of))(layer, x),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_n2_a_gradient_of_a_layer_without_parameters_is_refused(name):
    layer, x = make(rngs=nnx.Rngs(5)), inputs()
    with pytest.raises(ValueError, match=r"model_dim=H\), or call it once before nnx.grad"):
        GRADIENTS[name](layer, x)
    # It is as it was: the first call makes the parameters, and the gradient is that of any layer.
    want = loss_of(make(model_dim=H, rngs=nnx.Rngs(5)), x)
    np.testing.assert_allclose(loss_of(layer, x), want, rtol=1e-5)
    GRADIENTS[name](layer, x)


def test_gradients_to_the_input_of_a_layer_without_parameters():
    layer, x = make(rngs=nnx.Rngs(5)), inputs()
    want = jax.grad(lambda x: loss_of(make(model_dim=H, rngs=nnx.Rngs(5)), x))(x)
    for got in (
        nnx.grad(loss_of, argnums=1)(make(rngs=nnx.Rngs(5)), x),
        jax.grad(lambda x: loss_of(layer, x))(x),
        jax.grad(loss_of, argnums=1)(make(rngs=nnx.Rngs(5)), x),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_n2_an_optimizer_made_before_the_parameters():
    layer, x = make(), inputs()
    optimizer = nnx.Optimizer(layer, optax.adamw(1e-2), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"an optimiser over it needs parameters.*model_dim=H"):
        nnx.value_and_grad(loss_of)(layer, x)
    # Called in between, it has other parameters than the optimiser knows: Flax's error names what
    # the optimiser holds instead.
    layer(x)
    gradient = nnx.grad(loss_of)(layer, x)
    with pytest.raises(ValueError, match="needs_model_dim"):
        optimizer.update(layer, gradient)
    optimizer = nnx.Optimizer(layer, optax.adamw(1e-2), wrt=nnx.Param)
    optimizer.update(layer, gradient)


@pytest.mark.parametrize("called", [False, True])
def test_jax_grad_over_the_layer_equals_nnx_grad(called):
    layer, x = make(model_dim=H), inputs()
    if called:
        layer(x)
    got = jax.grad(loss_of)(layer, x)
    want = nnx.grad(loss_of)(layer, x)
    assert got.aux.expert_counts.dtype == jnp.int32
    assert leaves_equal(nnx.state(got, nnx.Param), want)
    dense = jax.grad(lambda params: jnp.sum(dropless.moe(x, params, layer.config)[0] ** 2))
    assert leaves_equal(got.params, dense(layer.params))


def test_aux_is_written_without_a_second_trace():
    traces = 0

    @nnx.jit
    def step(layer, x):
        nonlocal traces
        traces += 1
        return layer(x)

    layer = make(model_dim=H)
    assert int(layer.aux.expert_counts.sum()) == 0
    for seed in range(4):
        step(layer, inputs(seed))
        _, aux = layer(inputs(seed), return_aux=True)
        assert np.array_equal(layer.aux.expert_counts, aux.expert_counts)
    assert traces == 1


def test_aux_write_is_skipped_where_flax_forbids_it():
    layer, x = make(model_dim=H), inputs()
    layer(inputs(seed=2))
    before = layer.aux.get_value()
    jax.jit(lambda x: layer(x))(x)
    jax.grad(lambda x: loss_of(layer, x))(x)
    assert leaves_equal(layer.aux.get_value(), before)


def test_return_aux_is_pure():
    layer, x = make(model_dim=H), inputs()
    layer(inputs(seed=2))
    before = jax.tree.map(lambda leaf: leaf, layer)
    y, aux = layer(x, return_aux=True)
    assert leaves_equal(layer, before)
    assert np.array_equal(y, layer(x))
    assert leaves_equal(layer.aux.get_value(), aux)


def test_return_aux_works_where_one_layer_serves_a_batch():
    layer, xs = make(model_dim=H), jnp.stack([inputs(1), inputs(2)])
    batched = nnx.vmap(lambda layer, x: layer(x, return_aux=True), in_axes=(None, 0))
    ys, auxs = batched(layer, xs)
    for index in range(2):
        y, aux = layer(xs[index], return_aux=True)
        np.testing.assert_allclose(ys[index], y, rtol=1e-5, atol=1e-6)
        assert np.array_equal(auxs.expert_counts[index], aux.expert_counts)


def test_e3_losses_read_from_aux_carry_gradients():
    layer, x = make(model_dim=H), inputs()

    def by_state(layer, x):
        layer(x)
        return layer.aux.load_balance_loss + layer.aux.z_loss

    def by_value(layer, x):
        _, aux = layer(x, return_aux=True)
        return aux.load_balance_loss + aux.z_loss

    got, want = nnx.grad(by_state)(layer, x), nnx.grad(by_value)(layer, x)
    assert leaves_equal(got, want)
    assert float(jnp.abs(got["router"]["kernel"][...]).max()) > 0


def test_eval_shape():
    layer = nnx.eval_shape(lambda: make(model_dim=H, rngs=nnx.Rngs(0)))
    assert layer.experts.gate.get_value() == jax.ShapeDtypeStruct((E, H, I), jnp.float32)
    assert layer.aux.get_value().expert_counts == jax.ShapeDtypeStruct((E,), jnp.int32)
    with pytest.raises(ValueError, match="model_dim"):
        nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))


def test_stacked_layers_equal_a_loop():
    layers, x = 4, inputs()

    @nnx.split_rngs(splits=layers)
    @nnx.vmap
    def stack(rngs):
        return make(model_dim=H, rngs=rngs, expert_dim=I)

    stacked = stack(nnx.Rngs(0))
    assert stacked.experts.gate.shape == (layers, E, H, I)

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return x + layer(x)

    got, want, counts = run(stacked, x), x, []
    for index in range(layers):
        graph, state = nnx.split(stacked)
        layer = nnx.merge(graph, jax.tree.map(lambda leaf, i=index: leaf[i], state))
        want = want + layer(want)
        counts.append(layer.aux.expert_counts)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert stacked.aux.expert_counts.shape == (layers, E)
    assert np.array_equal(stacked.aux.expert_counts, jnp.stack(counts))
    assert np.array_equal(stacked.aux[2].expert_counts, counts[2])


@pytest.mark.parametrize("model_dim", [None, H])
def test_optimizer_trains_the_layer_in_one_trace(model_dim):
    layer, x = make(model_dim=model_dim), inputs()
    if model_dim is None:
        layer(x)  # an optimiser needs the parameters
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
    target, traces = inputs(seed=9), 0

    @nnx.jit
    def step(layer, optimizer, x):
        nonlocal traces
        traces += 1
        loss, grads = nnx.value_and_grad(lambda layer: jnp.mean((layer(x) - target) ** 2))(layer)
        optimizer.update(layer, grads)
        return loss

    losses = [float(step(layer, optimizer, x)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    assert traces == 1


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(H, rngs=rngs)
        self.moe = make(model_dim=H, rngs=rngs, dropout=0.2)

    def __call__(self, x):
        return x + self.moe(self.norm(x))


def test_inside_a_model_and_through_split_and_merge():
    block, x = Block(nnx.Rngs(0)), inputs()
    block.eval()
    want = block(x)
    graph, params, rest = nnx.split(block, nnx.Param, ...)
    assert set(nnx.to_flat_state(params).paths) == {
        ("norm", "scale"), ("moe", "router", "kernel"),
        ("moe", "experts", "gate"), ("moe", "experts", "up"), ("moe", "experts", "down"),
    }  # fmt: skip
    assert np.array_equal(nnx.merge(graph, params, rest)(x), want)
    assert np.array_equal(copy.deepcopy(block)(x), want)
    assert np.array_equal(pickle.loads(pickle.dumps(block))(x), want)
    assert "AuxState" in repr(block)


def test_a_layer_cast_as_a_whole_still_runs():
    layer, x = make(model_dim=H), inputs()
    layer(x)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), layer)
    assert half.aux.expert_counts.dtype == jnp.int32
    assert half(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert int(half.aux.expert_counts.sum()) == B * S * K


def test_a_layer_is_saved_and_restored_by_orbax(tmp_path):
    build = functools.partial(make, model_dim=H, router=dropless.RouterConfig(selection_bias=True))
    layer, other, x = build(), build(), inputs()
    layer(x)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", nnx.state(layer))
        checkpointer.wait_until_finished()
        like = nnx.state(nnx.eval_shape(build))
        nnx.update(other, checkpointer.restore(tmp_path / "layer", like))
    assert leaves_equal(other, layer)
    assert np.array_equal(other.aux.expert_counts, layer.aux.expert_counts)


def test_tabulate_shows_the_layer():
    table = nnx.tabulate(make(model_dim=H), inputs(), console_kwargs={"width": 200})
    assert "MoELayer" in table
    assert f"{H * E + 3 * E * H * I:,}" in table  # its parameters


def test_a_checkpoint_of_plain_dicts_leaves_aux_out(tmp_path):
    router = dropless.RouterConfig(selection_bias=True)
    layer = make(model_dim=H, router=router)
    want = layer(inputs())
    saved = nnx.state(layer, nnx.Not(dropless.nnx.AuxState))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", nnx.to_pure_dict(saved))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "layer")
    other = make(model_dim=H, router=router)
    state = nnx.state(other, nnx.Not(dropless.nnx.AuxState))
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(other, state)
    np.testing.assert_array_equal(other(inputs()), want)
