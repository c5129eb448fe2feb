"""The shared expert: a dense network that every token passes, beside the routed experts.

It runs on the engine as one expert that every token is routed to. So its products, roundings and
gradients are those of the routed experts in every precision, its pre-activations are all that is
kept, and the sigmoid gate on its output is a routing weight, whose gradient the engine has.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dropless import _routing
from dropless._experts import Spec, experts
from dropless._params import PreparedExperts, shared_as_experts


def shared_expert(
    spec: Spec,
    x: jax.Array,
    gate_logits: jax.Array | None,
    mask: jax.Array | None,
    params: Mapping[str, jax.Array],
    prepared: PreparedExperts | None,
) -> jax.Array:
    """sigmoid(gate_logits) * down(act(gate(x)) * up(x)).

    Args:
      spec: as for the routed experts.
      x: [T, H], T > 0.
      gate_logits: [T, 1] float32; None: the output is not gated.
      mask: [T] bool, False at padding, which gets 0 and enters no gradient; None: none is.
      params: ``gate [H,S]``, ``up [H,S]`` if gated, ``down [S,H]``.
      prepared: what the products read instead, with E = 1; or None.

    Returns:
      [T, H] in x's dtype.
    """
    tokens = x.shape[0]
    if gate_logits is None:
        weights = jnp.ones((tokens, 1), jnp.float32)
    else:
        weights = jax.nn.sigmoid(gate_logits)
    return experts(spec, x, weights, shared_as_experts(params), prepared, _plan(tokens, mask))


def _plan(tokens: int, mask: jax.Array | None) -> _routing.Plan:
    if mask is not None:
        ids = jnp.where(mask, 0, -1).astype(jnp.int32)[:, None]
        return _routing.plan(ids, 1)
    rows = jnp.arange(tokens, dtype=jnp.int32)
    offsets = jnp.array([0, tokens], jnp.int32)
    return _routing.Plan(offsets[1:], offsets, rows, rows[:, None])
