"""Sizes of groups, rows and columns that broke other systems, through the whole recipe of FP8 too.

Names are those of the faults; the other files hold the rest of each letter.
"""

from __future__ import annotations

import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
import oracle
from dropless._call import call
from dropless._experts import Spec, experts
from dropless._params import prepare_weight

pytestmark = pytest.mark.any_jax

FP8 = {"precision": "fp8", "wgrad_precision": "fp8", "save_h": "fp8"}
PRECISIONS = {"f32": {"precision": "f32"}, "bf16": {"precision": "bf16"}, "fp8": FP8}


def ids_of(sizes, seed=0):
    """[M, 1] experts of tokens in random order, ``sizes[e]`` of them expert e's."""
    ids = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    np.random.default_rng(seed).shuffle(ids)
    return ids[:, None]


def check_groups(sizes, h, i, precision):
    """Output and every gradient of experts with ``sizes`` rows, each against float64."""
    e, m = len(sizes), int(np.sum(sizes))
    cfg = dropless.MoEConfig(e, 1, i, **PRECISIONS[precision])
    ids = ids_of(sizes)
    x, params, dy = oracle.layer_case(cfg, (m, h))
    # Weights of like size: errors are proportional to them, and one bound is for all rows.
    p = jnp.asarray(np.random.default_rng(1).uniform(0.5, 1.5, (m, 1)), jnp.float32)
    spec, plan = Spec.of(cfg, precision), dropless.plan(jnp.asarray(ids), e)
    np.testing.assert_array_equal(plan.counts, sizes)

    def values(x, p, w):
        y, vjp = jax.vjp(lambda x, p, w: experts(spec, x, p, w, None, plan), x, p, w)
        return y, vjp(dy)

    def dense(x, p, w):
        return oracle.expert_outputs(x, w, "silu")[jnp.arange(m), ids[:, 0]] * p

    y, (dx, dp, dw) = jax.jit(values)(x, p, params["experts"])
    with jax.enable_x64(True):
        wide = oracle.to64((x, p, params["experts"], dy))

        def wanted(x, p, w, dy):
            y, vjp = jax.vjp(dense, x, p, w)
            return y, vjp(dy)

        fast = jax.jit(wanted, compiler_options=oracle.COMPILE_FAST)
        y_want, (dx_want, dp_want, dw_want) = jax.tree.map(np.asarray, fast(*wide))
    length = max(h, i, max(sizes))
    forward = oracle.bound(precision, length, 7, fp8=oracle.FP8_FORWARD)
    oracle.assert_close("y", y, y_want, forward)
    backward = oracle.bound(precision, length, 14, fp8=oracle.FP8_BACKWARD)
    oracle.assert_close("dx", dx, dx_want, backward)
    oracle.assert_close("dp", dp, dp_want, backward)
    for name in dw:
        oracle.assert_close(name, dw[name], dw_want[name], backward, groups=True)


# --- A: uninitialised memory ---------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a5_one_group_in_a_longer_buffer(precision):
    # 300 valid rows of 512; H has five scale blocks, the last one partial.
    cfg = dropless.MoEConfig(1, 1, 136, **PRECISIONS[precision])
    x, params, dy = oracle.layer_case(cfg, (512, 520))
    mask = jnp.arange(512) < 300
    x = jnp.where(mask[:, None], x, jnp.nan)

    @jax.jit
    def gradients(x, params):
        return jax.grad(lambda p: jnp.sum(dropless.moe(x, p, cfg, mask=mask)[0] * dy))(params)

    got = gradients(x, params)["experts"]
    with_zeros = jnp.where(mask[:, None], x, 0)
    want = oracle.value_and_gradients(cfg, with_zeros, params, mask, dy, (0.0, 0.0, 0.0))
    limit = oracle.bound(precision, 520, 14, fp8=oracle.FP8_BACKWARD)
    for name, gradient in got.items():
        oracle.assert_close(name, gradient, want[1][1]["experts"][name], limit)


