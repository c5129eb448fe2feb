"""FP8 experts where a GPU's fused kernels do not reach: widths, activations, saved h.

Everything here gives what the fused kernels give, in more steps: products by the FP8
``grouped_gemm``, what stands between them by XLA, codes by ``quantize_rows``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dropless._activation import Activation
from dropless._call import call

F8 = jnp.float8_e4m3fn
_BLOCK = 128  # elements of a scale
_ALIGNMENT = 16  # codes: the copy engine addresses rows in units of 16 bytes

# A matrix as FP8 products read it: codes and scales.
Scaled = tuple[jax.Array, jax.Array]


def blocks(n: int) -> int:
    """Scales of a row of n."""
    return -(-n // _BLOCK)


def token_blocks(m: int, e: int) -> int:
    """Blocks of 128 rows of one expert that M rows of E experts can reach."""
    return m // _BLOCK + e


def padded(n: int) -> int:
    """A width as FP8 products take it."""
    return -(-n // _ALIGNMENT) * _ALIGNMENT


def has_fused_kernels(activation: Activation) -> bool:
    """Whether a Hopper GPU's fused FP8 kernels compute this activation."""
    plain = Activation(activation.kind)
    return activation == plain and activation.kind in ("silu", "gelu", "gelu_tanh")


def quantize_rows(rows: jax.Array, pow2: bool) -> Scaled:
    """Codes [..., C] and scales [..., ceil(C/128)] of float32 or bfloat16 values."""
    flat = rows.reshape(-1, rows.shape[-1])
    r, c = flat.shape
    results = [((r, c), F8), ((r, blocks(c)), jnp.float32)]
    q, scale = call("quantize_rows", results, [flat], scale_rounding=pow2)
    return q.reshape(rows.shape), scale.reshape(*rows.shape[:-1], -1)


