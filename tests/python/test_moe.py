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
    "expert_bias": base(expert_bias=True),
    "drop": base(overflow="drop", expert_capacity_factor=0.8),
    "everything": dataclasses.replace(
        router(score="sigmoid", bias=True, selection_bias=True, scale=1.7),
        expert_bias=True,
        activation="gelu",
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
    forward, backward = oracle.bound(precision, length, 7), oracle.bound(precision, length, 14)
    check_aux(aux, aux_want, oracle.bound("f32", length, 7))
    oracle.assert_close("y", y, y_want, forward)
    oracle.assert_close("dx", dx, dx_want, backward)
    wanted = dict(oracle.leaves(dparams_want))
    for path, gradient in oracle.leaves(dparams):
        oracle.assert_close(path, gradient, wanted[path], backward, groups=gradient.ndim == 3)


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("name", OPTIONS)
def test_q4_every_gradient_of_every_option_f32(name, masked):
    cfg = OPTIONS[name]
    x, params, dy = oracle.layer_case(cfg, SHAPE)
    mask = jnp.asarray(np.random.default_rng(1).random(SHAPE[:2]) < 0.6) if masked else None
    want = oracle.value_and_gradients(cfg, x, params, mask, dy, COEFFICIENTS)
    got = run(cfg, x, params, dy, mask)
    check(cfg, got, want, "f32", SHAPE[0] * SHAPE[1])
    if name != "drop":
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


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8_all"])
def test_prepared_experts_give_the_same_bits(name):
    cfg = base(**PRECISIONS[name])
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


@pytest.mark.parametrize("name", ["plain", "sigmoid", "everything", "topk_first"])
def test_gradients_by_finite_differences(name):
    cfg = dataclasses.replace(OPTIONS[name], num_experts=4, experts_per_token=2, expert_dim=9)
    x, params, dy = oracle.layer_case(cfg, (5, 12))
    mask = jnp.array([1, 1, 0, 1, 1])
    _, gradients = run(cfg, x, params, dy, mask)
    rng = np.random.default_rng(7)
    step = 2e-3  # truncation and float32 rounding errors balance near the cube root of 2^-24
    for path, gradient in oracle.leaves(gradients):
        if "selection_bias" in path:
            continue
        direction = rng.standard_normal(gradient.shape)
        direction /= np.linalg.norm(direction)

        def at(sign, path=path, direction=direction):
            def move(p, leaf):
                return leaf + sign * step * direction if jax.tree_util.keystr(p) == path else leaf

            moved_x, moved = jax.tree_util.tree_map_with_path(move, (x, params))
            moved = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), moved, params)
            (y, aux), _ = run(cfg, jnp.asarray(moved_x, x.dtype), moved, dy, mask)
            total = np.sum(np.asarray(y, np.float64) * np.asarray(dy, np.float64))
            losses = [float(getattr(aux, loss)) for loss in oracle.LOSSES]
            return total + np.dot(COEFFICIENTS, losses), np.asarray(aux.expert_counts)

        (upper, counts_upper), (lower, counts_lower) = at(1), at(-1)
        np.testing.assert_array_equal(counts_upper, counts_lower)  # else the step crossed a border
        slope = (upper - lower) / (2 * step)
        want = np.sum(np.asarray(gradient, np.float64) * direction)
        assert abs(slope - want) <= 2e-3 * np.linalg.norm(gradient) + 1e-3, path


