"""The layer at its edges: padding, empty and crowded experts, odd sizes, losses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
import oracle
from test_moe import BASE, COEFFICIENTS, OPTIONS, SHAPE, base, check, layer, router, run

pytestmark = pytest.mark.any_jax

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
    # With H = I = 1 a gradient is one number, which assert_close allows the full unit roundoff of
    # each rounding: the 11 terms of the second expert's down cancel to 1/16 of their sizes.
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
    # d(logit) = p * (c - sum of p * c) with c_e = E / (K * T^2) * count_e. The better the balance,
    # the more alike are the c, and what was rounded before the subtraction counts that many times:
    # 15 times for the 160 tokens. It is a sum over the E experts.
    p = np.asarray(jax.nn.softmax(x @ params["router"]["kernel"]), np.float64)
    c = want[0][1]["expert_counts"] * (7 / (3 * t**2))
    d_kernel = want[1][1]["router"]["kernel"]
    cancelled = np.sqrt(np.mean(np.square(np.asarray(x, np.float64).T) @ (p * c) ** 2))
    cancelled /= oracle.rms(d_kernel)
    limit = oracle.bound("f32", t, 7) + cancelled * oracle.bound("f32", 7, 0)
    oracle.assert_close("d(router)", one, d_kernel, limit)
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