@pytest.mark.parametrize("junk", [np.nan, np.inf, 3e38])
def test_a6_codes_and_scales_of_padding_are_never_read(junk):
    # Padding tokens are quantised like any other; neither their codes nor scales may matter.
    cfg = dropless.MoEConfig(5, 2, 136, expert_bias=True, **FP8)
    x, params, dy = oracle.layer_case(cfg, (70, 200))
    mask = jnp.arange(70) % 3 != 1

    @jax.jit
    def everything(x, dy):
        def loss(x, params):
            y, aux = dropless.moe(x, params, cfg, mask=mask)
            return jnp.sum(jnp.where(mask[:, None], y, 0) * dy), (y, aux)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, params)

    clean = everything(jnp.where(mask[:, None], x, 0), dy)
    dirty = everything(jnp.where(mask[:, None], x, junk), jnp.where(mask[:, None], dy, 1e30))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(dirty))


def fp8_product(sizes, depth, columns, seed=0):
    """grouped_gemm of FP8 operands, and the same product of their values in float64."""
    rng = np.random.default_rng(seed)
    e, m = len(sizes), int(np.sum(sizes))
    lhs = jnp.asarray(rng.standard_normal((m, depth)), jnp.float32)
    rhs = jnp.asarray(rng.standard_normal((e, depth, columns)) * depth**-0.5, jnp.float32)
    blocks = -(-depth // 128)
    results = [((m, depth), jnp.float8_e4m3fn), ((m, blocks), jnp.float32)]
    q, scale = call("quantize_rows", results, [lhs], scale_rounding=0)
    w = prepare_weight(rhs, "fp8", "fp32")
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(sizes)]), jnp.int32)
    operands = [q, scale, w.q_t, w.scale_t, None, offsets]
    (out,) = call("grouped_gemm", [((m, columns), jnp.float32)], operands, rhs_transposed=1)

    def expanded(scale, shape, axes):
        scale = np.asarray(scale, np.float64)
        for axis in axes:
            scale = np.repeat(scale, 128, axis)
        return scale[tuple(slice(n) for n in shape)]

    left = np.asarray(q, np.float64) * expanded(scale, q.shape, (1,))
    right = np.asarray(w.q, np.float64) * expanded(w.scale, w.q.shape, (1, 2))
    expert = np.repeat(np.arange(e), sizes)
    want = np.stack([row @ right[g] for row, g in zip(left, expert, strict=True)])
    return np.asarray(out, np.float64), want, expert


@pytest.mark.parametrize(("depth", "columns"), [(2880, 1416), (1408, 2880)])
def test_a7_d2_widths_of_public_models(depth, columns):
    # gpt-oss has 2880, DeepSeek-V2-Lite 1408: neither is a multiple of 256, nor 1416 of 16.
    out, want, _ = fp8_product([5, 0, 33], depth, columns)
    oracle.assert_close("fp8", out, want, oracle.bound("f32", depth, 4))
    rng = np.random.default_rng(1)
    lhs = jnp.asarray(rng.standard_normal((38, depth)), jnp.bfloat16)
    rhs = jnp.asarray(rng.standard_normal((3, depth, columns)), jnp.bfloat16)
    sizes = jnp.array([5, 0, 33])
    out = dropless.ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.float32)
    left, right = (np.asarray(a, np.float64) for a in (lhs, rhs))
    want = np.concatenate([left[:5] @ right[0], left[5:] @ right[2]])
    oracle.assert_close("bf16", out, want, oracle.bound("f32", depth, 1))


def test_a12_every_group_of_64_rows_is_computed():
    out, want, expert = fp8_product([64] * 4, 256, 96)
    for e in range(4):
        mine = expert == e
        assert out[mine].any(axis=1).all(), f"a row of group {e} is zero"
        oracle.assert_close(f"group {e}", out[mine], want[mine], oracle.bound("f32", 256, 4))


# --- B: empty experts ----------------------------------------------------------------------------