# --- padding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["f32", "fp8"])
def test_h1_padding_changes_nothing(precision):
    cfg = dataclasses.replace(OPTIONS["everything"], precision=precision)
    shape = (41, 40)
    x, params, dy = oracle.layer_case(cfg, shape)
    padded_x = jnp.full((164, 40), 50.0, x.dtype).at[3::4].set(x)  # 75 % padding
    padded_dy = jnp.ones((164, 40), dy.dtype).at[3::4].set(dy)
    mask = jnp.zeros(164, jnp.int32).at[3::4].set(1)
    (y, aux), (dx, dparams) = run(cfg, x, params, dy)
    (y_p, aux_p), (dx_p, dparams_p) = run(cfg, padded_x, params, padded_dy, mask)
    # Close, not equal: XLA's product for the router may block 164 rows otherwise than 41.
    limit = oracle.bound("f32", 164, 14)
    oracle.assert_close("y", y_p[3::4], y, limit)
    oracle.assert_close("dx", dx_p[3::4], dx, limit)
    np.testing.assert_array_equal(aux_p.expert_counts, aux.expert_counts)
    for name in oracle.LOSSES:
        oracle.assert_close(name, getattr(aux_p, name), getattr(aux, name), limit)
    for (path, a), (_, b) in zip(oracle.leaves(dparams_p), oracle.leaves(dparams), strict=True):
        oracle.assert_close(path, a, b, limit)
    padding = np.asarray(mask) == 0
    assert not np.asarray(y_p)[padding].any() and not np.asarray(dx_p)[padding].any()


def test_padding_with_nan_stays_in_its_rows():
    x, params, dy = oracle.layer_case(BASE, (19, 40))
    mask = jnp.arange(19) % 3 != 1
    poisoned = jnp.where(mask[:, None], x, jnp.nan)
    clean = run(BASE, jnp.where(mask[:, None], x, 0), params, dy, mask)
    dirty = run(BASE, poisoned, params, dy, mask)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@pytest.mark.parametrize("t", [7, 6])
def test_h2_mask_and_bias_where_tokens_equal_experts_or_not(t):
    cfg = dataclasses.replace(OPTIONS["selection_bias"])
    x, params, dy = oracle.layer_case(cfg, (t, 40))
    mask = jnp.arange(t) % 2
    got = run(cfg, x, params, dy, mask)
    want = oracle.value_and_gradients(cfg, x, params, mask, dy, COEFFICIENTS)
    check(cfg, got, want, "f32", 40)


def test_everything_masked_is_zero_and_finite():
    x, params, dy = oracle.layer_case(BASE, (5, 40))
    (y, aux), gradients = run(BASE, x, params, dy, jnp.zeros(5, bool))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves((y, gradients)))
    assert int(aux.expert_counts.sum()) == 0 and float(aux.load_balance_loss) == 0.0


# --- empty, tiny and skewed ----------------------------------------------------------------------


def biased_to(cfg, params, favourites):
    """Params whose router sends every token to ``favourites``, whatever x is."""
    bias = jnp.full((cfg.num_experts,), -1e4).at[jnp.array(favourites)].set(1e4)
    return {**params, "router": {**params["router"], "bias": bias}}


@pytest.mark.parametrize("precision", ["f32", "bf16", "fp8"])
def test_b1_empty_experts_get_gradients_of_exactly_zero(precision):
    cfg = dataclasses.replace(router(bias=True), precision=precision, expert_bias=True)
    x, params, dy = oracle.layer_case(cfg, (30, 40))
    params = biased_to(cfg, params, [0, 2, 5])
    (_, aux), (_, dparams) = run(cfg, x, params, dy)
    np.testing.assert_array_equal(aux.expert_counts, [30, 0, 30, 0, 0, 30, 0])
    for name, gradient in dparams["experts"].items():
        gradient = np.asarray(gradient)
        assert not gradient[[1, 3, 4, 6]].any(), name
        assert all(gradient[e].any() for e in (0, 2, 5)), name


def test_b9_all_rows_to_one_expert():
    cfg = dropless.MoEConfig(64, 1, 16, router=dropless.RouterConfig(bias=True, renormalize=False))
    x, params, dy = oracle.layer_case(cfg, (1024, 24))
    params = biased_to(cfg, params, [37])
    got = run(cfg, x, params, dy)
    assert int(got[0][1].expert_counts[37]) == 1024 and int(got[0][1].dropped_tokens) == 0
    check(cfg, got, oracle.value_and_gradients(cfg, x, params, None, dy, COEFFICIENTS), "f32", 1024)


