"""The FP8 products through XLA: a GPU against the CPU's emulation of the same targets.

Both read the same codes, so products differ by the order of fp32 sums. Values that an epilogue
quantises may differ by one code where their accumulators differ. The tests are skipped without a
GPU that has FP8.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu_ops import GPU, assert_same_bits, normal, on_both

from dropless._call import call

pytestmark = pytest.mark.skipif(
    GPU is None or GPU.compute_capability != "9.0", reason="no Hopper GPU"
)

F8 = jnp.float8_e4m3fn
BF16_ROUNDOFF = 2.0**-8
ACCUMULATOR_ROUNDOFF = 2.0**-13

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


def dequantise(codes, scale):
    width = codes.shape[-1]
    return np.float64(codes) * np.repeat(np.float64(scale), 128, axis=-1)[..., :width]


def assert_close(got, expected, terms, roundings=1):
    """Error below ``roundings`` of bfloat16 and a sum of ``terms``, relative to the RMS.

    Tensor cores add 32 products at a time and keep 14 bits of the running sum: four roundings
    before a block of 128 is added in fp32, each of up to twice the RMS.
    """
    got, expected = np.float64(got), np.float64(expected)
    rms = np.sqrt(np.mean(expected**2))
    bound = roundings * BF16_ROUNDOFF * np.abs(expected)
    bound = bound + (8 * ACCUMULATOR_ROUNDOFF + 8 * np.sqrt(terms) * 2.0**-24) * rms
    assert np.all(np.abs(got - expected) <= bound)


def assert_close_codes(got, expected, drift):
    """Codes and scales of values that differ by ``drift`` relative to their block's largest.

    e4m3 moves a value v of scale s by at most 2^-4 |v| + 2^-10 s, either one of them.
    """
    (gq, gs), (eq, es) = got, expected
    assert np.all(np.isfinite(gs))
    np.testing.assert_allclose(gs, es, rtol=drift)
    g, e = dequantise(gq, gs), dequantise(eq, es)
    step = np.repeat(np.float64(es), 128, axis=-1)[..., : e.shape[-1]]
    assert np.all(np.abs(g - e) <= 2.0**-3 * 1.1 * np.abs(e) + (2.0**-9 + 448 * drift) * step)
    same = np.mean(np.asarray(gq).view(np.uint8) == np.asarray(eq).view(np.uint8))
    assert same >= 0.97


def outside(array, offsets):
    array = np.asarray(array)
    return np.concatenate([array[: int(offsets[0])], array[int(offsets[-1]) :]])


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
            return call("grouped_gemm", [((rows, cols), dtype)], operands, rhs_transposed=1)[0]

        cpu, gpu = on_both(
            product,
            normal(1, (rows, depth), jnp.bfloat16),
            normal(2, (experts, depth, cols)),
            normal(3, (experts, cols)),
            offsets,
        )
        assert not outside(gpu, offsets).any()
        assert_close(gpu, cpu, depth, 1 if dtype == jnp.bfloat16 else 0)


@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("h_dtype", [jnp.bfloat16, F8])
@pytest.mark.parametrize("name", GROUPS)
def test_i_expert_up(name, h_dtype, activation):
    k = 3
    offsets, slots, tokens = routing(name, k)
    rows, experts = slots.shape[0], offsets.shape[0] - 1
    for model, width in WIDTHS:

        def up(x, gate, up, gate_bias, offsets, slots, model=model, width=width):
            q, x_scale = quantize_rows(x)
            gate, up = quantize_weight(gate), quantize_weight(up)
            fp8_h = h_dtype == F8
            return call(
                "expert_up",
                [
                    ((rows, 2, width), h_dtype),
                    ((rows, 2, blocks(width)), jnp.float32) if fp8_h else None,
                    ((rows, width), F8),
                    ((rows, blocks(width)), jnp.float32),
                ],
                [
                    *(q, x_scale, gate[1], up[1], gate[3], up[3]),
                    *(gate_bias, None, offsets, slots),
                ],
                workspace=(rows, model, 1),
                experts_per_token=k,
                weights_transposed=1,
                **activation_attributes(activation),
            )

        scale = model**-0.5
        cpu, gpu = on_both(
            up,
            normal(1, (tokens, model), jnp.bfloat16),
            normal(2, (experts, model, width)) * scale,
            normal(3, (experts, model, width)) * scale,
            normal(4, (experts, width)),
            offsets,
            slots,
        )
        for array in (gpu[0], gpu[2]):
            assert not outside(np.float32(array), offsets).any()
        assert np.all(outside(gpu[3], offsets) == 1)
        if h_dtype == F8:
            assert_close_codes(gpu[:2], cpu[:2], 4 * ACCUMULATOR_ROUNDOFF)
        else:
            assert_close(gpu[0], cpu[0], model)
        # A follows from h, of which a bfloat16 rounding may have gone the other way.
        assert_close_codes(gpu[2:], cpu[2:], 2 * BF16_ROUNDOFF)


@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("name", GROUPS)
def test_i_expert_backward(name, activation):
    k = 3
    offsets, slots, tokens = routing(name, k)
    rows, experts = slots.shape[0], offsets.shape[0] - 1
    for model, width in WIDTHS:

        def down(dy, down, bias, h, weights, offsets, slots, model=model, width=width):
            q, dy_scale = quantize_rows(dy)
            codes, _, scale, _ = quantize_weight(down)
            return call(
                "expert_down_backward",
                [
                    ((rows, 2, width), jnp.bfloat16),
                    ((rows, 2, width), F8),
                    ((rows, 2, blocks(width)), jnp.float32),
                    ((rows, width), jnp.bfloat16),
                    ((tokens, k), jnp.float32),
                ],
                [q, dy_scale, codes, scale, bias, h, None, weights, offsets, slots],
                workspace=(rows, model, width, 1),
                **activation_attributes(activation),
            )

        h = np.array(normal(5, (rows, 2, width), jnp.bfloat16))
        h[: int(offsets[0])] = np.nan  # rows of no group are not read
        h[int(offsets[-1]) :] = np.nan
        cpu, gpu = on_both(
            down,
            normal(1, (tokens, model), jnp.bfloat16),
            normal(2, (experts, width, model)) * width**-0.5,
            normal(3, (experts, model)),
            jnp.asarray(h),
            normal(4, (tokens, k)),
            offsets,
            slots,
        )
        for array in (gpu[0], gpu[1], gpu[3]):
            assert not outside(np.float32(array), offsets).any()
        assert np.all(outside(gpu[2], offsets) == 1)
        assert_close(gpu[0], cpu[0], model, 2)
        assert_close_codes(gpu[1:3], cpu[1:3], 8 * ACCUMULATOR_ROUNDOFF)
        assert_close(gpu[3], cpu[3], model, 2)
        assert_close(gpu[4], cpu[4], model + width, 1 / 8)

        def up(dh, dh_scale, gate, up, offsets, model=model):
            gate, up = quantize_weight(gate), quantize_weight(up)
            operands = [dh, dh_scale, gate[0], up[0], gate[2], up[2], offsets]
            return call("expert_up_backward", [((rows, model), jnp.bfloat16)], operands)[0]

        cpu, gpu = on_both(
            up,
            jnp.asarray(cpu[1]),
            jnp.asarray(cpu[2]),
            normal(6, (experts, model, width)),
            normal(7, (experts, model, width)),
            offsets,
        )
        assert not outside(np.float32(gpu), offsets).any()
        assert_close(gpu, cpu, 2 * width)


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
            codes = (w_t, w_scale_t) if transposed else (w, w_scale)
            operands = [q, scale, *codes, None, offsets]
            out = [((rows, 64), jnp.bfloat16)]
            return call("grouped_gemm", out, operands, rhs_transposed=transposed)[0]

        return jax.block_until_ready(jax.jit(run)(*jax.device_put((x, w, offsets), GPU)))

    with pytest.raises(jax.errors.JaxRuntimeError, match="contraction last"):
        product(False, 64)
    with pytest.raises(jax.errors.JaxRuntimeError, match="lhs: expected rows of a multiple of 16"):
        product(True, 72)
