"""The Linen layer: what it adds to `dropless.moe`, which is variables and Flax's conventions."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import dropless
from dropless.linen import MoELayer

H, I, E, K = 24, 20, 6, 2  # noqa: E741
B, S = 3, 7


def inputs(seed=1, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (B, S, H), dtype)


def make(**options):
    return MoELayer(**({"num_experts": E, "experts_per_token": K, "expert_dim": I} | options))


def leaves_equal(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_fields_are_those_of_the_config():
    """A field added to MoEConfig must be added to the layer, with the same default."""
    layer = {field.name: field for field in dataclasses.fields(MoELayer)}
    for field in dataclasses.fields(dropless.MoEConfig):
        assert layer[field.name].default == field.default, field.name
    assert MoELayer(num_experts=E).config == dropless.MoEConfig(num_experts=E)


def test_is_moe_over_its_own_params():
    layer, x = make(), inputs()
    variables = layer.init(jax.random.key(0), x)
    y, state = layer.apply(variables, x, mutable=["intermediates"])
    want, aux = dropless.moe(x, variables["params"], layer.config)
    assert np.array_equal(y, want)
    (sown,) = state["intermediates"]["moe_aux"]
    assert isinstance(sown, dropless.MoEAux) and leaves_equal(sown, aux)
    assert int(aux.dropped_tokens) == 0
    assert int(aux.expert_counts.sum()) == B * S * K
    assert np.array_equal(layer.apply(variables, x), want)
    assert leaves_equal(layer.apply(variables, x, return_aux=True), (want, aux))


def test_params_are_those_of_init_and_state_is_apart():
    router = dropless.RouterConfig(score="sigmoid", selection_bias=True, bias=True)
    layer = make(router=router, expert_bias=True)
    variables = layer.init(jax.random.key(0), inputs())
    want = jax.eval_shape(lambda key: dropless.init(key, H, layer.config), jax.random.key(0))
    bias = want["router"].pop("selection_bias")
    assert jax.tree.map(jnp.shape, variables["params"]) == jax.tree.map(jnp.shape, want)
    assert set(variables) == {"params", "router_state"}  # init sows nothing
    assert variables["router_state"]["selection_bias"].shape == bias.shape


def test_state_that_is_not_given_starts_at_zero():
    router = dropless.RouterConfig(score="sigmoid", selection_bias=True)
    layer, x = make(router=router), inputs()
    variables = layer.init(jax.random.key(0), x)
    y, made = layer.apply({"params": variables["params"]}, x, mutable=["router_state"])
    assert np.array_equal(y, layer.apply(variables, x))
    assert not np.any(np.asarray(made["router_state"]["selection_bias"]))


def test_return_aux_sows_nothing():
    layer, x = make(), inputs()
    variables = layer.init(jax.random.key(0), x)
    _, state = layer.apply(variables, x, return_aux=True, mutable=["intermediates"])
    assert not state.get("intermediates")


def test_h7_no_optimizer_touches_selection_bias():
    router = dropless.RouterConfig(score="sigmoid", selection_bias=True)
    layer, x = make(router=router), inputs()
    variables = layer.init(jax.random.key(0), x)
    params = variables["params"]
    state = {"selection_bias": jnp.linspace(-0.3, 0.3, E)}

    def loss(params):
        y = layer.apply({"params": params, "router_state": state}, x)
        return jnp.sum(y**2)

    optimizer = optax.adamw(0.1, weight_decay=0.5)
    updates, _ = optimizer.update(jax.grad(loss)(params), optimizer.init(params), params)
    assert "selection_bias" not in str(jax.tree.structure(updates))
    assert all(np.any(np.asarray(update)) for update in jax.tree.leaves(updates))
    # It does steer the choice: with it far up, an expert serves every token.
    pushed = {"selection_bias": state["selection_bias"].at[3].set(10.0)}
    variables = {"params": params, "router_state": pushed}
    _, aux = layer.apply(variables, x, return_aux=True)
    assert int(aux.expert_counts[3]) == B * S


def test_each_expert_starts_with_the_deviation_of_a_dense_layer():
    wide, narrow = 64, 192
    layer = MoELayer(num_experts=5, expert_dim=narrow)
    experts = layer.init(jax.random.key(0), jnp.ones((2, wide)))["params"]["experts"]
    for name, fan in ("gate", wide), ("up", wide), ("down", narrow):
        stack = np.asarray(experts[name])
        dense = nn.Dense(stack.shape[2]).init(jax.random.key(0), jnp.ones((1, fan)))
        for matrix in (*stack, np.asarray(dense["params"]["kernel"])):
            # The deviation of n normal samples is known to 1/sqrt(2n); truncation makes it smaller.
            assert abs(matrix.std() * math.sqrt(fan) - 1) < 5 / math.sqrt(2 * matrix.size), name
        assert len({matrix.tobytes() for matrix in stack}) == 5


def test_two_layers_of_a_model_differ():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return make(name="second")(make(name="first")(x))

    params = Model().init(jax.random.key(0), inputs())["params"]
    for a, b in zip(
        jax.tree.leaves(params["first"]), jax.tree.leaves(params["second"]), strict=True
    ):
        assert not np.array_equal(a, b)


@pytest.mark.parametrize("options", [{"experts_per_token": E + 1}, {"overflow": "spill"}])
def test_n2_bad_options_are_named(options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        make(**options).init(jax.random.key(0), inputs())


def test_n2_bad_inputs_are_named():
    layer = make()
    variables = layer.init(jax.random.key(0), inputs())
    with pytest.raises(TypeError, match="float16.*bfloat16"):
        layer.apply(variables, inputs(dtype=jnp.float16))
    for x in jnp.zeros(()), jnp.zeros((3, 0)):
        with pytest.raises(ValueError, match=r"x must have shape \[\.\.\., H\]"):
            layer.apply(variables, x)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_gradients_under_transforms(transform):
    layer, x = make(), inputs()
    variables = jax.jit(layer.init)(jax.random.key(0), x)

    def loss(params, x):
        return jnp.sum(transform(lambda p, x: layer.apply({"params": p}, x))(params, x) ** 2)

    def plain(params, x):
        return jnp.sum(dropless.moe(x, params, layer.config)[0] ** 2)

    got = jax.grad(loss, (0, 1))(variables["params"], x)
    want = jax.grad(plain, (0, 1))(variables["params"], x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


def test_stacked_layers_equal_a_loop():
    layers, x = 4, inputs()

    class Step(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + make(name="moe")(x), None

    scanned = nn.scan(
        Step,
        variable_axes={"params": 0, "intermediates": 0},
        split_rngs={"params": True},
        length=layers,
    )()
    params = scanned.init(jax.random.key(0), x, None)["params"]
    assert params["moe"]["experts"]["gate"].shape == (layers, E, H, I)
    (got, _), state = scanned.apply({"params": params}, x, None, mutable=["intermediates"])
    want, counts = x, []
    for index in range(layers):
        layer = jax.tree.map(lambda leaf, i=index: leaf[i], params["moe"])
        y, aux = make().apply({"params": layer}, want, return_aux=True)
        want = want + y
        counts.append(aux.expert_counts)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    (sown,) = state["intermediates"]["moe"]["moe_aux"]
    assert np.array_equal(sown.expert_counts, jnp.stack(counts))


def test_mask_and_prepared_experts():
    layer, x = make(), inputs()
    variables = layer.init(jax.random.key(0), x)
    mask = jnp.arange(B * S).reshape(B, S) % 3 != 0
    prepared = dropless.prepare_experts(variables["params"], layer.config)
    y, aux = layer.apply(variables, x, mask=mask, prepared=prepared, return_aux=True)
    assert np.all(np.asarray(y)[~np.asarray(mask)] == 0)
    assert int(aux.expert_counts.sum()) == K * int(mask.sum())


def test_dropout_follows_deterministic():
    layer = make(dropout=0.25)
    x = jax.random.normal(jax.random.key(0), (500, H))
    variables = layer.init(jax.random.key(0), x, deterministic=True)
    clean = layer.apply(variables, x, deterministic=True)
    rngs = {"dropout": jax.random.key(1)}
    first = layer.apply(variables, x, deterministic=False, rngs=rngs)
    assert np.array_equal(first, layer.apply(variables, x, deterministic=False, rngs=rngs))
    kept = np.asarray(first) != 0
    np.testing.assert_allclose(np.asarray(first)[kept], np.asarray(clean)[kept] / 0.75, rtol=1e-6)
    # A share of n kept elements is known to sqrt(p (1 - p) / n).
    assert abs(kept.mean() - 0.75) < 5 * math.sqrt(0.75 * 0.25 / kept.size)
    fixed = make(dropout=0.25, deterministic=True)
    assert np.array_equal(fixed.apply(variables, x), clean)
    with pytest.raises(ValueError, match="deterministic"):
        layer.apply(variables, x)


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_n2_dropout_rate_is_checked(rate):
    with pytest.raises(ValueError, match=f"dropout.*{rate}"):
        make(dropout=rate).init(jax.random.key(0), inputs(), deterministic=True)