@pytest.mark.parametrize("t", [1, 2])
def test_fewer_tokens_than_experts(t):
    cfg = base(expert_bias=True)
    x, params, dy = oracle.layer_case(cfg, (t, 40))
    want = oracle.value_and_gradients(cfg, x, params, None, dy, COEFFICIENTS)
    check(cfg, run(cfg, x, params, dy), want, "f32", 40)


@pytest.mark.parametrize("shape", [(0, 40), (3, 0, 40)])
def test_empty_batch_returns_empty_and_zeros(shape):
    x, params, _ = oracle.layer_case(BASE, (1, 40))
    x = jnp.zeros(shape)
    (y, aux), (dx, dparams) = run(BASE, x, params, x)
    assert y.shape == shape and dx.shape == shape
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves((aux, dparams)))


def test_a_single_token_without_batch_axes():
    x, params, _ = oracle.layer_case(BASE, (40,))
    y, aux = layer(x, params, BASE)
    assert y.shape == (40,) and int(aux.expert_counts.sum()) == 3
    np.testing.assert_array_equal(y, layer(x[None], params, BASE)[0][0])


@pytest.mark.parametrize(
    ("h", "i"), [(1, 130), (7, 1), (8, 96), (64, 8), (129, 15), (200, 7), (1, 1)]
)
def test_d2_any_width(h, i):
    cfg = dropless.MoEConfig(3, 2, i, precision="f32")
    x, params, dy = oracle.layer_case(cfg, (11, h))
    want = oracle.value_and_gradients(cfg, x, params, None, dy, COEFFICIENTS)
    check(cfg, run(cfg, x, params, dy), want, "f32", max(h, i))


@pytest.mark.parametrize("h", [17, 127, 128, 129])
def test_d2_any_width_fp8(h):
    cfg = dropless.MoEConfig(3, 2, 131, precision="fp8", wgrad_precision="fp8", save_h="fp8")
    x, params, dy = oracle.layer_case(cfg, (150, h))
    want = oracle.value_and_gradients(cfg, x, params, None, dy, COEFFICIENTS)
    check(cfg, run(cfg, x, params, dy), want, "fp8", h)


# --- losses --------------------------------------------------------------------------------------


def test_load_balance_loss_is_one_when_uniform_and_e_when_not():
    cfg = dropless.MoEConfig(8, 1, 8, router=dropless.RouterConfig(bias=True))
    x, params, _ = oracle.layer_case(cfg, (64, 16))
    zero = {**params, "router": {"kernel": jnp.zeros((16, 8)), "bias": jnp.zeros(8)}}
    # Ties go to the lowest index: all tokens to expert 0, every probability 1/8.
    assert float(layer(x, zero, cfg)[1].load_balance_loss) == pytest.approx(1.0)
    one = biased_to(cfg, zero, [3])
    assert float(layer(x, one, cfg)[1].load_balance_loss) == pytest.approx(8.0)
    assert float(layer(x, zero, cfg)[1].router_entropy) == pytest.approx(np.log(8), rel=1e-6)
    assert float(layer(x, zero, cfg)[1].z_loss) == pytest.approx(np.log(8) ** 2, rel=1e-6)


@pytest.mark.parametrize("t", [16, 160])
def test_e3_aux_loss_alone_reaches_the_router(t):
    cfg = BASE
    x, params, _ = oracle.layer_case(cfg, (t, 40))

    def router_gradient(coefficient):
        def loss(p):
            return coefficient * layer(x, p, cfg)[1].load_balance_loss

        return np.asarray(jax.jit(jax.grad(loss))(params)["router"]["kernel"], np.float64)

    zero = jnp.zeros((t, 40))
    want = oracle.value_and_gradients(cfg, x, params, None, zero, (1.0, 0.0, 0.0))
    one = router_gradient(1.0)
    oracle.assert_close("d(router)", one, want[1][1]["router"]["kernel"], oracle.bound("f32", t, 7))
    limit = oracle.bound("f32", t, 7)
    oracle.assert_close("linear in the coefficient", router_gradient(0.01), 0.01 * one, limit)


