"""The FP8 products on Hopper against a bit-level model of its tensor cores (hopper_fp8.py).

Sums have the model's bits, and so has what is only rounded from them. Activations have hardware
exponentials and reciprocals: what follows them must be the rounding of a value within the error of
those. The tests are skipped without a Hopper GPU.
"""

from __future__ import annotations

import hopper_fp8
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper_fp8 import assert_quantised, assert_rounded
from test_gpu_ops import GPU, assert_same_bits, normal, on_both

from dropless._call import call

pytestmark = pytest.mark.skipif(
    GPU is None or GPU.compute_capability != "9.0", reason="no Hopper GPU"
)

F8 = jnp.float8_e4m3fn
# Relative error of an activation, and error of its derivative. ex2, rcp and erfc are good to a few
# units of 2^-24, but an exponent of up to 32 multiplies the rounding of its argument.
ACTIVATION_ERROR = 2.0**-17
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

# Sizes of groups, rows before the first, rows after the last.
GROUPS = {
    "ragged": ((0, 1, 127, 128, 129, 300, 63), 0, 24),
    "offset": ((65, 64, 0, 191), 37, 0),
    "one": ((700,), 0, 0),
    "many": ((*[3] * 31, 0, 0, *[17] * 37), 5, 5),
    "empty": ((0, 0, 0), 4, 3),
}
# H, I: multiples of 16; on both sides of blocks of 128 and of tiles of 128 to 256 columns.
WIDTHS = [(272, 144), (128, 384), (400, 400)]


