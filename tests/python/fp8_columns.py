"""Weight gradients of operands that expert_down_backward quantised, or that were quantised later.

Codes and scales are made of the same values by the same rules: every gradient has the same bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dropless._call import call
from dropless._experts_fp8 import blocks, quantize_rows, token_blocks

F8 = jnp.float8_e4m3fn

# Sizes of groups, rows before the first, rows after the last.
GROUPS = {
    "ragged": ((0, 1, 127, 128, 129, 300, 63), 0, 24),
    "offset": ((65, 64, 0, 191), 37, 0),
    "one": ((700,), 0, 0),
    "many": ((*[3] * 31, 0, 0, *[17] * 37), 5, 5),
    "empty": ((0, 0, 0), 4, 3),
}
# H, I.
WIDTHS = [(272, 144), (128, 384), (400, 400)]


def gradients(name, widths, device, *, kind=0, pow2=0, special=False):
    """(dh_q, dh_scale, d_weights, dw of gate, of up, of down), without columns and with them."""
    (sizes, before, after), (model, width), k = GROUPS[name], widths, 3
    offsets = before + np.concatenate([[0], np.cumsum(sizes)])
    rows, experts = int(offsets[-1]) + after, len(sizes)
    tokens = -(-rows // k) + 3
    random = np.random.default_rng(1)
    slots = random.permutation(tokens * k)[:rows]
    slots[:before] = -1
    slots[int(offsets[-1]) :] = -1
    if rows > 200:
        slots[before + 130] = -1
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    h = normal(rows, 2, width)
    h[:before] = np.nan  # rows of no group are not read
    h[int(offsets[-1]) :] = np.nan
    if special:
        h[before + 3, 0, 5] = np.inf
        h[before + 7, 1, 9] = np.nan
        h[before : before + 40, :, 17] = 0.0

    def run(x, dy, down, h, weights, slots, offsets, columns):
        q, _, scale, _ = call(
            "quantize_weight",
            [
                (down.shape, F8),
                ((experts, model, width), F8),
                ((experts, blocks(width), blocks(model)), jnp.float32),
                ((experts, blocks(model), blocks(width)), jnp.float32),
            ],
            [down],
            scale_rounding=pow2,
        )
        made = token_blocks(rows, experts), blocks(width) * 128
        blocked = lambda planes: [  # noqa: E731
            ((made[0], planes, made[1], 128), F8),
            ((made[0], planes, made[1]), jnp.float32),
        ]
        none = [None] * 4
        dh, dh_q, dh_scale, pa, *found, d_weights = call(
            "expert_down_backward",
            [
                None if columns else ((rows, 2, width), jnp.bfloat16),
                ((rows, 2, width), F8),
                ((rows, 2, blocks(width)), jnp.float32),
                None if columns else ((rows, width), jnp.bfloat16),
                *([*blocked(2), *blocked(1)] if columns else none),
                ((tokens, k), jnp.float32),
            ],
            [*quantize_rows(dy, bool(pow2)), q, scale, None, h, None, weights, offsets, slots],
            workspace=(rows, model, width, 1),
            scale_rounding=pow2,
            activation=kind,
            gated=True,
            activation_slope=1.0,
            gate_limit=np.inf,
            up_limit=np.inf,
            up_offset=0.0,
        )
        dh, dh_s, pa, pa_s = found if columns else (dh, None, pa, None)
        common = {"experts_per_token": k, "fp8": 1, "scale_rounding": pow2}
        size = jnp.bfloat16.dtype.itemsize
        sizes = lambda *s: (*s, 2 if columns else 1, size)  # noqa: E731
        inward = call(
            "grouped_wgrad",
            [((experts, model, width), jnp.float32)] * 2,
            [x, None, dh, dh_s, slots, offsets, None, None],
            workspace=sizes(rows, model, 2, width, experts, 1),
            gather=1,
            **common,
        )
        outward = call(
            "grouped_wgrad",
            [((experts, width, model), jnp.bfloat16), None],
            [pa, pa_s, dy[:, None, :], None, slots, offsets, None, None],
            workspace=sizes(rows, width, 1, model, experts, 2),
            gather=2,
            **common,
        )
        return dh_q, dh_scale, d_weights, *inward, outward[0]

    arguments = jax.device_put(
        (
            normal(tokens, model).astype(jnp.bfloat16),
            normal(tokens, model).astype(jnp.bfloat16),
            normal(experts, width, model) * width**-0.5,
            h.astype(jnp.bfloat16),
            normal(tokens, k),
            slots.astype(np.int32),
            offsets.astype(np.int32),
        ),
        device,
    )
    return [
        jax.tree.map(np.asarray, jax.jit(run, static_argnums=7)(*arguments, columns))
        for columns in (False, True)
    ]


def assert_same_gradients(name, widths, device, **options):
    """All results have the same bits; the gradients are not zeros where rows are."""
    plain, columns = gradients(name, widths, device, **options)
    names = ("dh_q", "dh_scale", "d_weights", "gate", "up", "down")
    for what, a, b in zip(names, plain, columns, strict=True):
        assert a.tobytes() == b.tobytes(), f"{what}: {np.sum(a != b)} of {a.size} differ"
        if sum(GROUPS[name][0]) > 0:
            assert np.any(np.asarray(a, np.float32) != 0), what