def test_h8_sharp_logits_against_the_closed_form():
    cfg = dropless.MoEConfig(4, 1, 8)
    _, params, _ = oracle.layer_case(cfg, (1, 4))
    params = {**params, "router": {"kernel": 5 * jnp.eye(4)}}
    x = jnp.eye(4)[jnp.array([0, 0, 0, 1, 2])]
    # Token of expert e: logit 5 at e, 0 elsewhere.
    p, q = np.exp(5) / (np.exp(5) + 3), 1 / (np.exp(5) + 3)
    fraction = np.array([3, 1, 1, 0]) / 5
    probability = fraction * p + (1 - fraction) * q
    aux = layer(x, params, cfg)[1]
    assert float(aux.load_balance_loss) == pytest.approx(4 * fraction @ probability, rel=1e-6)
    assert float(aux.z_loss) == pytest.approx(np.log(np.exp(5) + 3) ** 2, rel=1e-6)


def test_h4_statistics_of_microbatches_add_up():
    # The loss of 10 + 100 tokens follows from what two routings sum, not from a mean of two losses.
    logits = jax.random.normal(jax.random.key(3), (110, 7))
    whole = dropless.route(logits, BASE)
    parts = [dropless.route(part, BASE) for part in (logits[:10], logits[10:])]
    for name in ("counts", "prob_sum", "lse_square_sum", "entropy_sum", "tokens"):
        total = sum(np.asarray(getattr(part, name), np.float64) for part in parts)
        np.testing.assert_allclose(getattr(whole, name), total, rtol=1e-5, err_msg=name)


def test_h11_capacity_does_not_touch_the_loss():
    x, params, _ = oracle.layer_case(BASE, SHAPE)
    dropping = base(overflow="drop", expert_capacity_factor=0.3)
    free, cut = (layer(x, params, cfg)[1] for cfg in (BASE, dropping))
    assert int(cut.dropped_tokens) > 0 and int(free.dropped_tokens) == 0
    np.testing.assert_array_equal(free.expert_counts, cut.expert_counts)
    assert float(free.load_balance_loss) == float(cut.load_balance_loss)


def test_h13_loss_of_a_million_tokens_in_bfloat16():
    logits = jax.random.normal(jax.random.key(0), (1_000_000, 4), jnp.bfloat16)
    cfg = dropless.MoEConfig(4, 1)
    routing = dropless.route(logits, cfg)
    wide = np.asarray(logits, np.float64)
    p = np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
    oracle.assert_close("prob_sum", routing.prob_sum, p.sum(0), oracle.bound("f32", 1_000_000, 4))
    assert int(routing.counts.sum()) == 1_000_000


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
    error(
        ValueError, r'save_h="fp8" needs precision="bf16"', cfg=base(save_h="fp8", precision="f32")
    )
    with pytest.raises(TypeError, match="params must be a dict"):
        dropless.moe(x, [params], BASE)
    with pytest.raises(ValueError, match="experts_per_token must be at most num_experts.*9.*7"):
        base(experts_per_token=9)


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
        ValueError, match=r"prepared.gate must have the shape.*\(7, 40, 24\); got \(7, 40, 23\)"
    ):
        dropless.moe(x, wide, other, prepared=fp8)
    y, _ = layer(x, params, BASE, prepared=fp8)  # precision="auto" takes what was prepared
    np.testing.assert_array_equal(y, layer(x, params, base(precision="fp8"))[0])


def test_forward_mode_is_jax_error_about_custom_vjp():
    x, params, _ = oracle.layer_case(BASE, (6, 40))
    with pytest.raises(TypeError, match=r"can't apply forward-mode \w+ \(jvp\) to a custom_vjp"):
        jax.jvp(lambda x: dropless.moe(x, params, BASE)[0], (x,), (x,))


def test_auto_on_a_cpu_is_the_dtype_of_x():
    for dtype, precision in ((jnp.float32, "f32"), (jnp.bfloat16, "bf16")):
        x, params, _ = oracle.layer_case(BASE, (6, 40), dtype)
        auto, explicit = (layer(x, params, base(precision=p))[0] for p in ("auto", precision))
        np.testing.assert_array_equal(auto, explicit)