def test_b2_published_sizes_at_full_width():
    sizes, c, n = [162, 0, 2577, 446, 0, 83], 2048, 768
    m, rng = sum(sizes), np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.standard_normal((m, w)), jnp.bfloat16) for w in (c, n))
    got = dropless.grouped_wgrad(
        x, dy, jnp.asarray(sizes, jnp.int32), preferred_element_type=jnp.float32
    )
    ends = np.cumsum(sizes)
    wide = [np.asarray(a, np.float64) for a in (x, dy)]
    for g, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        mine = slice(end - size, end)
        want = wide[0][mine].T @ wide[1][mine]
        oracle.assert_close(f"group {g}", got[g], want, oracle.bound("f32", size, 1))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_b4_a_device_without_a_single_token(precision):
    # All tokens of the second device are padding: it must take part in the same sums, with zeros.
    cfg = dropless.MoEConfig(5, 2, 24, expert_bias=True, **PRECISIONS[precision])
    x, params, dy = oracle.layer_case(cfg, (12, 40))
    mask = jnp.arange(12) < 6

    def objective(x, params, dy, mask):
        y, aux = dropless.moe(x, params, cfg, mask=mask)
        return jnp.sum(y * dy) + aux.load_balance_loss, (y, aux)

    step = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))
    (_, (y_want, aux_want)), want = step(x, params, dy, mask)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    on_mesh = [jax.device_put(a, split) for a in (x, dy, mask)]
    arguments = on_mesh[0], jax.device_put(params, whole), *on_mesh[1:]
    (_, (y, aux)), got = step(*arguments)
    np.testing.assert_array_equal(y, y_want)
    assert not np.asarray(y)[6:].any() and not np.asarray(got[0])[6:].any()
    np.testing.assert_array_equal(aux.expert_counts, aux_want.expert_counts)
    limit = oracle.bound("f32", 12, 14)
    for (path, a), (_, b) in zip(oracle.leaves(got), oracle.leaves(want), strict=True):
        oracle.assert_close(path, a, b, limit)


def test_b6_empty_experts_never_hang():
    cfg = dropless.MoEConfig(18, 1, 24, **FP8)
    sizes = [0, 0, 8, 0, 0, 0, 129, 0, 1, 0, 0, 0, 0, 0, 33, 0, 0, 0]
    x, params, dy = oracle.layer_case(cfg, (sum(sizes), 40))
    p = jnp.ones((sum(sizes), 1), jnp.float32)
    plan = dropless.plan(jnp.asarray(ids_of(sizes)), 18)
    done = threading.Event()

    def run():
        function = functools.partial(experts, Spec.of(cfg, "fp8"), prepared=None, plan=plan)
        _, vjp = jax.vjp(lambda x, w: function(x=x, weights=p, params=w), x, params["experts"])
        jax.block_until_ready(vjp(dy))
        done.set()

    threading.Thread(target=run, daemon=True).start()
    assert done.wait(timeout=60), "forward and backward did not end within 60 s"


@pytest.mark.parametrize("skew", ["one_has_the_rest", "zipf"])
def test_b9_nearly_all_rows_to_one_of_128_experts(skew):
    zipf = np.maximum(1, 3000 * np.arange(1, 129) ** -1.5 / 2.6).astype(int)
    check_groups({"one_has_the_rest": [1] * 127 + [1500], "zipf": zipf}[skew], 20, 8, "f32")


# --- D: padding and alignment --------------------------------------------------------------------


@pytest.mark.parametrize("groups", [2, 12])
def test_d1_weight_gradients_of_groups_that_start_anywhere(groups):
    # Every start differs modulo 8, 16, 64, 128 and 256; the error of each group is its own.
    sizes = [257 + 19 * g for g in range(groups)]
    starts = np.cumsum([0, *sizes[:-1]])
    assert len({int(s) % 256 for s in starts}) == groups
    rng = np.random.default_rng(groups)
    x, dy = (jnp.asarray(rng.standard_normal((sum(sizes), n)), jnp.bfloat16) for n in (40, 24))
    got = dropless.grouped_wgrad(x, dy, jnp.array(sizes), preferred_element_type=jnp.float32)
    left, right = (np.asarray(a, np.float64) for a in (x, dy))
    for g, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        want = left[start : start + size].T @ right[start : start + size]
        oracle.assert_close(f"group {g}", got[g], want, oracle.bound("f32", size, 1))


