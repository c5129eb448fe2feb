"""The NNX layer: what it adds to `dropless.moe`, which is state and Flax's conventions."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx

import dropless
from dropless.nnx import AuxState, RouterState

H, I, E, K = 24, 20, 6, 2  # noqa: E741
B, S = 3, 7
OPTIONS = {"num_experts": E, "experts_per_token": K, "expert_dim": I}


def inputs(seed=1, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (B, S, H), dtype)


def make(**options):
    return dropless.MoELayer(**(OPTIONS | options))


def loss_of(layer, x):
    return jnp.sum(layer(x) ** 2)


def leaves_equal(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


# What it computes


@pytest.mark.parametrize("model_dim", [None, H])
def test_is_moe_over_its_own_params(model_dim):
    layer, x = make(model_dim=model_dim), inputs()
    y = layer(x)
    want, aux = dropless.moe(x, layer.params, layer.config)
    assert y.shape == x.shape and y.dtype == x.dtype
    assert np.array_equal(y, want)
    assert leaves_equal(layer.aux.get_value(), aux)
    assert isinstance(layer.aux.get_value(), dropless.MoEAux)


def test_defaults():
    layer = dropless.MoELayer(num_experts=4, model_dim=100)
    assert layer.config.experts_per_token == 2
    # 8/3 * 100 / 2 = 133.3, rounded up to a multiple of 64.
    assert layer.experts.gate.shape == (4, 100, 192)
    assert layer.experts.down.shape == (4, 192, 100)


def test_every_option_of_the_config_passes_through():
    router = dropless.RouterConfig(score="sigmoid", scale=2.5, selection_bias=True, bias=True)
    options = {"router": router, "activation": "gelu", "expert_bias": True, "precision": "bf16"}
    layer = make(model_dim=H, **options)
    assert layer.config == dropless.MoEConfig(**OPTIONS, **options)
    same = dropless.MoELayer(config=layer.config, model_dim=H)
    assert same.config == layer.config
    shapes = jax.eval_shape(lambda key: dropless.init(key, H, layer.config), jax.random.key(0))
    assert jax.tree.map(jnp.shape, layer.params) == jax.tree.map(jnp.shape, shapes)


def test_mask_reaches_the_router():
    layer, x = make(model_dim=H), inputs()
    mask = jnp.arange(B * S).reshape(B, S) % 3 != 0
    y = layer(x, mask=mask)
    assert np.all(np.asarray(y)[~np.asarray(mask)] == 0)
    assert int(layer.aux.expert_counts.sum()) == K * int(mask.sum())


def test_prepared_experts_change_nothing_and_pass_no_gradient_by():
    layer, x = make(model_dim=H), inputs()
    assert np.array_equal(layer(x, prepared=layer.prepare()), layer(x))
    _, want = nnx.value_and_grad(loss_of)(layer, x)
    prepared = layer.prepare()
    got = nnx.grad(lambda layer, x: jnp.sum(layer(x, prepared=prepared) ** 2))(layer, x)
    assert leaves_equal(got, want)


ROUTINGS = ["one", "none_to_first", "zipf"]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_no_token_is_dropped_under_any_routing(routing):
    layer = make(model_dim=H, expert_capacity_factor=1.0)
    bias = {
        "one": jnp.where(jnp.arange(E) < K, 1e4, 0.0),
        "none_to_first": jnp.where(jnp.arange(E) == 0, -1e4, 0.0),
        "zipf": -3.0 * jnp.log(1.0 + jnp.arange(E)),
    }[routing]
    # A constant input feature turns a row of the router's kernel into a bias.
    layer.router.kernel[...] = layer.router.kernel[...].at[0].set(bias)
    layer(inputs().at[..., 0].set(1.0))
    assert int(layer.aux.dropped_tokens) == 0
    assert int(layer.aux.expert_counts.sum()) == B * S * K
    if routing == "one":
        assert layer.aux.expert_counts.tolist() == [B * S] * K + [0] * (E - K)
    if routing == "none_to_first":
        assert int(layer.aux.expert_counts[0]) == 0


def test_empty_batch():
    layer = make(model_dim=H)
    assert layer(jnp.zeros((0, H))).shape == (0, H)
    assert int(layer.aux.expert_counts.sum()) == 0


# Parameters


@pytest.mark.parametrize("model_dim", [None, 64])
def test_each_expert_starts_with_the_deviation_of_a_dense_layer(model_dim):
    wide, narrow = 64, 192
    layer = dropless.MoELayer(num_experts=5, expert_dim=narrow, model_dim=model_dim)
    layer(jnp.ones((2, wide)))
    for name, fan in ("gate", wide), ("up", wide), ("down", narrow):
        stack = np.asarray(getattr(layer.experts, name)[...])
        dense = np.asarray(nnx.Linear(*stack.shape[1:], rngs=nnx.Rngs(0)).kernel[...])
        samples = dense.size
        for matrix in (*stack, dense):
            # The deviation of n normal samples is known to 1/sqrt(2n); truncation makes it smaller.
            assert abs(matrix.std() * math.sqrt(fan) - 1) < 5 / math.sqrt(2 * samples), name
        assert len({matrix.tobytes() for matrix in stack}) == 5


def test_kernel_init_sees_each_expert_as_its_own_matrix():
    layer = make(model_dim=H, kernel_init=nnx.initializers.orthogonal())
    for matrix in layer.experts.gate[...]:
        np.testing.assert_allclose(matrix.T @ matrix, np.eye(I), atol=1e-5)


@pytest.mark.parametrize("model_dim", [None, H])
def test_two_layers_without_rngs_differ(model_dim):
    first, second, x = make(model_dim=model_dim), make(model_dim=model_dim), inputs()
    first(x), second(x)
    for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params), strict=True):
        assert not np.array_equal(a, b)


def test_rngs_decide_the_parameters_lazily_and_at_construction():
    x = inputs()
    eager, lazy = make(model_dim=H, rngs=nnx.Rngs(3)), make(rngs=nnx.Rngs(3))
    other = make(model_dim=H, rngs=nnx.Rngs(4))
    assert np.array_equal(eager(x), lazy(x))
    assert leaves_equal(eager.params, lazy.params)
    assert not leaves_equal(eager.params, other.params)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, "bfloat16"])
def test_param_dtype(dtype):
    router = dropless.RouterConfig(selection_bias=True)
    layer = make(model_dim=H, param_dtype=dtype, router=router)
    for path, leaf in jax.tree_util.tree_leaves_with_path(layer.params):
        assert leaf.dtype == (jnp.float32 if "selection_bias" in str(path) else dtype)
    assert layer(inputs(dtype=jnp.dtype(dtype))).dtype == dtype


def test_h7_no_optimizer_touches_selection_bias():
    router = dropless.RouterConfig(score="sigmoid", selection_bias=True)
    layer, x = make(model_dim=H, router=router), inputs()
    assert isinstance(layer.router.selection_bias, RouterState)
    assert "selection_bias" not in str(nnx.state(layer, nnx.Param))
    layer.router.selection_bias[...] = jnp.linspace(-0.3, 0.3, E)
    before = nnx.clone(layer).params
    optimizer = nnx.Optimizer(layer, optax.adamw(0.1, weight_decay=0.5), wrt=nnx.Param)
    for _ in range(3):
        optimizer.update(layer, nnx.grad(loss_of)(layer, x))
    after = layer.params
    bits = np.asarray(after["router"].pop("selection_bias")).tobytes()
    assert bits == np.asarray(before["router"].pop("selection_bias")).tobytes()
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert not np.array_equal(a, b)


# Transformations


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


# jax.grad refuses the keys that any Flax layer with dropout holds.
CASES = [
    (name, *case)
    for name in TRANSFORMS
    for case in ((None, False, 0.0), (None, True, 0.0), (H, False, 0.0), (None, True, 0.3))
    if not (case[-1] and name in ("jax.value_and_grad", "jax.jit of value_and_grad"))
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


# Dropout


def test_dropout_follows_train_and_eval():
    layer = make(model_dim=H, dropout=0.25, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (500, H))
    layer.eval()
    clean = layer(x)
    assert np.array_equal(clean, dropless.moe(x, layer.params, layer.config)[0])
    assert np.array_equal(layer(x), clean)
    layer.train()
    first, second = layer(x), layer(x)
    assert not np.array_equal(first, second)
    kept = np.asarray(first) != 0
    np.testing.assert_allclose(np.asarray(first)[kept], np.asarray(clean)[kept] / 0.75, rtol=1e-6)
    # A share of n kept elements is known to sqrt(p (1 - p) / n).
    assert abs(kept.mean() - 0.75) < 5 * math.sqrt(0.75 * 0.25 / kept.size)
    assert np.array_equal(layer(x, deterministic=True), clean)
    layer.eval()
    assert not np.array_equal(layer(x, deterministic=False), clean)


def test_dropout_takes_a_key_for_one_call():
    layer, x = make(model_dim=H, dropout=0.5), inputs()
    first = layer(x, rngs=jax.random.key(1))
    assert np.array_equal(first, layer(x, rngs=jax.random.key(1)))
    assert not np.array_equal(first, layer(x, rngs=jax.random.key(2)))
    over = jax.jit(lambda x: layer(x, rngs=jax.random.key(1)))
    np.testing.assert_allclose(over(x), first, rtol=1e-5, atol=1e-6)


def test_two_layers_without_rngs_drop_differently():
    x = inputs()
    masks = [np.asarray(make(model_dim=H, dropout=0.5)(x)) == 0 for _ in range(2)]
    assert not np.array_equal(*masks)


def test_without_dropout_a_layer_holds_no_keys():
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(make(model_dim=H))}
    assert dtypes == {jnp.dtype(jnp.float32)}
    assert {type(v) for _, v in nnx.iter_graph(make()) if isinstance(v, nnx.Variable)} == {AuxState}


# Bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"expert_width": 3}, TypeError, "expert_width.*expert_dim"),
        ({"rngs": 3}, TypeError, "rngs.*nnx.Rngs"),
        ({"rngs": jax.random.key(0)}, TypeError, "rngs.*nnx.Rngs"),
        ({"dropout": 1.5}, ValueError, "dropout.*1.5"),
        ({"experts_per_token": E + 1}, ValueError, f"experts_per_token.*{E + 1}"),
        ({"config": dropless.MoEConfig(num_experts=E)}, TypeError, "config.*num_experts"),
        ({"num_experts": None}, TypeError, "num_experts"),
        ({"model_dim": 0}, ValueError, "model_dim.*0"),
        ({"param_dtype": jnp.float16, "model_dim": H}, TypeError, "float16.*bfloat16"),
    ],
)
def test_n2_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


@pytest.mark.parametrize("model_dim", [None, H])
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (jnp.zeros((B, H), jnp.float16), TypeError, "float16.*bfloat16"),
        (jnp.zeros((B, H), jnp.int32), TypeError, "int32"),
        (jnp.zeros(()), ValueError, r"x.*\[..., H\].*\(\)"),
        (jnp.zeros((B, 0)), ValueError, r"x.*\(3, 0\)"),
    ],
)
def test_n2_bad_inputs_are_named(x, error, message, model_dim):
    layer = make(model_dim=model_dim)
    with pytest.raises(error, match=message):
        layer(x)
    layer(inputs())  # and the layer is as good as new


def test_n2_another_width_is_named():
    layer = make(model_dim=H)
    with pytest.raises(ValueError, match=f"{H + 1}.*{H}|{H}.*{H + 1}"):
        layer(jnp.zeros((B, H + 1)))
    with pytest.raises(ValueError, match="mask"):
        layer(inputs(), mask=jnp.ones((B, S + 1), bool))


def test_params_before_they_exist():
    with pytest.raises(ValueError, match="model_dim"):
        make().prepare()
