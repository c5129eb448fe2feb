"""The whole layer against the float64 oracle: outputs, losses, every gradient, every option."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
import oracle

# Of the losses in the objective whose gradient is taken.
COEFFICIENTS = (0.7, 0.3, -0.5)

# [B, S, H], I, E and K: pairwise different, and no multiple of a block anywhere.
SHAPE = (3, 29, 40)
BASE = dropless.MoEConfig(num_experts=7, experts_per_token=3, expert_dim=23)


def router(**options):
    return dataclasses.replace(BASE, router=dropless.RouterConfig(**options))


def base(**options):
    return dataclasses.replace(BASE, **options)


# gpt-oss's, with limits that a third of the pre-activations pass.
LIMITED = dropless.Activation("silu", slope=1.702, gate_limit=0.6, up_limit=0.9, up_offset=1.0)

OPTIONS = {
    "plain": BASE,
    "topk_first": router(score_before_topk=False),
    "unnormalised": router(renormalize=False),
    "topk_first_unnormalised": router(score_before_topk=False, renormalize=False),
    "sigmoid": router(score="sigmoid", renormalize_eps=1e-20, scale=2.5),
    "sigmoid_topk_first": router(score="sigmoid", score_before_topk=False, renormalize=False),
    "scale": router(scale=0.4),
    "router_bias": router(bias=True),
    "selection_bias": router(score="sigmoid", selection_bias=True),
    "gelu": base(activation="gelu"),
    "gelu_tanh": base(activation="gelu_tanh"),
    "relu": base(activation="relu"),
    "relu_squared_ungated": base(activation=dropless.Activation("relu_squared", gated=False)),
    "gelu_ungated_bias": base(
        activation=dropless.Activation("gelu", gated=False, gate_limit=0.7), expert_bias=True
    ),
    "limited": base(activation=LIMITED, expert_bias=True),
    "weighted_input": router(score="sigmoid", renormalize=False, weight_on="input"),
    "weighted_input_drop": dataclasses.replace(
        router(weight_on="input"),
        overflow="drop",
        expert_capacity_factor=0.8,
        expert_bias=True,
        shared_expert_dim=31,
    ),
    "shared": base(shared_expert_dim=31),
    "shared_gate": base(shared_expert_dim=31, shared_expert_gate=True, activation=LIMITED),
    "shared_ungated": base(
        shared_expert_dim=31, activation=dropless.Activation("relu", gated=False)
    ),
    "expert_bias": base(expert_bias=True),
    "drop": base(overflow="drop", expert_capacity_factor=0.8),
    "everything": dataclasses.replace(
        router(score="sigmoid", bias=True, selection_bias=True, scale=1.7),
        expert_bias=True,
        activation="gelu",
        shared_expert_dim=31,
        shared_expert_gate=True,
    ),
    "one_expert": base(num_experts=1, experts_per_token=1),
    "all_experts": base(num_experts=3, experts_per_token=3),
}


layer = jax.jit(dropless.moe, static_argnums=2)


@functools.cache
def gradient_function(cfg):
    def scalar(x, params, mask, prepared, dy, coefficients):
        outputs = dropless.moe(x, params, cfg, mask=mask, prepared=prepared)
        return oracle.objective(outputs, dy.astype(jnp.float32), coefficients), outputs

    return jax.jit(jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True))


def run(cfg, x, params, dy, mask=None, prepared=None):
    (_, outputs), gradients = gradient_function(cfg)(x, params, mask, prepared, dy, COEFFICIENTS)
    return outputs, gradients


def check_aux(aux, want, limit):
    for name in ("expert_counts", "dropped_tokens"):
        np.testing.assert_array_equal(getattr(aux, name), want[name], err_msg=name)
    for name in oracle.LOSSES:
        oracle.assert_close(name, getattr(aux, name), want[name], limit)
    assert int(aux.nonfinite_logits) == 0


def check(cfg, got, want, precision, length):
    """Compares the outputs and each gradient on its own."""
    (y, aux), (dx, dparams) = got
    (y_want, aux_want), (dx_want, dparams_want) = want
    # Roundings on the longest path to y: x, two weights, h, A, down, O; and twice as many back.
    forward = oracle.bound(precision, length, 7, fp8=oracle.FP8_FORWARD)
    backward = oracle.bound(precision, length, 14, fp8=oracle.FP8_BACKWARD)
    check_aux(aux, aux_want, oracle.bound("f32", length, 7))
    oracle.assert_close("y", y, y_want, forward)
    oracle.assert_close("dx", dx, dx_want, backward)
    wanted = dict(oracle.leaves(dparams_want))
    for path, gradient in oracle.leaves(dparams):
        oracle.assert_close(path, gradient, wanted[path], backward, groups=gradient.ndim == 3)


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("name", OPTIONS)
def test_q4_every_gradient_of_every_option_f32_by_oracle_and_finite_differences(name, masked):
    cfg = OPTIONS[name]
    x, params, dy = oracle.layer_case(cfg, SHAPE)
    mask = jnp.asarray(np.random.default_rng(1).random(SHAPE[:2]) < 0.6) if masked else None
    want = oracle.value_and_gradients(cfg, x, params, mask, dy, COEFFICIENTS)
    got = run(cfg, x, params, dy, mask)
    check(cfg, got, want, "f32", SHAPE[0] * SHAPE[1])
    limit = oracle.bound("f32", SHAPE[0] * SHAPE[1], 14)
    oracle.assert_slopes(cfg, got[1], x, params, mask, dy, COEFFICIENTS, limit)
    if cfg.overflow != "drop":
        assert int(got[0][1].dropped_tokens) == 0
    if cfg.router.selection_bias:
        assert not np.asarray(got[1][1]["router"]["selection_bias"]).any()


PRECISIONS = {
    "bf16": {"precision": "bf16"},
    "bf16_save_h_fp8": {"precision": "bf16", "save_h": "fp8"},
    "fp8": {"precision": "fp8"},
    "fp8_wgrad": {"precision": "fp8", "wgrad_precision": "fp8"},
    "fp8_all": {"precision": "fp8", "wgrad_precision": "fp8", "save_h": "fp8"},
    "fp8_pow2": {"precision": "fp8", "scale_rounding": "pow2"},
}


@pytest.mark.any_jax
@pytest.mark.parametrize("dtypes", ["x32_p32", "x16_p32", "x16_p16"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_q4_every_gradient_low_precision(name, dtypes):
    kinds = {"32": jnp.float32, "16": jnp.bfloat16}
    x_dtype, param_dtype = kinds[dtypes[1:3]], kinds[dtypes[5:7]]
    # 200 and 136 cross a scale block's border, and their tails are not multiples of 16.
    shape = (61, 200)
    cfg = dataclasses.replace(
        OPTIONS["everything"],
        **PRECISIONS[name],
        num_experts=5,
        experts_per_token=2,
        expert_dim=136,
        shared_expert_dim=None,
        shared_expert_gate=False,
    )
    x, params, dy = oracle.layer_case(cfg, shape, x_dtype, param_dtype)
    want = oracle.value_and_gradients(cfg, x, params, None, dy, COEFFICIENTS)
    got = run(cfg, x, params, dy)
    (y, _), (dx, dparams) = got
    assert y.dtype == x.dtype and dx.dtype == x.dtype
    for path, gradient in oracle.leaves(dparams):
        kind = jnp.float32 if "selection_bias" in path else param_dtype
        assert gradient.dtype == kind, path
    worst = "fp8" if "fp8" in name else "bf16"
    check(cfg, got, want, worst, shape[0])


@pytest.mark.parametrize("name", ["bf16", "fp8_all"])
def test_q4_shared_expert_low_precision(name):
    options = {"num_experts": 5, "experts_per_token": 2, "expert_dim": 136}
    shared = {"shared_expert_dim": 150, "shared_expert_gate": True}
    cfg = base(**PRECISIONS[name], **options, **shared)
    x, params, dy = oracle.layer_case(cfg, (61, 200), jnp.bfloat16)
    want = oracle.value_and_gradients(cfg, x, params, None, dy, COEFFICIENTS)
    check(cfg, run(cfg, x, params, dy), want, name.removesuffix("_all"), 61)


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8_all"])
def test_prepared_experts_give_the_same_bits(name):
    cfg = base(**PRECISIONS[name])
    cfg = dataclasses.replace(cfg, shared_expert_dim=31)
    x, params, dy = oracle.layer_case(cfg, SHAPE)
    without = run(cfg, x, params, dy)
    prepared = jax.jit(lambda p: dropless.prepare_experts(p, cfg))(params)
    given = run(cfg, x, params, dy, prepared=prepared)
    jax.tree.map(np.testing.assert_array_equal, given, without)


def test_i8_prepared_experts_are_not_stale():
    cfg = base(precision="fp8")
    x, params, dy = oracle.layer_case(cfg, SHAPE)
    first = run(cfg, x, params, dy, prepared=dropless.prepare_experts(params, cfg))
    again = run(cfg, x, params, dy, prepared=dropless.prepare_experts(params, cfg))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    changed = {**params, "experts": {**params["experts"], "down": params["experts"]["down"] * 2}}
    second = run(cfg, x, changed, dy, prepared=dropless.prepare_experts(changed, cfg))
    np.testing.assert_allclose(second[0][0], 2 * first[0][0], rtol=1e-6)


@pytest.mark.any_jax
@pytest.mark.parametrize("name", ["plain", "sigmoid", "everything", "topk_first"])
def test_gradients_by_finite_differences_of_the_layer_itself(name):
    cfg = dataclasses.replace(OPTIONS[name], num_experts=4, experts_per_token=2, expert_dim=9)
    x, params, dy = oracle.layer_case(cfg, (5, 12))
    mask = jnp.array([1, 1, 0, 1, 1])
    (y, _), gradients = run(cfg, x, params, dy, mask)
    size = oracle.rms(y) * np.linalg.norm(dy)  # of the objective's rounding error, in roundings
    rng = np.random.default_rng(7)
    step = 2.0**-9  # truncation and float32 rounding errors balance near the cube root of 2^-24
    for path, gradient in oracle.leaves(gradients):
        if "selection_bias" in path:
            continue
        direction = rng.standard_normal(gradient.shape)
        direction /= np.linalg.norm(direction)

        def at(distance, path=path, direction=direction):
            def move(p, leaf):
                return leaf + distance * direction if jax.tree_util.keystr(p) == path else leaf

            moved_x, moved = jax.tree_util.tree_map_with_path(move, (x, params))
            moved = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), moved, params)
            (y, aux), _ = run(cfg, jnp.asarray(moved_x, x.dtype), moved, dy, mask)
            total = np.sum(np.asarray(y, np.float64) * np.asarray(dy, np.float64))
            losses = [float(getattr(aux, loss)) for loss in oracle.LOSSES]
            return total + np.dot(COEFFICIENTS, losses), np.asarray(aux.expert_counts)

        def slope(step):
            (upper, counts_upper), (lower, counts_lower) = at(step), at(-step)
            # Else the step crossed a border.
            np.testing.assert_array_equal(counts_upper, counts_lower)
            return (upper - lower) / (2 * step)

        # Rounding: that of y's elements adds up at random, four standard deviations are allowed.
        # Truncation: of twice the step it is four times as large.
        rounding = 4 * 2**0.5 * oracle.bound("f32", 12, 7) * size / (2 * step)
        got, doubled = slope(step), slope(2 * step)
        error = abs(got - np.sum(np.asarray(gradient, np.float64) * direction))
        assert error <= rounding + abs(doubled - got), path
        assert abs(doubled - got) <= 4 * rounding, path  # truncation hides nothing
