"""The FP8 weight gradient on Hopper against a bit-level model of its tensor cores (hopper_fp8.py).

Every bit is equal. Skipped without a Hopper GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hopper_fp8
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu_ops import GPU, assert_same_bits, normal, on_both

from dropless import _library
from dropless._call import call

sys.path.append(str(Path(__file__).parent.parent / "python"))
import fp8_columns

pytestmark = pytest.mark.skipif(
    GPU is None or GPU.compute_capability != "9.0", reason="no Hopper GPU"
)

SIZES = {
    "ragged": (0, 1, 127, 128, 129, 300, 63),
    "i_every_size": tuple(range(1, 131)),
    "b1_empty": (0, 0, 0),
    "b9_one": (0, 700, 0),
}
# H, I: odd ones too, which the copy engine cannot address.
WIDTHS = [(272, 144), (129, 67)]


def wgrad(x, dy, slots, offsets, *, k, gather, dtype, rounding):
    m, planes = slots.shape[0], dy.shape[1]
    shape = (offsets.shape[0] - 1, x.shape[1], dy.shape[2])
    return call(
        "grouped_wgrad",
        [(shape, dtype), (shape, dtype) if planes == 2 else None],
        [x, None, dy, None, slots, offsets, None, None],
        workspace=(m, x.shape[1], planes, dy.shape[2], shape[0], gather, 1, x.dtype.itemsize),
        gather=gather,
        experts_per_token=k,
        fp8=1,
        scale_rounding=rounding,
    )[:planes]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("gather", [0, 1, 2])
@pytest.mark.parametrize("name", SIZES)
def test_i_d6_weight_gradient(name, gather, widths):
    sizes, k, before, after = SIZES[name], 3, 7, 5
    offsets = before + np.concatenate([[0], np.cumsum(sizes)])
    m = -(-(int(offsets[-1]) + after) // k) * k
    slots = np.full(m, -1)
    order = np.random.default_rng(0).permutation(m)
    slots[offsets[0] : offsets[-1]] = order[: offsets[-1] - offsets[0]]
    planes = 1 if gather == 2 else 2
    x = normal(1, (m // k if gather == 1 else m, widths[0]), jnp.bfloat16)
    dy = normal(2, (m // k if gather == 2 else m, planes, widths[1]), jnp.bfloat16)
    dtype = jnp.bfloat16 if gather == 1 else jnp.float32

    def run(x, dy, slots, offsets):
        return wgrad(x, dy, slots, offsets, k=k, gather=gather, dtype=dtype, rounding=gather % 2)

    arguments = (x, dy, jnp.asarray(slots, jnp.int32), jnp.asarray(offsets, jnp.int32))
    results = jax.tree.map(np.asarray, jax.jit(run)(*jax.device_put(arguments, GPU)))
    x, dy = np.float32(x), np.float32(dy)
    for e, size in enumerate(sizes):
        rows = np.arange(offsets[e], offsets[e] + size)
        token = slots[rows] // k
        lhs = x[token if gather == 1 else rows]
        for plane, got in enumerate(results):
            rhs = dy[token if gather == 2 else rows, plane]
            want = model(lhs, rhs, gather % 2 == 1).astype(dtype)
            assert got[e].tobytes() == want.tobytes(), (e, plane)


def model(x, dy, pow2):
    """x^T dy of one expert's rows [n, H] and [n, I], in blocks of 128 rows x 1 column."""
    acc = np.zeros((x.shape[1], dy.shape[1]), np.float32)
    for first in range(0, x.shape[0], 128):
        operands, scales = [], []
        for operand in (x, dy):
            block = operand[first : first + 128]
            scale = hopper_fp8.block_scale(np.abs(block).max(0), pow2)
            quantised = hopper_fp8.encode(block * (np.float32(1) / scale))
            operands.append(np.ascontiguousarray(quantised.T).view(np.uint8))
            scales.append(scale)
        products = hopper_fp8.product(*operands)
        acc = hopper_fp8.add_scaled(acc, products, scales[0][:, None], scales[1][None])
    return acc


def test_g1_the_same_bits_every_time():
    offsets = jnp.asarray([0, 300, 300, 1000], jnp.int32)
    x, dy = normal(3, (1000, 272), jnp.bfloat16), normal(4, (1000, 1, 144), jnp.bfloat16)
    slots = jnp.arange(1000, dtype=jnp.int32)

    def run(x, dy, slots, offsets):
        return wgrad(x, dy, slots, offsets, k=1, gather=0, dtype=jnp.float32, rounding=0)

    first = on_both(run, x, dy, slots, offsets)[1]
    for _ in range(20):
        assert_same_bits(on_both(run, x, dy, slots, offsets)[1], first)


def test_workspace_is_m_and_a_block_an_expert():
    m, h, i, e = 1000, 272, 144, 9
    blocks = m // 128 + e
    want = blocks * (384 + 2 * 256) * (128 + 4)
    assert _library.workspace_bytes("grouped_wgrad", m, h, 2, i, e, 0, 1, 2) == want


@pytest.mark.parametrize("widths", fp8_columns.WIDTHS, ids=str)
@pytest.mark.parametrize("name", fp8_columns.GROUPS)
def test_operands_quantised_where_they_are_made(name, widths):
    fp8_columns.assert_same_gradients(name, widths, GPU)


@pytest.mark.parametrize("options", [{"kind": 1, "pow2": 1}, {"kind": 2}, {"special": True}])
def test_operands_quantised_where_they_are_made_other_values(options):
    fp8_columns.assert_same_gradients("ragged", (272, 144), GPU, **options)
