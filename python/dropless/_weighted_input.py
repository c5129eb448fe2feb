"""Routing weights on the experts' input (Llama-4): rows p * x, and outputs summed as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dropless._call import call, unify_axes
from dropless._experts import Spec, experts
from dropless._params import PreparedExperts
from dropless._pieces import combine, permute, unpermute
from dropless._routing import Plan


def experts_of_weighted_input(
    spec: Spec,
    x: jax.Array,
    weights: jax.Array,
    params: dict[str, jax.Array],
    prepared: PreparedExperts | None,
    plan: Plan,
) -> jax.Array:
    """y[t] = sum over k of expert_{ids[t, k]}(weights[t, k] * x[t]); arguments as of ``experts``.

    The rows [M, H], rounded to x's dtype, are what is kept of x for the backward pass.
    """
    rows = _weighted_rows(*unify_axes((x, weights, plan.slot_of_row, plan.row_of_slot)))
    # Every row is now a token of its own, in its expert's place already.
    place = jnp.where(plan.slot_of_row >= 0, jnp.arange(len(rows), dtype=jnp.int32), -1)
    by_row = Plan(plan.counts, plan.offsets, place, place[:, None])
    ones = jnp.ones((len(rows), 1), jnp.float32)
    return unpermute(experts(spec, rows, ones, params, prepared, by_row), plan)


@jax.custom_vjp
def _weighted_rows(x, weights, slot_of_row, row_of_slot):
    """[M, H]: weights[slot] * x[slot // K], in float32 and rounded once; 0 without a slot."""
    rows = permute(x, Plan(None, None, slot_of_row, row_of_slot))
    of_row = jnp.where(slot_of_row >= 0, weights.reshape(-1)[slot_of_row], 0.0)
    return (rows.astype(jnp.float32) * of_row[:, None]).astype(x.dtype)


def _weighted_rows_fwd(x, weights, slot_of_row, row_of_slot):
    rows = _weighted_rows(x, weights, slot_of_row, row_of_slot)
    return rows, (x, weights, slot_of_row, row_of_slot)


def _weighted_rows_bwd(residuals, d_rows):
    x, weights, slot_of_row, row_of_slot = residuals
    d_x = combine(d_rows, row_of_slot, weights, x.dtype)
    # rowsum(dX' * X): the gradient of combine's weights, with the two factors' places exchanged.
    results = [(d_rows.shape, d_rows.dtype), (weights.shape, jnp.float32)]
    operands = [x, d_rows, row_of_slot, slot_of_row, weights]
    return d_x, call("combine_backward", results, operands)[1], None, None


_weighted_rows.defvjp(_weighted_rows_fwd, _weighted_rows_bwd)