@pytest.mark.parametrize("groups", [1, 3, 5, 7])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7])
def test_d3_scales_of_any_number_of_rows_and_groups(rows, groups):
    out, want, _ = fp8_product([rows] * groups, 129, 24, seed=rows * 10 + groups)
    oracle.assert_close("out", out, want, oracle.bound("f32", 129, 4))


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_d4_odd_numbers_of_scale_blocks_and_576_columns(blocks):
    out, want, _ = fp8_product([5, 0, 9], 128 * blocks, 576, seed=blocks)
    oracle.assert_close("out", out, want, oracle.bound("f32", 128 * blocks, 4))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_d5_groups_that_are_no_multiple_of_128(precision):
    check_groups([37, 127, 129, 200, 63], 72, 136, precision)


def test_d6_an_odd_number_of_rows_through_fp8_backward():
    check_groups([16_333 - 5_000 - 777, 5_000, 777], 40, 24, "fp8")


@pytest.mark.parametrize("h", [1, 7, 64, 200, 257, 1000])
@pytest.mark.parametrize("precision", ["f32", "fp8"])
def test_d8_no_column_is_left_out(h, precision):
    cfg = dropless.MoEConfig(6, 2, h, expert_bias=True, **PRECISIONS[precision])
    x, params, dy = oracle.layer_case(cfg, (9, h))

    @jax.jit
    def everything(x, params):
        y, vjp = jax.vjp(lambda x, p: dropless.moe(x, p, cfg)[0], x, params)
        return y, vjp(dy)

    y, (dx, dparams) = everything(x, params)
    (y_want, _), (dx_want, want) = oracle.value_and_gradients(cfg, x, params, None, dy, (0, 0, 0))
    forward = oracle.bound(precision, h, 7, fp8=oracle.FP8_FORWARD)
    backward = oracle.bound(precision, h, 14, fp8=oracle.FP8_BACKWARD)
    oracle.assert_close("y", y, y_want, forward)
    oracle.assert_close("dx", dx, dx_want, backward)
    assert np.asarray(y).any(axis=0).all() and np.asarray(dx).any(axis=0).all()
    used = np.asarray(want["experts"]["gate"]).any(axis=(1, 2))
    for name, gradient in dparams["experts"].items():
        columns = np.asarray(gradient)[used].any(axis=-2 if gradient.ndim == 3 else 0)
        assert columns.all(), f"{name}: a column without a gradient"


def test_d10_no_recipe_changes_a_public_shape_and_bfloat16_pays_nothing_for_fp8():
    x, params, dy = oracle.layer_case(dropless.MoEConfig(5, 3, 24), (37, 40))

    def shapes_and_text(cfg):
        def both(x, params):
            y, vjp = jax.vjp(lambda x, p: dropless.moe(x, p, cfg)[0], x, params)
            return y, vjp(dy)

        return jax.eval_shape(both, x, params), jax.jit(both).lower(x, params).as_text()

    results = {}
    for name, options in PRECISIONS.items():
        cfg = dataclasses.replace(dropless.MoEConfig(5, 3, 24), **options)
        results[name], text = shapes_and_text(cfg)
        assert "111x2x24" in text  # h of exactly M = 37 * 3 rows
        assert ("f8E4M3" in text) == (name == "fp8")
    assert results["bf16"] == results["f32"] == results["fp8"]


# --- J: types of the sizes -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint16])
def test_j8_sizes_in_types_that_cannot_hold_the_number_of_rows(dtype):
    # 70,000 rows are more than any of these types counts to.
    m, rng = 70_000, np.random.default_rng(0)
    lhs = jnp.asarray(rng.standard_normal((m, 3)), jnp.float32)
    rhs = jnp.asarray(rng.standard_normal((2, 3, 5)), jnp.float32)
    sizes = jnp.array([100, 27], dtype)
    want = dropless.ragged_dot(lhs, rhs, sizes.astype(jnp.int32))
    np.testing.assert_array_equal(dropless.ragged_dot(lhs, rhs, sizes), want)
    assert np.asarray(want).any(axis=1).sum() == 127
    wgrads = (dropless.grouped_wgrad(lhs, lhs, s) for s in (sizes, sizes.astype(jnp.int32)))
    np.testing.assert_array_equal(*wgrads)
