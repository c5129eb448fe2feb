"""Where the experts round, and what happens to rows that no expert owns."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dropless
import oracle
from dropless._call import call
from dropless._experts import Spec, experts

pytestmark = pytest.mark.any_jax

CONFIG = dropless.MoEConfig(5, 2, 72, precision="bf16", expert_bias=True)


def rounded(a):
    return np.asarray(a).astype(ml_dtypes.bfloat16).astype(np.float64)


def staged(x, params, routing, dy, *, round_h=True):
    """Forward and backward in float64, rounded to bfloat16 exactly where the layer says it does.

    Operands, h, A, the rows before the combine, dh and p * A are; biases, p and sums are not.
    """
    w = {name: np.asarray(leaf, np.float64) for name, leaf in params["experts"].items()}
    gate, up, down = (rounded(w[name]) for name in ("gate", "up", "down"))
    slots, offsets = np.asarray(routing.slot_of_row), np.asarray(routing.offsets)
    expert = np.searchsorted(offsets, np.arange(len(slots)), side="right") - 1
    token = slots // routing.ids.shape[1]
    p = np.asarray(routing.weights, np.float64).reshape(-1)[slots][:, None]
    rows, d_out = rounded(x)[token], rounded(dy)[token]

    def product(rows, matrices):
        return np.einsum("rc,rcn->rn", rows, matrices[expert])

    def transposed(matrices):
        return np.swapaxes(matrices, 1, 2)

    keep = rounded if round_h else np.asarray
    z = keep(product(rows, gate) + w["gate_bias"][expert])
    u = keep(product(rows, up) + w["up_bias"][expert])
    sigmoid = 1 / (1 + np.exp(-z))
    a = z * sigmoid * u
    out = rounded(product(rounded(a), down) + w["down_bias"][expert])
    y = np.zeros(x.shape)
    np.add.at(y, token, p * out)

    d_a = product(d_out, transposed(down))
    d_p = np.sum(d_a * a, 1) + np.sum(d_out * w["down_bias"][expert], 1)
    d_z = rounded(p * d_a * u * sigmoid * (1 + z * (1 - sigmoid)))
    d_u = rounded(p * d_a * z * sigmoid)
    dx_rows = rounded(product(d_z, transposed(gate)) + product(d_u, transposed(up)))
    dx = np.zeros(x.shape)
    np.add.at(dx, token, dx_rows)
    d_down, d_gate = np.zeros(down.shape), np.zeros(gate.shape)
    np.add.at(d_down, expert, np.einsum("ri,rh->rih", rounded(p * a), d_out))
    np.add.at(d_gate, expert, np.einsum("rh,ri->rhi", rows, d_z))
    return {"y": y, "dx": dx, "d_p": d_p, "down": d_down, "gate": d_gate}


def test_rounding_happens_where_the_numerics_say():
    x, params, dy = oracle.layer_case(CONFIG, (64, 56))
    routing = dropless.route(x @ params["router"]["kernel"], CONFIG)
    spec = Spec.of(CONFIG, "bf16")

    def function(x, p, w):
        return experts(spec, x, p, w, None, routing)

    y, vjp = jax.vjp(function, x, routing.weights, params["experts"])
    dx, d_p, d_w = vjp(dy)
    d_p = np.asarray(d_p).reshape(-1)[np.asarray(routing.slot_of_row)]
    got = {"y": y, "dx": dx, "d_p": d_p, "down": d_w["down"], "gate": d_w["gate"]}
    want = staged(x, params, routing, dy)
    unrounded = staged(x, params, routing, dy, round_h=False)
    for name, value in got.items():
        scale = oracle.rms(want[name])
        error = oracle.rms(np.asarray(value, np.float64) - want[name]) / scale
        other = oracle.rms(unrounded[name] - want[name]) / scale
        # float32 sums flip a rounding now and then; to forget one altogether costs far more.
        assert error <= 2.0**-8 / 8, name
        assert other > 3 * error, name


def test_weight_gradients_in_float32_are_not_rounded_through_bfloat16():
    x, params, dy = oracle.layer_case(CONFIG, (64, 56))
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(dropless.moe(x, p, CONFIG)[0] * dy)))(params)
    gradient = gradient["experts"]
    for name in ("gate", "up", "down"):
        value = np.asarray(gradient[name])
        assert (value != value.astype(ml_dtypes.bfloat16).astype(np.float32)).mean() > 0.9, name


@pytest.mark.parametrize("precision", ["f32", "bf16", "fp8"])
def test_a1_a2_rows_past_the_end_change_nothing(precision):
    # Half of the tokens are padding: half of the rows lie past the last expert's end. Three runs in
    # a row reuse memory that earlier ones filled with other numbers.
    cfg = dataclasses.replace(CONFIG, precision=precision, wgrad_precision="fp8", expert_bias=False)
    x, params, dy = oracle.layer_case(cfg, (70, 56))
    mask = jnp.arange(70) < 35

    @jax.jit
    def function(x, params, mask, dy):
        def loss(x, params):
            return jnp.sum(dropless.moe(x, params, cfg, mask=mask)[0] * dy)

        return jax.value_and_grad(loss, (0, 1))(x, params)

    junk = jnp.where(mask[:, None], x, 1e30)
    first = function(junk, params, mask, dy)
    for _ in range(3):
        function(x * 1e18, params, jnp.ones(70, bool), dy)
        jax.tree.map(np.testing.assert_array_equal, function(junk, params, mask, dy), first)
    short = function(x[:35], params, mask[:35], dy[:35])
    for (path, a), (_, b) in zip(
        oracle.leaves(first[1][1]), oracle.leaves(short[1][1]), strict=True
    ):
        oracle.assert_close(path, a, b, oracle.bound("f32", 70, 8))
    np.testing.assert_array_equal(first[1][0][:35], short[1][0])
    assert not np.asarray(first[1][0])[35:].any()


@pytest.mark.parametrize("precision", ["f32", "bf16", "fp8"])
def test_b7_experts_with_fewer_than_128_rows(precision):
    # Expert e gets e rows: 0, 1, ..., 39.
    e = 40
    cfg = dropless.MoEConfig(e, 1, 24, precision=precision, wgrad_precision="fp8")
    ids = np.repeat(np.arange(e), np.arange(e)).astype(np.int32)
    np.random.default_rng(0).shuffle(ids)
    t = len(ids)
    x, params, dy = oracle.layer_case(cfg, (t, 56))
    p = jnp.asarray(np.random.default_rng(1).standard_normal((t, 1)), jnp.float32)
    spec, plan = Spec.of(cfg, precision), dropless.plan(jnp.asarray(ids)[:, None], e)
    np.testing.assert_array_equal(plan.counts, np.arange(e))

    @jax.jit
    def gradients(x, p, w):
        def total(x, p, w):
            return jnp.sum(experts(spec, x, p, w, None, plan) * dy)

        return jax.grad(total, (0, 1, 2))(x, p, w)

    def dense(x, p, w, dy):
        return jnp.sum(oracle.expert_outputs(x, w, "silu")[jnp.arange(t), ids] * p * dy)

    got = gradients(x, p, params["experts"])
    with jax.enable_x64(True):
        wide = oracle.to64((x, p, params["experts"], dy))
        fast = jax.jit(jax.grad(dense, (0, 1, 2)), compiler_options=oracle.COMPILE_FAST)
        wanted = jax.tree.map(np.asarray, fast(*wide))
    limit = oracle.bound(precision, 56, 14, fp8=oracle.FP8_BACKWARD)
    for (path, a), (_, b) in zip(oracle.leaves(got), oracle.leaves(wanted), strict=True):
        # A row brings 24 errors of dh or p * A to a gradient, however many elements that has.
        values = 24 * np.arange(e) if a.ndim == 3 else None
        oracle.assert_close(path, a, b, limit, groups=a.ndim == 3, values=values)
    assert not any(np.asarray(leaf[0]).any() for leaf in got[2].values())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a9_gate_and_up_products_share_no_accumulator(dtype):
    # dx = dh_gate @ gate^T + dh_up @ up^T: the sum of what each gives while the other matrix is 0.
    rng = np.random.default_rng(0)
    sizes, h, i = [3, 0, 40, 17], 56, 24
    dh = jnp.asarray(rng.standard_normal((60, 2, i)), dtype)
    gate, up = (jnp.asarray(rng.standard_normal((4, h, i)), dtype) for _ in range(2))
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(sizes)]), jnp.int32)

    @jax.jit
    def dx(gate, up):
        operands = [dh, None, gate, up, None, None, offsets]
        return call("expert_up_backward", [((60, h), dtype)], operands)[0]

    zero = jnp.zeros_like(gate)
    parts = [np.asarray(dx(*pair), np.float64) for pair in ((gate, zero), (zero, up))]
    assert all(part.any() for part in parts)
    limit = oracle.bound("f32" if dtype == jnp.float32 else "bf16", 2 * i, 3)
    oracle.assert_close("dx", dx(gate, up), parts[0] + parts[1], limit)
    expert = np.repeat(np.arange(4), sizes)
    wide = [np.asarray(a, np.float64) for a in (dh, gate, up)]
    for p, part in enumerate(parts):
        want = np.einsum("ri,rhi->rh", wide[0][:, p], wide[1 + p][expert])
        oracle.assert_close(f"part {p}", part, want, limit)
