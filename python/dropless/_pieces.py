"""The layer's parts for other layers: grouped products and moving rows, with gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dropless._call import call, unify_axes
from dropless._checks import as_array, in_words
from dropless._params import check_float_dtype
from dropless._routing import Plan


def _offsets_of(group_sizes: jax.Array, local: int, rows: int, group_offset: Any) -> jax.Array:
    """[local+1] int32 first rows of the groups, from sizes [G] of any integer dtype."""
    if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(
            f"group_sizes must be a vector of integers; got {group_sizes.dtype.name}"
            f"{list(group_sizes.shape)}."
        )
    groups = group_sizes.shape[0]
    if group_offset is None and groups != local:
        raise ValueError(
            f"group_sizes must have one entry for each of the {local} matrices; got {groups}. For "
            f"the matrices of some of the groups give group_offset."
        )
    if group_offset is not None and groups < local:
        raise ValueError(f"group_sizes must have at least {local} entries; got {groups}.")
    group_offset = _check_group_offset(group_offset, groups - local)
    if jnp.iinfo(group_sizes.dtype).bits < 32:  # which may not hold the number of rows
        group_sizes = group_sizes.astype(jnp.int32)
    # Sizes that do not fit are cut to the rows there are: nothing outside the buffers is touched.
    # Two numbers below 2^31 add up without overflow in uint32.
    sizes = jnp.clip(group_sizes, 0, rows).astype(jnp.uint32)
    ends = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, jnp.uint32(rows)), sizes)
    offsets = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends.astype(jnp.int32)])
    if group_offset is None:
        return offsets
    first = jnp.clip(jnp.reshape(group_offset, ()).astype(jnp.int32), 0, groups - local)
    return jax.lax.dynamic_slice(offsets, (first,), (local + 1,))


def _check_group_offset(group_offset: Any, last: int) -> jax.Array | None:
    """As an array; its value is checked against 0..last where it is known."""
    if group_offset is None:
        return None
    known = not any(
        isinstance(leaf, jax.core.Tracer) or not getattr(leaf, "is_fully_addressable", True)
        for leaf in jax.tree.leaves(group_offset)
    )
    try:
        # numpy holds integers that int32 does not, for the error below.
        group_offset = np.asarray(group_offset) if known else jnp.asarray(group_offset)
    except (TypeError, ValueError):
        raise TypeError(
            f"group_offset must be one integer, of shape () or (1,); got {in_words(group_offset)}."
        ) from None
    if group_offset.size != 1 or not jnp.issubdtype(group_offset.dtype, jnp.integer):
        raise TypeError(
            f"group_offset must be one integer, of shape () or (1,); got {group_offset.dtype.name}"
            f"{list(group_offset.shape)}."
        )
    if known and not 0 <= group_offset.item() <= last:
        raise ValueError(
            f"group_offset must be from 0 to {last}, the entries of group_sizes less the matrices "
            f"of rhs; got {group_offset.item()}."
        )
    return jnp.asarray(group_offset)


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | None = None,
) -> jax.Array:
    """Multiplies contiguous groups of rows by a matrix each, like ``jax.lax.ragged_dot``.

    Group g owns the next ``group_sizes[g]`` rows of ``lhs`` and is multiplied by ``rhs[g]``. Rows
    past the last group, and of groups whose matrix is not here, are exactly 0 and never read; so
    are the rows of the gradient. Twice differentiable in reverse mode; cotangents are rounded to
    the operands' dtype, sums are float32. The sizes' total may be less than M; what exceeds M is
    cut.

    Args:
      lhs: [M, C] float32 or bfloat16.
      rhs: [G, C, N] float32 or bfloat16; G may be 0. Mixed dtypes are promoted to float32.
      group_sizes: [G] integers; [all groups] with ``group_offset``.
      precision: accepted for compatibility; float32 products are always full float32.
      preferred_element_type: dtype of the result, float32 or bfloat16; default: that of the
        operands.
      group_offset: one integer, the group that ``rhs[0]`` belongs to: from 0 to the number of sizes
        less G. A value that is not known when the function is traced is cut to that range.

    Returns:
      [M, N].

    Raises:
      ValueError, TypeError: a shape, a dtype or a known ``group_offset`` is not what is listed
        above.
    """
    del precision
    lhs = as_array("lhs", lhs, "[M, C] float32 or bfloat16")
    rhs = as_array("rhs", rhs, "[G, C, N] float32 or bfloat16")
    group_sizes = as_array("group_sizes", group_sizes, "[G] of integers")
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
        raise ValueError(
            f"lhs and rhs must be [M, C] and [G, C, N] of one C; got {lhs.shape} and {rhs.shape}."
        )
    check_float_dtype("lhs", lhs.dtype)
    check_float_dtype("rhs", rhs.dtype)
    operand = jnp.promote_types(lhs.dtype, rhs.dtype)
    result = operand if preferred_element_type is None else preferred_element_type
    check_float_dtype("preferred_element_type", result)
    offsets = _offsets_of(group_sizes, rhs.shape[0], lhs.shape[0], group_offset)
    lhs, rhs, offsets = unify_axes((lhs.astype(operand), rhs.astype(operand), offsets))
    return _gemm((False, jnp.dtype(result)), lhs, rhs, offsets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gemm(static, lhs, rhs, offsets):
    transposed, dtype = static
    rows, columns = lhs.shape[0], rhs.shape[1 if transposed else 2]
    if 0 in (rows, columns, lhs.shape[1], rhs.shape[0]):
        # Nothing to multiply. The product is written with the operands so that it varies over their
        # mesh axes.
        zero = (jnp.sum(lhs[:0]) + jnp.sum(rhs[:0])).astype(dtype)
        return jnp.broadcast_to(zero, (rows, columns))
    operands = [lhs, None, rhs, None, None, offsets]
    return call("grouped_gemm", [((rows, columns), dtype)], operands, rhs_transposed=transposed)[0]


def _gemm_fwd(static, lhs, rhs, offsets):
    return _gemm(static, lhs, rhs, offsets), (lhs, rhs, offsets)


def _gemm_bwd(static, residuals, d_out):
    transposed, _ = static
    lhs, rhs, offsets = residuals
    d_out = d_out.astype(lhs.dtype)
    d_lhs = _gemm((not transposed, lhs.dtype), d_out, rhs, offsets)
    first, second = (d_out, lhs) if transposed else (lhs, d_out)
    return d_lhs, _wgrad(rhs.dtype, first, second, offsets, None), None


_gemm.defvjp(_gemm_fwd, _gemm_bwd)


def grouped_wgrad(
    x: jax.Array,
    dy: jax.Array,
    group_sizes: jax.Array,
    into: jax.Array | None = None,
    *,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Sums the outer products of each group's rows: the gradient of ``ragged_dot`` to its matrices.

    out[g] = sum over the rows r of group g of outer(x[r], dy[r]), accumulated in float32; exactly 0
    for an empty group. Twice differentiable in reverse mode.

    Args:
      x: [M, C] float32 or bfloat16.
      dy: [M, N], dtype of x.
      group_sizes: [G] integers.
      into: [G, C, N] float32 or bfloat16, added to the result: accumulation over microbatches
        without another rounding. Under jit its memory is reused if nothing else needs it.
      preferred_element_type: dtype of the result; default: that of ``into``, else of x.

    Returns:
      [G, C, N].

    Raises:
      ValueError, TypeError: a shape or dtype is not what is listed above.
    """
    x = as_array("x", x, "[M, C] float32 or bfloat16")
    dy = as_array("dy", dy, "[M, N] of x's dtype")
    group_sizes = as_array("group_sizes", group_sizes, "[G] of integers")
    if x.ndim != 2 or dy.ndim != 2 or x.shape[0] != dy.shape[0]:
        raise ValueError(
            f"x and dy must be [M, C] and [M, N] of one M; got {x.shape} and {dy.shape}."
        )
    check_float_dtype("x", x.dtype)
    if dy.dtype != x.dtype:
        raise TypeError(f"dy must have the dtype of x, {x.dtype.name}; got {dy.dtype.name}.")
    into = None if into is None else as_array("into", into, "[G, C, N] float32 or bfloat16")
    offsets = _offsets_of(
        group_sizes, group_sizes.shape[0] if group_sizes.ndim else 0, x.shape[0], None
    )
    shape = (group_sizes.shape[0], x.shape[1], dy.shape[1])
    if into is not None:
        check_float_dtype("into", into.dtype)
    default = x.dtype if into is None else into.dtype
    dtype = default if preferred_element_type is None else preferred_element_type
    check_float_dtype("preferred_element_type", dtype)
    if into is not None and (into.shape != shape or into.dtype != jnp.dtype(dtype)):
        raise ValueError(
            f"into must be {jnp.dtype(dtype).name}{list(shape)}; got {into.dtype.name}"
            f"{list(into.shape)}."
        )
    return _wgrad(jnp.dtype(dtype), *unify_axes((x, dy, offsets, into)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wgrad(dtype, x, dy, offsets, into):
    shape = (offsets.shape[0] - 1, x.shape[1], dy.shape[1])
    if 0 in shape or x.shape[0] == 0:
        zero = (jnp.sum(x[:0]) + jnp.sum(dy[:0])).astype(dtype)
        return jnp.broadcast_to(zero, shape) if into is None else into
    results = [(shape, dtype), None]
    return call(
        "grouped_wgrad",
        results,
        [x, None, dy[:, None, :], None, None, offsets, into, None],
        aliases=None if into is None else {6: 0},
        workspace=(x.shape[0], x.shape[1], 1, dy.shape[1], shape[0], 0, 0, x.dtype.itemsize),
        gather=0,
        experts_per_token=1,
        fp8=0,
        scale_rounding=0,
    )[0]


def _wgrad_fwd(dtype, x, dy, offsets, into):
    return _wgrad(dtype, x, dy, offsets, into), (x, dy, offsets, into is not None)


def _wgrad_bwd(dtype, residuals, d_out):
    x, dy, offsets, accumulated = residuals
    rounded = d_out.astype(x.dtype)
    d_x = _gemm((True, x.dtype), dy, rounded, offsets)
    d_dy = _gemm((False, dy.dtype), x, rounded, offsets)
    return d_x, d_dy, None, d_out if accumulated else None


_wgrad.defvjp(_wgrad_fwd, _wgrad_bwd)


def permute(x: jax.Array, plan: Plan) -> jax.Array:
    """Copies every token to the rows of its experts.

    Args:
      x: [T, H] float32 or bfloat16.
      plan: a ``Plan``, or the ``Routing`` of ``route``.

    Returns:
      [M, H]: row r is ``x[slot_of_row[r] // K]``; rows without a slot are 0.
    """
    _check_plan(plan)
    x = as_array("x", x, "[T, H] float32 or bfloat16")
    _check_rows_argument("x", x, plan.row_of_slot.shape[0], "T")
    return _permute(*unify_axes((x, plan.slot_of_row, plan.row_of_slot)))


def unpermute(rows: jax.Array, plan: Plan, weights: jax.Array | None = None) -> jax.Array:
    """Sums the rows of every token, in float32 and rounded once.

    Args:
      rows: [M, H] float32 or bfloat16.
      plan: a ``Plan``, or the ``Routing`` of ``route``.
      weights: [T, K] float32; None: 1 everywhere. Weights of slots without a row are not read.

    Returns:
      [T, H]: the sum over k, in order, of ``weights[t, k] * rows[row_of_slot[t, k]]``.
    """
    _check_plan(plan)
    rows = as_array("rows", rows, "[M, H] float32 or bfloat16")
    _check_rows_argument("rows", rows, plan.row_of_slot.size, "M")
    if weights is None:
        return _gather_sum(*unify_axes((rows, plan.slot_of_row, plan.row_of_slot)))
    weights = as_array("weights", weights, "[T, K] float32")
    if weights.shape != plan.row_of_slot.shape or weights.dtype != jnp.float32:
        raise ValueError(
            f"weights must be float32{list(plan.row_of_slot.shape)}; got {weights.dtype.name}"
            f"{list(weights.shape)}."
        )
    return _combine(*unify_axes((rows, weights, plan.slot_of_row, plan.row_of_slot)))


def _check_plan(plan: Any) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan must be a dropless.Plan or Routing, as dropless.plan and dropless.route return "
            f"them; got {type(plan).__name__}."
        )


def _check_rows_argument(name: str, array: jax.Array, count: int, letter: str) -> None:
    if array.ndim != 2 or array.shape[0] != count:
        raise ValueError(
            f"{name} must have shape [{letter}, H] with {letter} = {count}; got {array.shape}."
        )
    check_float_dtype(name, array.dtype)


@jax.custom_vjp
def _permute(x, slot_of_row, row_of_slot):
    shape = (slot_of_row.shape[0], x.shape[1])
    if 0 in shape:
        return jnp.broadcast_to(jnp.sum(x[:0]), shape)
    k = row_of_slot.shape[1]
    operands = [x, slot_of_row, row_of_slot]
    return call("permute", [(shape, x.dtype)], operands, experts_per_token=k)[0]


@jax.custom_vjp
def _gather_sum(rows, slot_of_row, row_of_slot):
    return combine(rows, row_of_slot, None, rows.dtype)


def combine(
    rows: jax.Array, row_of_slot: jax.Array, weights: jax.Array | None, dtype: Any
) -> jax.Array:
    """[T, H] sums of rows [M, H], without a gradient of its own."""
    shape = (row_of_slot.shape[0], rows.shape[1])
    if 0 in shape:
        return jnp.broadcast_to(jnp.sum(rows[:0]).astype(dtype), shape)
    return call("combine", [(shape, dtype)], [rows, row_of_slot, weights])[0]


def _permute_fwd(x, slot_of_row, row_of_slot):
    return _permute(x, slot_of_row, row_of_slot), (slot_of_row, row_of_slot)


def _permute_bwd(maps, d_rows):
    return _gather_sum(d_rows, *maps), None, None


def _gather_sum_fwd(rows, slot_of_row, row_of_slot):
    return _gather_sum(rows, slot_of_row, row_of_slot), (slot_of_row, row_of_slot)


def _gather_sum_bwd(maps, d_out):
    return _permute(d_out, *maps), None, None


_permute.defvjp(_permute_fwd, _permute_bwd)
_gather_sum.defvjp(_gather_sum_fwd, _gather_sum_bwd)


@jax.custom_vjp
def _combine(rows, weights, slot_of_row, row_of_slot):
    return combine(rows, row_of_slot, weights, rows.dtype)


def _combine_fwd(rows, weights, slot_of_row, row_of_slot):
    return _combine(rows, weights, slot_of_row, row_of_slot), (
        rows,
        weights,
        slot_of_row,
        row_of_slot,
    )


def _combine_bwd(residuals, d_out):
    rows, weights, slot_of_row, row_of_slot = residuals
    if rows.size == 0:
        return rows, jnp.zeros_like(weights), None, None
    results = [(rows.shape, rows.dtype), (weights.shape, jnp.float32)]
    operands = [d_out, rows, row_of_slot, slot_of_row, weights]
    return *call("combine_backward", results, operands), None, None


_combine.defvjp(_combine_fwd, _combine_bwd)