def dequantize_rows(q: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 values of ``quantize_rows``' results."""
    whole = jnp.broadcast_to(scale[..., None], (*scale.shape, _BLOCK))
    per_code = whole.reshape(*scale.shape[:-1], -1)[..., : q.shape[-1]]
    return q.astype(jnp.float32) * per_code


def pad(array: jax.Array | None, *axes: int) -> jax.Array | None:
    """Zeros behind each of ``axes`` up to a multiple of 16; blocks of 128 stay as many."""
    if array is None:
        return None
    ends = [(0, padded(n) - n if a in axes else 0) for a, n in enumerate(array.shape)]
    if not any(end for _, end in ends):
        return array
    if array.dtype == F8:
        codes = jax.lax.bitcast_convert_type(array, jnp.uint8)
        return jax.lax.bitcast_convert_type(jnp.pad(codes, ends), F8)
    return jnp.pad(array, ends)


def _glu(activation: Activation, gate: jax.Array, up: jax.Array | None) -> jax.Array:
    """A in float32; its gradient beyond a limit is 0."""
    if activation.gate_limit is not None:
        gate = jnp.where(gate > activation.gate_limit, activation.gate_limit, gate)
    a = {
        "silu": lambda z: z * jax.nn.sigmoid(activation.slope * z),
        "gelu": lambda z: jax.nn.gelu(z, approximate=False),
        "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
        "relu": lambda z: jnp.where(z < 0, 0, z),
        "relu_squared": lambda z: jnp.where(z < 0, 0, z * z),
    }[activation.kind](gate)
    if up is None:
        return a
    if activation.up_limit is not None:
        limit = activation.up_limit
        up = jnp.where(jnp.abs(up) > limit, jnp.copysign(limit, up), up)
    return a * (up + activation.up_offset)


def _rows_of(x: Scaled, slot_of_row: jax.Array, offsets: jax.Array, k: int) -> tuple[Any, ...]:
    """Codes and scales in expert order, zeros where a row has no token; and which rows have one."""
    q, scale = x
    row = jnp.arange(slot_of_row.shape[0], dtype=jnp.int32)
    given = (slot_of_row >= 0) & (row >= offsets[0]) & (row < offsets[-1])
    token = jnp.where(given, slot_of_row // k, q.shape[0])
    codes = jax.lax.bitcast_convert_type(q, jnp.uint8)
    codes = codes.at[token].get(mode="fill", fill_value=0)
    scale = scale.at[token].get(mode="fill", fill_value=1)
    return jax.lax.bitcast_convert_type(codes, F8), scale, given


def _product(
    rows: Scaled, weight: Scaled, bias: Any, offsets: jax.Array, dtype: Any, num_sms: int
) -> jax.Array:
    shape = rows[0].shape[0], weight[0].shape[1]
    operands = [*rows, *weight, bias, offsets]
    results = [(shape, dtype)]
    return call("grouped_gemm", results, operands, rhs_transposed=1, num_sms=num_sms)[0]


def expert_up(
    activation: Activation,
    x: Scaled,
    weights: tuple[Scaled, ...],
    biases: list[jax.Array | None],
    offsets: jax.Array,
    slot_of_row: jax.Array,
    *,
    experts_per_token: int,
    pow2: bool,
    h_dtype: Any,
    num_sms: int,
) -> tuple[Any, ...]:
    """h [M, P, I] in ``h_dtype`` with its scales (None unless float8), A [M, I] with its scales.

    ``weights``: [E, I, H] codes of gate, and of up if gated. A follows from h in bfloat16.
    """
    q, scale, _ = _rows_of(x, slot_of_row, offsets, experts_per_token)
    parts = zip(weights, biases, strict=True)
    rest = offsets, jnp.float32, num_sms
    h = jnp.stack([_product((q, scale), *part, *rest) for part in parts], axis=1)
    rounded = h.astype(jnp.bfloat16)
    wide = rounded.astype(jnp.float32)
    a = _glu(activation, wide[:, 0], wide[:, 1] if activation.gated else None)
    h_scale = None
    if h_dtype == F8:
        h, h_scale = quantize_rows(h, pow2)
    else:
        h = rounded.astype(h_dtype)
    return h, h_scale, *quantize_rows(a, pow2)


def expert_down_backward(
    activation: Activation,
    dy: Scaled,
    down: Scaled,
    bias: jax.Array | None,
    h: jax.Array,
    weights: jax.Array,
    offsets: jax.Array,
    slot_of_row: jax.Array,
    *,
    pow2: bool,
    num_sms: int,
) -> tuple[jax.Array, ...]:
    """dh [M, P, I] bfloat16, its codes and scales, p * A [M, I] bfloat16, and d_weights [T, K].

    ``down``: [E, I, H] codes. ``h``: [M, P, I] float32 or bfloat16.
    """
    q, scale, given = _rows_of(dy, slot_of_row, offsets, weights.shape[1])
    da = _product((q, scale), down, None, offsets, jnp.float32, num_sms)
    wide = jnp.where(given[:, None, None], h, 0).astype(jnp.float32)
    parts = [wide[:, part] for part in range(activation.parts)]
    glu = functools.partial(_glu, activation, **({} if activation.gated else {"up": None}))
    a, pull = jax.vjp(glu, *parts)
    slot = jnp.where(given, slot_of_row, 0)
    p = jnp.where(given, weights.reshape(-1)[slot], 0)[:, None]
    dh = jnp.stack(pull(p * da), axis=1)
    share = jnp.sum(da * a, axis=1)
    if bias is not None:
        row = jnp.arange(slot_of_row.shape[0], dtype=jnp.int32)
        expert = jnp.searchsorted(offsets, row, side="right") - 1
        of_row = bias[jnp.clip(expert, 0, bias.shape[0] - 1)]
        share += jnp.sum(dequantize_rows(q, scale) * of_row, axis=1)
    nowhere = weights.size  # dropped
    d_weights = jnp.zeros(weights.size, jnp.float32)
    d_weights = d_weights.at[jnp.where(given, slot_of_row, nowhere)].set(share, mode="drop")
    narrow = dh.astype(jnp.bfloat16), *quantize_rows(dh, pow2), (p * a).astype(jnp.bfloat16)
    return *narrow, d_weights.reshape(weights.shape)


def expert_up_backward(dh: Scaled, gate: Scaled, offsets: jax.Array, num_sms: int) -> jax.Array:
    """Rows of dX [M, H] bfloat16 of experts without up; ``gate``: [E, H, I] codes."""
    q, scale = dh
    return _product((q[:, 0], scale[:, 0]), gate, None, offsets, jnp.bfloat16, num_sms)
