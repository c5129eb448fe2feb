"""Gradients, routing, losses and FP8 scales where other systems went wrong without a word.

Names are those of the faults; the other files hold the rest of each letter.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dropless
import oracle
from dropless._call import call

FP8 = {"precision": "fp8", "wgrad_precision": "fp8", "save_h": "fp8"}
BASE = dropless.MoEConfig(7, 3, 24)


# --- E: gradients --------------------------------------------------------------------------------


@functools.cache
def mean_loss_gradients(devices):
    """Of a mean over tokens and of the losses, with x split over ``devices``."""
    x, params, dy = oracle.layer_case(BASE, (24, 40))
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        x, dy = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, dy))
        params = jax.device_put(params, NamedSharding(mesh, P()))

    def loss(x, params):
        y, aux = dropless.moe(x, params, BASE)
        return jnp.mean(jnp.sum(y * dy, -1)) + 0.1 * aux.load_balance_loss + 0.01 * aux.z_loss

    return jax.tree.map(np.asarray, jax.jit(jax.grad(loss, (0, 1)))(x, params))


@pytest.mark.parametrize("devices", [2, 4])
def test_e1_e2_e9_gradients_do_not_grow_with_devices(devices):
    # Experts are replicated, tokens split: d(x), d(router) and every dW are those of one device.
    got, want = mean_loss_gradients(devices), mean_loss_gradients(1)
    for (path, a), (_, b) in zip(oracle.leaves(got), oracle.leaves(want), strict=True):
        oracle.assert_close(path, a, b, oracle.bound("f32", 24, 14))


def test_e4_the_loss_of_sequences_is_the_mean_of_theirs():
    # A loss a sequence by vmap: value and gradient carry no further factor of the batch.
    x, params, _ = oracle.layer_case(BASE, (5, 16, 40))

    def one(params, sequence):
        return dropless.moe(sequence, params, BASE)[1].load_balance_loss

    def together(params):
        return jnp.mean(jax.vmap(one, (None, 0))(params, x))

    value, gradient = jax.jit(jax.value_and_grad(together))(params)
    each = [jax.jit(jax.value_and_grad(one))(params, sequence) for sequence in x]
    limit = oracle.bound("f32", 16, 14)
    oracle.assert_close("loss", value, np.mean([v for v, _ in each]), limit)
    kernels = [np.asarray(g["router"]["kernel"], np.float64) for _, g in each]
    oracle.assert_close("d(router)", gradient["router"]["kernel"], np.mean(kernels, 0), limit)


OPTIONS = {
    "f32": {"precision": "f32"},
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8"},
    "fp8_all": FP8,
    "drop": {"overflow": "drop", "expert_capacity_factor": 2.0},
    "sigmoid": {"router": dropless.RouterConfig(score="sigmoid", bias=True)},
    "unnormalised": {"router": dropless.RouterConfig(renormalize=False)},
}


@pytest.mark.any_jax
@pytest.mark.parametrize("prepared", [False, True], ids=["", "prepared"])
@pytest.mark.parametrize("name", OPTIONS)
def test_e7_no_parameter_is_left_without_a_gradient(name, prepared):
    cfg = dataclasses.replace(BASE, expert_bias=True, **OPTIONS[name])
    x, params, dy = oracle.layer_case(cfg, (90, 40))

    @jax.jit
    def gradients(x, params):
        ready = dropless.prepare_experts(params, cfg) if prepared else None
        return jax.grad(
            lambda x, p: jnp.sum(dropless.moe(x, p, cfg, prepared=ready)[0] * dy), (0, 1)
        )(x, params)

    for path, gradient in oracle.leaves(gradients(x, params)):
        assert np.asarray(gradient).any(), path
        if gradient.ndim == 3:  # 90 * 3 rows reach each of the 7 experts
            assert np.asarray(gradient).any(axis=(1, 2)).all(), path


# --- F: routing ----------------------------------------------------------------------------------


@pytest.mark.any_jax
@pytest.mark.parametrize("e", [256, 257, 384, 512, 1024])
def test_f4_bfloat16_logits_of_many_experts_twenty_times(e):
    # bfloat16 has so few values that ties are everywhere.
    logits = jnp.asarray(np.random.default_rng(e).standard_normal((65, e)), jnp.bfloat16)
    cfg = dropless.MoEConfig(e, 8)
    route = jax.jit(lambda z: dropless.route(z, cfg))
    first = route(logits)
    want = np.argsort(-np.asarray(logits, np.float32), axis=1, kind="stable")[:, :8]
    np.testing.assert_array_equal(first.ids, want)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, route(logits), first)


def test_f5_a_forbidden_expert_never_wins_by_a_negative_bias():
    # 4 of 8 groups of 4 experts are masked by -inf; the others' biased scores are all below 0.
    router = dropless.RouterConfig(score="sigmoid", selection_bias=True)
    cfg = dropless.MoEConfig(32, 8, router=router)
    rng = np.random.default_rng(0)
    kept = np.stack([rng.permutation(8) < 4 for _ in range(50)])
    allowed = np.repeat(kept, 4, axis=1)
    logits = np.where(allowed, rng.standard_normal((50, 32)), -np.inf).astype(np.float32)
    routing = dropless.route(jnp.asarray(logits), cfg, selection_bias=jnp.full(32, -2.0))
    assert np.take_along_axis(allowed, np.asarray(routing.ids), 1).all()
    want = np.argsort(-logits, axis=1, kind="stable")[:, :8]
    np.testing.assert_array_equal(routing.ids, want)


# --- G, H: determinism and statistics ------------------------------------------------------------


@pytest.mark.any_jax
def test_g1_order_and_weight_gradients_a_hundred_times():
    # T = 4097, K = 16, E = 128 as published; the widths are small, the order is what may vary.
    cfg = dropless.MoEConfig(128, 16, 8)
    x, params, dy = oracle.layer_case(cfg, (4097, 4))

    @jax.jit
    def step(x, params):
        logits = x @ params["router"]["kernel"]
        order = dropless.route(logits, cfg).slot_of_row
        return order, jax.grad(lambda p: jnp.sum(dropless.moe(x, p, cfg)[0] * dy))(params)

    first = step(x, params)
    order = np.asarray(first[0])
    ids = np.asarray(dropless.route(x @ params["router"]["kernel"], cfg).ids).reshape(-1)
    np.testing.assert_array_equal(order, np.argsort(ids, kind="stable"))
    for _ in range(100):
        jax.tree.map(np.testing.assert_array_equal, step(x, params), first)


def test_h3_counts_of_the_loss_are_those_of_the_dispatch():
    router = dropless.RouterConfig(score="sigmoid", selection_bias=True)
    cfg = dropless.MoEConfig(9, 3, 16, router=router)
    x, params, _ = oracle.layer_case(cfg, (50, 40))
    params["router"]["selection_bias"] = jnp.linspace(-0.6, 0.6, 9)
    logits = x @ params["router"]["kernel"]
    routing = dropless.route(logits, cfg, selection_bias=params["router"]["selection_bias"])
    unbiased = dropless.route(logits, dataclasses.replace(cfg, router=dropless.RouterConfig()))
    counts = np.bincount(np.asarray(routing.ids).reshape(-1), minlength=9)
    np.testing.assert_array_equal(routing.counts, counts)
    np.testing.assert_array_equal(np.diff(routing.offsets), counts)
    np.testing.assert_array_equal(dropless.moe(x, params, cfg)[1].expert_counts, counts)
    assert (np.asarray(unbiased.counts) != counts).any()  # the bias moved something


# --- I: FP8 --------------------------------------------------------------------------------------


def fp8_wgrad(x, dy, offsets):
    shape = (offsets.shape[0] - 1, x.shape[1], dy.shape[1])
    operands = [x, None, dy[:, None, :], None, None, offsets, None, None]
    results = [(shape, jnp.float32), None]
    attributes = {"gather": 0, "experts_per_token": 1, "fp8": 1, "scale_rounding": 0}
    workspace = (x.shape[0], x.shape[1], 1, dy.shape[1], shape[0], 0, 1, x.dtype.itemsize)
    return np.asarray(
        call("grouped_wgrad", results, operands, workspace=workspace, **attributes)[0]
    )


@pytest.mark.any_jax
def test_i7_an_outlier_costs_its_own_block_of_128_tokens_and_column():
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((500, n)).astype(np.float32) for n in (24, 17))
    offsets = jnp.array([0, 100, 500], jnp.int32)
    # Row 300 is in the second block, rows 228 to 355, of the second expert.
    block = slice(228, 356)
    wild = x.copy()
    wild[300, 5] = 1e4
    clean, dirty = (fp8_wgrad(jnp.asarray(a), jnp.asarray(dy), offsets) for a in (x, wild))
    np.testing.assert_array_equal(dirty[0], clean[0])
    others = np.arange(24) != 5
    np.testing.assert_array_equal(dirty[1][others], clean[1][others])
    # Without the block both are what the other rows give: they kept their precision.
    quiet, quiet_wild = x.copy(), wild.copy()
    quiet[block, 5] = quiet_wild[block, 5] = 0
    parts = [fp8_wgrad(jnp.asarray(a), jnp.asarray(dy), offsets) for a in (quiet, quiet_wild)]
    np.testing.assert_array_equal(*parts)
    want = x[100:].astype(np.float64).T @ dy[100:]
    spoilt = np.abs(dirty[1, 5] - (want[5] + (1e4 - x[300, 5]) * dy[300].astype(np.float64)))
    assert oracle.rms(spoilt) <= 1e4 * 2.0**-4 * oracle.rms(dy[300])  # an FP8 step of the outlier


def test_i9_training_goes_on_bit_for_bit_from_the_parameters_alone():
    # FP8 keeps no history: whatever ran before, the same parameters give the same step.
    cfg = dataclasses.replace(BASE, **FP8)
    x, params, dy = oracle.layer_case(cfg, (40, 40))

    def make_step():
        def loss(params):
            return jnp.mean(dropless.moe(x, params, cfg)[0] * dy)

        return jax.jit(lambda p: jax.tree.map(lambda a, g: a - g, p, jax.grad(loss)(p)))

    step, saved = make_step(), None
    for index in range(6):
        if index == 3:
            saved = jax.tree.map(np.asarray, params)
        params = step(params)
    jax.clear_caches()
    dropless.moe(x * 1e6, saved, cfg)  # amax values that a history would remember
    step, resumed = make_step(), saved
    for _ in range(3):
        resumed = step(resumed)
    jax.tree.map(np.testing.assert_array_equal, resumed, params)


@pytest.mark.any_jax
def test_i10_a_hundred_seeds_of_fp8_stay_near_bfloat16():
    cfgs = [dataclasses.replace(BASE, **o) for o in (FP8, {"precision": "bf16"})]

    @jax.jit
    def both(x, params, dy):
        def one(cfg):
            y, vjp = jax.vjp(lambda x, p: dropless.moe(x, p, cfg)[0], x, params)
            return y, vjp(dy)

        return [one(cfg) for cfg in cfgs]

    limit = oracle.bound("fp8", 40, 14, fp8=oracle.FP8_BACKWARD)
    squares = {}
    for seed in range(100):
        x, params, dy = oracle.layer_case(BASE, (32, 40), seed=seed)
        fp8, bf16 = both(x, params, dy)
        for (path, a), (_, b) in zip(oracle.leaves(fp8), oracle.leaves(bf16), strict=True):
            error = np.asarray(a, np.float64) - np.asarray(b, np.float64)
            assert np.isfinite(error).all(), (seed, path)
            # The router's gradient hangs on the differences of a token's K outputs, and a dozen of
            # the 32 tokens make most of it: with some seeds these are small. Then the full unit
            # roundoff of each rounding is the limit; over all seeds it is the expected half.
            allowed = 2 * limit if "router" in path else limit
            assert oracle.rms(error) <= allowed * oracle.rms(b), (seed, path)
            squares.setdefault(path, []).append((oracle.rms(error) ** 2, oracle.rms(b) ** 2))
    for path, pairs in squares.items():
        error, scale = np.sum(pairs, 0)
        assert np.sqrt(error) <= limit * np.sqrt(scale), path


@pytest.mark.any_jax
def test_i11_rows_and_blocks_of_zeros():
    # Dropout and padding leave zeros: whole rows, and whole blocks of 128 within a row.
    cfg = dropless.MoEConfig(5, 2, 136, **FP8)
    x, params, dy = oracle.layer_case(cfg, (60, 300))
    x = x.at[::4].set(0).at[1::4, :128].set(0).at[2::4, 256:].set(0)
    dy = dy.at[::3].set(0).at[1::3, 128:256].set(0)
    gate = params["experts"]["gate"].at[:, :128].set(0)  # zero tiles of the weights
    up = params["experts"]["up"].at[3].set(0)  # a whole expert
    params["experts"] |= {"gate": gate, "up": up}

    @jax.jit
    def everything(x, params):
        y, vjp = jax.vjp(lambda x, p: dropless.moe(x, p, cfg)[0], x, params)
        return y, vjp(dy)

    y, (dx, dparams) = everything(x, params)
    (y_want, _), (dx_want, want) = oracle.value_and_gradients(cfg, x, params, None, dy, (0, 0, 0))
    limit = oracle.bound("fp8", 300, 14, fp8=oracle.FP8_BACKWARD)
    oracle.assert_close("y", y, y_want, limit)
    oracle.assert_close("dx", dx, dx_want, limit)
    for name, gradient in dparams["experts"].items():
        oracle.assert_close(name, gradient, want["experts"][name], limit, groups=True)


# --- J: partitioners -----------------------------------------------------------------------------


def test_j3_shardy_on_and_off():
    flag = "jax_use_shardy_partitioner"
    if not hasattr(jax.config, flag):
        pytest.skip("this jax has one partitioner")
    want = mean_loss_gradients(1)
    for on in (True, False):
        before = getattr(jax.config, flag)
        jax.config.update(flag, on)
        try:
            mean_loss_gradients.cache_clear()
            got = mean_loss_gradients(4)
        finally:
            jax.config.update(flag, before)
            mean_loss_gradients.cache_clear()
        for (path, a), (_, b) in zip(oracle.leaves(got), oracle.leaves(want), strict=True):
            oracle.assert_close(path, a, b, oracle.bound("f32", 24, 14))