def blocks(n):
    return -(-n // 128)


def activation_attributes(kind):
    return {
        "scale_rounding": 0,
        "activation": kind,
        "gated": True,
        "activation_slope": 1.0,
        "gate_limit": np.inf,
        "up_limit": np.inf,
        "up_offset": 0.0,
    }


def layout(name):
    sizes, before, after = GROUPS[name]
    offsets = before + np.concatenate([[0], np.cumsum(sizes)])
    return jnp.asarray(offsets, jnp.int32), int(offsets[-1]) + after


def routing(name, k):
    """offsets [E+1] and slot_of_row [M] over T * K >= M slots, one inner row of which has none."""
    offsets, rows = layout(name)
    tokens = -(-rows // k) + 3
    slots = np.random.default_rng(1).permutation(tokens * k)[:rows]
    slots[: int(offsets[0])] = -1
    slots[int(offsets[-1]) :] = -1
    if rows > 200:
        slots[int(offsets[0]) + 130] = -1
    return offsets, jnp.asarray(slots, jnp.int32), tokens


def quantize_rows(x):
    rows, width = x.shape
    results = [((rows, width), F8), ((rows, blocks(width)), jnp.float32)]
    return call("quantize_rows", results, [x], scale_rounding=0)


def quantize_weight(w):
    e, i, o = w.shape
    return call(
        "quantize_weight",
        [
            ((e, i, o), F8),
            ((e, o, i), F8),
            ((e, blocks(i), blocks(o)), jnp.float32),
            ((e, blocks(o), blocks(i)), jnp.float32),
        ],
        [w],
        scale_rounding=0,
    )


def codes(array):
    return np.asarray(array).view(np.uint8)


def gathered(x, slots, k):
    """Codes and scales in expert order; rows without a slot are zeros."""
    q, scale = codes(x[0]), np.asarray(x[1])
    token = np.asarray(slots) // k
    return (
        np.where(token[:, None] >= 0, q[token], np.uint8(0)),
        np.where(token[:, None] >= 0, scale[token], np.float32(0)),
    )


def groups_of(offsets, rows):
    """The expert of each row, and which rows have one."""
    row = np.arange(rows)
    expert = np.searchsorted(np.asarray(offsets), row, side="right") - 1
    inside = (row >= int(offsets[0])) & (row < int(offsets[-1]))
    return np.where(inside, expert, 0), inside


def with_bias(acc, bias, offsets):
    expert, inside = groups_of(offsets, acc.shape[0])
    return np.where(inside[:, None], acc + np.float32(np.asarray(bias)[expert]), np.float32(0))


def on_gpu(function, *arguments):
    return jax.tree.map(np.asarray, jax.jit(function)(*jax.device_put(arguments, GPU)))


def activation_of(kind, z):
    """act(z) and act'(z) in float64."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        act = {
            "silu": jax.nn.silu,
            "gelu": lambda z: jax.nn.gelu(z, approximate=False),
            "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
        }[kind]
        z = jnp.asarray(np.float64(z))
        value, slope = jax.jvp(act, (z,), (jnp.ones_like(z),))
        return np.asarray(value), np.asarray(slope)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", GROUPS)
def test_i_grouped_gemm(name, dtype):
    offsets, rows = layout(name)
    experts = offsets.shape[0] - 1
    for depth, cols in WIDTHS:

        def product(x, w, bias, offsets, rows=rows, cols=cols):
            q, scale = quantize_rows(x)
            _, w_t, _, w_scale = quantize_weight(w)
            operands = [q, scale, w_t, w_scale, bias, offsets]
            out = call("grouped_gemm", [((rows, cols), dtype)], operands, rhs_transposed=1)[0]
            return out, q, scale, w_t, w_scale

        bias = normal(3, (experts, cols))
        out, q, scale, w_t, w_scale = on_gpu(
            product,
            normal(1, (rows, depth), jnp.bfloat16),
            normal(2, (experts, depth, cols)),
            bias,
            offsets,
        )
        planes = [(codes(q), scale, codes(w_t), w_scale)]
        acc = hopper_fp8.grouped_product(planes, np.asarray(offsets))
        assert_rounded("out", out, with_bias(acc, bias, offsets), 0, dtype)


@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("h_dtype", [jnp.bfloat16, F8])
@pytest.mark.parametrize("name", GROUPS)
def test_i_expert_up(name, h_dtype, activation):
    k = 3
    offsets, slots, tokens = routing(name, k)
    rows, experts = slots.shape[0], offsets.shape[0] - 1
    for model, width in WIDTHS:

        def up(x, gate, up, gate_bias, offsets, slots, model=model, width=width):
            x = quantize_rows(x)
            gate, up = quantize_weight(gate), quantize_weight(up)
            fp8_h = h_dtype == F8
            results = call(
                "expert_up",
                [
                    ((rows, 2, width), h_dtype),
                    ((rows, 2, blocks(width)), jnp.float32) if fp8_h else None,
                    ((rows, width), F8),
                    ((rows, blocks(width)), jnp.float32),
                ],
                [
                    *(*x, gate[1], up[1], gate[3], up[3]),
                    *(gate_bias, None, offsets, slots),
                ],
                workspace=(rows, model, 1),
                experts_per_token=k,
                weights_transposed=1,
                **activation_attributes(activation),
            )
            return results, x, (gate[1], gate[3]), (up[1], up[3])

        scale, bias = model**-0.5, normal(4, (experts, width))
        (h, h_scale, a, a_scale), x, *weights = on_gpu(
            up,
            normal(1, (tokens, model), jnp.bfloat16),
            normal(2, (experts, model, width)) * scale,
            normal(3, (experts, model, width)) * scale,
            bias,
            offsets,
            slots,
        )
        lhs, ends = gathered(x, slots, k), np.asarray(offsets)
        gate, up = (
            hopper_fp8.grouped_product([(*lhs, codes(w), w_scale)], ends) for w, w_scale in weights
        )
        expected = np.stack([with_bias(gate, bias, offsets), up], axis=1)
        if h_dtype == F8:
            assert_quantised("h", (h, h_scale), expected, 0)
        else:
            assert_rounded("h", h, expected, 0, jnp.bfloat16)
        z = np.float64(expected.astype(jnp.bfloat16))
        value = activation_of(ACTIVATIONS[activation], z[:, 0])[0] * z[:, 1]
        assert_quantised("a", (a, a_scale), value, ACTIVATION_ERROR * np.abs(value))


@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("name", GROUPS)
def test_i_expert_backward(name, activation):
    k = 3
    offsets, slots, tokens = routing(name, k)
    rows, experts = slots.shape[0], offsets.shape[0] - 1
    ends = np.asarray(offsets)
    for model, width in WIDTHS:

        def backward(
            dy, down, gate, up, bias, h, weights, offsets, slots, model=model, width=width
        ):
            dy, down = quantize_rows(dy), quantize_weight(down)
            gate, up = quantize_weight(gate), quantize_weight(up)
            results = call(
                "expert_down_backward",
                [
                    ((rows, 2, width), jnp.bfloat16),
                    ((rows, 2, width), F8),
                    ((rows, 2, blocks(width)), jnp.float32),
                    ((rows, width), jnp.bfloat16),
                    *(None, None, None, None),
                    ((tokens, k), jnp.float32),
                ],
                [*dy, down[0], down[2], bias, h, None, weights, offsets, slots],
                workspace=(rows, model, width, 1),
                **activation_attributes(activation),
            )
            operands = [*results[1:3], gate[0], up[0], gate[2], up[2], offsets]
            dx = call("expert_up_backward", [((rows, model), jnp.bfloat16)], operands)[0]
            results = *results[:4], results[8]
            return results, dx, dy, *((w[0], w[2]) for w in (down, gate, up))

        h = np.array(normal(5, (rows, 2, width), jnp.bfloat16))
        h[: ends[0]] = np.nan  # rows of no group are not read
        h[ends[-1] :] = np.nan
        bias, weights = normal(3, (experts, model)), normal(4, (tokens, k))
        (dh, dh_q, dh_scale, pa, d_weights), dx, dy, down, *inward = on_gpu(
            backward,
            normal(1, (tokens, model), jnp.bfloat16),
            normal(2, (experts, width, model)) * width**-0.5,
            normal(6, (experts, model, width)),
            normal(7, (experts, model, width)),
            bias,
            jnp.asarray(h),
            weights,
            offsets,
            slots,
        )
        q, scale = gathered(dy, slots, k)
        da = hopper_fp8.grouped_product([(q, scale, codes(down[0]), down[1])], ends)
        expert, inside = groups_of(offsets, rows)
        slot = np.asarray(slots)
        given = inside & (slot >= 0)
        z = np.where(inside[:, None, None], np.float64(h), 0)
        p = np.where(given, np.asarray(weights).reshape(-1)[slot], 0).astype(np.float64)[:, None]
        value, slope = activation_of(ACTIVATIONS[activation], z[:, 0])
        pda, a = p * np.float64(da), value * z[:, 1]
        want = np.stack([pda * slope * z[:, 1], pda * value], axis=1)
        # The derivative's terms grow with z, and cancel.
        terms = np.abs(pda) * np.maximum(1, np.abs(z[:, 0]))
        error = ACTIVATION_ERROR * np.stack([terms * np.abs(z[:, 1]), np.abs(want[:, 1])], axis=1)
        assert_rounded("dh", dh, want, error, jnp.bfloat16)
        assert_quantised("dh", (dh_q, dh_scale), want, error)
        assert_rounded("pa", pa, p * a, ACTIVATION_ERROR * np.abs(p * a), jnp.bfloat16)

        from_bias = np.float64(q.view(F8)) * np.repeat(np.float64(scale), 128, axis=-1)[:, :model]
        from_bias *= np.asarray(bias)[expert]
        share = (np.float64(da) * a).sum(1) + from_bias.sum(1)
        size = np.abs(np.float64(da) * a).sum(1) + np.abs(from_bias).sum(1)
        d_want, d_error = np.zeros((2, tokens * k))
        d_want[slot[given]] = share[given]
        # A thread adds up 32 columns, a lane a 32nd of dy's, a warp the rest: below 64 additions.
        d_error[slot[given]] = (ACTIVATION_ERROR + 64 * 2.0**-24) * size[given]
        assert_rounded("d_weights", d_weights.reshape(-1), d_want, d_error, jnp.float32)

        planes = [
            (codes(dh_q)[:, part], dh_scale[:, part], codes(w), w_scale)
            for part, (w, w_scale) in enumerate(inward)
        ]
        acc = hopper_fp8.grouped_product(planes, ends)
        assert_rounded("dx", dx, acc, 0, jnp.bfloat16)


def test_i1_i7_blocks_of_zeros_outliers_and_not_finite():
    """A zero block stays 0 with scale 1; NaN and infinity stay in their row, 1e4 in its block."""
    model, width, rows = 256, 384, 256
    x = np.array(normal(1, (rows, model), jnp.float32))
    x[3] = 0
    x[7, 5] = np.nan
    x[9, 5] = np.inf
    x[11, 200] = 1e4
    w = normal(2, (2, model, width)) * model**-0.5
    w = w.at[0, :, 128:256].set(0)

    def up(x, gate, up, offsets, slots):
        q, x_scale = quantize_rows(x)
        gate, up = quantize_weight(gate), quantize_weight(up)
        results = [((rows, 2, width), jnp.bfloat16), None, ((rows, width), F8)]
        results.append(((rows, 3), jnp.float32))
        operands = [q, x_scale, gate[1], up[1], gate[3], up[3], None, None, offsets, slots]
        return call(
            "expert_up",
            results,
            operands,
            workspace=(rows, model, 1),
            experts_per_token=1,
            weights_transposed=1,
            **activation_attributes(0),
        )

    offsets = jnp.asarray([0, 128, 256], jnp.int32)
    slots = jnp.arange(rows, dtype=jnp.int32)
    cpu, gpu = on_both(up, jnp.asarray(x), w, w, offsets, slots)
    a, scale = np.float32(gpu[2]), gpu[3]
    assert np.all(np.isfinite(scale)) and np.all(scale > 0)
    assert not a[3].any() and np.all(scale[3] == 1)
    assert not np.delete(a[:128, 128:256], (7, 9), axis=0).any()
    assert np.all(scale[:128, 1] == 1)
    for row in (7, 9):
        assert_same_bits(np.isnan(a[row]), np.isnan(np.float32(cpu[2])[row]))
        assert np.isnan(a[row]).any()
    assert np.all(np.isfinite(np.delete(a, (7, 9), axis=0)))


def test_i_the_same_bits_every_time():
    offsets, rows = layout("ragged")
    x, w = normal(1, (rows, 400), jnp.bfloat16), normal(2, (7, 400, 272))

    @jax.jit
    def product(x, w, offsets):
        q, scale = quantize_rows(x)
        _, w_t, _, w_scale = quantize_weight(w)
        operands = [q, scale, w_t, w_scale, None, offsets]
        return call("grouped_gemm", [((rows, 272), jnp.bfloat16)], operands, rhs_transposed=1)[0]

    arguments = jax.device_put((x, w, offsets), GPU)
    first = np.asarray(product(*arguments))
    for _ in range(20):
        assert_same_bits(np.asarray(product(*arguments)), first)


def test_m_what_has_no_fp8_kernel_is_named():
    offsets, rows = layout("one")

    def product(transposed, depth):
        x, w = normal(1, (rows, depth), jnp.bfloat16), normal(2, (1, depth, 64))

        def run(x, w, offsets):
            q, scale = quantize_rows(x)
            w, w_t, w_scale, w_scale_t = quantize_weight(w)
            operand = (w_t, w_scale_t) if transposed else (w, w_scale)
            operands = [q, scale, *operand, None, offsets]
            out = [((rows, 64), jnp.bfloat16)]
            return call("grouped_gemm", out, operands, rhs_transposed=transposed)[0]

        return jax.block_until_ready(jax.jit(run)(*jax.device_put((x, w, offsets), GPU)))

    with pytest.raises(jax.errors.JaxRuntimeError, match="contraction last"):
        product(False, 64)
    with pytest.raises(jax.errors.JaxRuntimeError, match="multiples of 16 bytes"):
        product(True, 72)
