"""What the layer does with NaN, the same input twice, and arguments that do not fit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
import oracle
from test_moe import BASE, OPTIONS, base, layer, router, run

# --- numbers that are not ------------------------------------------------------------------------


def test_a11_nan_logits_are_counted_and_bounded():
    x, params, _ = oracle.layer_case(BASE, (33, 40))
    bad = {**params, "router": {"kernel": jnp.full((40, 7), jnp.nan)}}
    y, aux = layer(x, bad, BASE)
    assert int(aux.nonfinite_logits) == 33 * 7
    assert int(aux.expert_counts.sum()) == 33 * 3 and int(aux.dropped_tokens) == 0
    assert y.shape == x.shape


def test_nan_token_stays_in_its_row():
    x, params, dy = oracle.layer_case(BASE, (20, 40))
    (clean, _), _ = run(BASE, x, params, dy)
    (dirty, aux), _ = run(BASE, x.at[4].set(jnp.nan), params, dy)
    rest = np.arange(20) != 4
    np.testing.assert_array_equal(np.asarray(dirty)[rest], np.asarray(clean)[rest])
    assert np.isnan(np.asarray(dirty)[4]).all() and int(aux.nonfinite_logits) == 7


# --- determinism ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["f32", "bf16", "fp8"])
def test_g2_g3_g5_same_inputs_same_bits(precision):
    cfg = dataclasses.replace(OPTIONS["everything"], precision=precision)
    x, params, dy = oracle.layer_case(cfg, (512, 40))
    first = run(cfg, x, params, dy)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, run(cfg, x, params, dy), first)


# --- what the arguments may be -------------------------------------------------------------------


def replaced(params, group, name, value):
    return {**params, group: {**params[group], name: value}}


def test_n2_bad_arguments_are_named():
    x, params, _ = oracle.layer_case(BASE, (6, 40))

    def error(kind, text, x=x, params=params, cfg=BASE, **options):
        with pytest.raises(kind, match=text):
            jax.jit(lambda x, p: dropless.moe(x, p, cfg, **options))(x, params)

    gate = params["experts"]["gate"]
    error(
        TypeError,
        r"x must be float32 or bfloat16; got float16.*[Uu]se bfloat16",
        x.astype(jnp.float16),
    )
    error(TypeError, r"x must be float32 or bfloat16; got int32", x.astype(jnp.int32))
    error(ValueError, r"x must have shape \[..., H\]", jnp.float32(1.0))
    error(ValueError, r'"kernel".*must have shape \(41, 7\).*got \(40, 7\)', jnp.zeros((6, 41)))
    error(
        ValueError, r'"gate".*must have shape \(7, 40, 23\).*H = 40.*got \(7, 39, 23\)',
        params=replaced(params, "experts", "gate", gate[:, 1:]),
    )  # fmt: skip
    error(
        ValueError, r'"up".*must have shape.*got \(6, 40, 23\)',
        params=replaced(params, "experts", "up", gate[1:]),
    )  # fmt: skip
    error(
        TypeError, r'"down".*got float16.*Use bfloat16',
        params=replaced(params, "experts", "down", params["experts"]["down"].astype(jnp.float16)),
    )  # fmt: skip
    error(TypeError, r"gate.*up.*one dtype; got bfloat16 and float32",
          params=replaced(params, "experts", "gate", gate.astype(jnp.bfloat16)))  # fmt: skip
    error(ValueError, r'"down"\] is missing; expected an array of shape \(7, 23, 40\)',
          params={**params, "experts": {"gate": gate, "up": gate}})  # fmt: skip
    error(ValueError, r'"bias"\] is missing', cfg=router(bias=True))
    error(ValueError, r"params holds \['experts.gate_bias'\]",
          params=replaced(params, "experts", "gate_bias", jnp.zeros((7, 23))))  # fmt: skip
    error(ValueError, r"params holds \['shared'\]", params={**params, "shared": {}})
    error(
        ValueError,
        r"mask must have x's shape without the last axis, \(6,\); got \(5,\)",
        mask=jnp.ones(5, bool),
    )
    error(TypeError, r"mask must be bool or integer.*got float32", mask=jnp.ones(6))
    error(TypeError, r"cfg must be a dropless.MoEConfig; got dict", cfg={})
    with pytest.raises(TypeError, match="params must be a dict"):
        dropless.moe(x, [params], BASE)
    with pytest.raises(ValueError, match="experts_per_token must be at most num_experts.*9.*7"):
        base(experts_per_token=9)


@pytest.mark.parametrize("group", ["router", "experts"])
@pytest.mark.parametrize("value", [None, [1, 2], np.ones(3)])
def test_n2_a_group_of_parameters_that_is_no_dict_is_named(group, value):
    cfg = dropless.MoEConfig(4, 2, 24)
    x, params = jnp.ones((3, 40)), dropless.init(jax.random.key(0), 40, cfg)
    with pytest.raises(TypeError, match=rf'"{group}"\] must be a dict.*{type(value).__name__}'):
        dropless.moe(x, {**params, group: value}, cfg)
    name = next(iter(params[group]))
    listed = {**params[group], name: params[group][name].tolist()}
    with pytest.raises(TypeError, match=rf'\["{name}"\] must be an array of shape.*got list'):
        dropless.moe(x, {**params, group: listed}, cfg)


def test_prepared_for_another_config_is_an_error():
    x, params, _ = oracle.layer_case(BASE, (6, 40))
    fp8 = dropless.prepare_experts(params, base(precision="fp8"))
    with pytest.raises(
        ValueError, match='prepared was made for precision="fp8".*runs precision="bf16"'
    ):
        dropless.moe(x, params, base(precision="bf16"), prepared=fp8)
    with pytest.raises(ValueError, match='scale_rounding="fp32", but the config says "pow2"'):
        dropless.moe(x, params, base(precision="fp8", scale_rounding="pow2"), prepared=fp8)
    with pytest.raises(TypeError, match="must come from dropless.prepare_experts; got dict"):
        dropless.moe(x, params, base(precision="fp8"), prepared={})
    other = base(expert_dim=24, precision="fp8")
    _, wide, _ = oracle.layer_case(other, (6, 40))
    with pytest.raises(
        ValueError, match=r"prepared.gate.q must be .*\[7, 40, 24\].*got float8_e4m3fn\[7, 40, 23\]"
    ):
        dropless.moe(x, wide, other, prepared=fp8)
    y, _ = layer(x, params, BASE, prepared=fp8)  # precision="auto" takes what was prepared
    np.testing.assert_array_equal(y, layer(x, params, base(precision="fp8"))[0])


def test_forward_mode_is_jax_error_about_custom_vjp():
    x, params, _ = oracle.layer_case(BASE, (6, 40))
    with pytest.raises(TypeError, match=r"can't apply forward-mode \w+ \(jvp\) to a custom_vjp"):
        jax.jvp(lambda x: dropless.moe(x, params, BASE)[0], (x,), (x,))


def test_a_hessian_is_refused_in_words():
    x, params, _ = oracle.layer_case(BASE, (6, 40))
    with pytest.raises(NotImplementedError, match="once, in reverse mode, and this is a second"):
        jax.hessian(lambda x: dropless.moe(x, params, BASE)[0].sum())(x)


@pytest.mark.parametrize("inner", ["eager", "jit"])
@pytest.mark.parametrize("of", ["x", "params", "route", "unpermute"])
def test_n2_a_second_derivative_is_refused_in_words(of, inner):
    x, params, dy = oracle.layer_case(BASE, (6, 40))
    plan = dropless.plan(jnp.arange(6, dtype=jnp.int32).reshape(3, 2), 6)
    function, point = {
        "x": (lambda x: jnp.sum(dropless.moe(x, params, BASE)[0] * dy), x),
        "params": (lambda p: jnp.sum(dropless.moe(x, p, BASE)[0] * dy), params),
        "route": (lambda z: jnp.sum(dropless.route(z, BASE).weights ** 2), x[:, :7]),
        "unpermute": (lambda w: jnp.sum(dropless.unpermute(x, plan, w) ** 2), jnp.ones((3, 2))),
    }[of]
    function = jax.jit(function) if inner == "jit" else function

    def slope(point):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(jax.grad(function)(point)))

    text = r"can be differentiated once, in reverse mode, and this is a second derivative.*jacrev"
    with pytest.raises(NotImplementedError, match=text):
        jax.grad(slope)(point)


def test_auto_on_a_cpu_is_the_dtype_of_x():
    for dtype, precision in ((jnp.float32, "f32"), (jnp.bfloat16, "bf16")):
        x, params, _ = oracle.layer_case(BASE, (6, 40), dtype)
        auto, explicit = (layer(x, params, base(precision=p))[0] for p in ("auto", precision))
        np.testing.assert_array_equal(auto, explicit)
