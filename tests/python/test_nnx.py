"""The NNX layer: what it adds to `dropless.moe`, which is state and Flax's conventions."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dropless
from dropless.nnx import AuxState, RouterState
from small_layers import OPTIONS, B, E, H, I, K, S, inputs, leaves_equal, loss_of, make

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
    lazy = {type(v) for _, v in nnx.iter_graph(make()) if isinstance(v, nnx.Variable)}
    assert lazy == {AuxState, nnx.Param}  # and that one is no parameter, see below


# Bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"expert_width": 3}, TypeError, "expert_width.*expert_dim"),
        ({"rngs": 3}, TypeError, "rngs.*nnx.Rngs"),
        ({"rngs": jax.random.key(0)}, TypeError, "rngs.*nnx.Rngs"),
        ({"dropout": 1.5}, ValueError, "dropout.*1.5"),
        ({"dropout": "0.1"}, ValueError, "dropout.*'0.1'"),
        ({"experts_per_token": E + 1}, ValueError, f"experts_per_token.*{E + 1}"),
        ({"config": dropless.MoEConfig(num_experts=E)}, TypeError, "config.*num_experts"),
        ({"num_experts": None}, TypeError, "num_experts"),
        ({"model_dim": 0}, ValueError, "model_dim.*0"),
        ({"param_dtype": jnp.float16, "model_dim": H}, TypeError, "float16.*bfloat16"),
        ({"param_dtype": jnp.float16}, TypeError, "param_dtype.*float16.*bfloat16"),
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


@pytest.mark.parametrize("x", [np.zeros((B, H + 1), np.int32), jnp.zeros((B, H + 1), jnp.float16)])
def test_n2_an_input_that_is_refused_does_not_decide_the_width(x):
    layer = make()
    with pytest.raises(TypeError, match="x must be float32 or bfloat16"):
        layer(x)
    assert layer(inputs()).shape == inputs().shape


def test_n2_another_width_is_named():
    layer = make(model_dim=H)
    with pytest.raises(ValueError, match=f"{H + 1}.*{H}|{H}.*{H + 1}"):
        layer(jnp.zeros((B, H + 1)))
    with pytest.raises(ValueError, match="mask"):
        layer(inputs(), mask=jnp.ones((B, S + 1), bool))


def test_a_lazy_layers_stand_in_goes_with_the_first_call():
    layer = make()
    assert set(nnx.to_flat_state(nnx.state(layer, nnx.Param)).paths) == {("needs_model_dim",)}
    layer(inputs())
    eager = make(model_dim=H)
    assert nnx.state(layer, nnx.Param).keys() == nnx.state(eager, nnx.Param).keys()
    assert jax.tree.structure(nnx.state(layer)) == jax.tree.structure(nnx.state(eager))


def test_params_before_they_exist():
    with pytest.raises(ValueError, match="model_dim"):
        make().prepare()
