"""SparseMixer's routing as Phi-3.5-MoE has it outside training (arXiv 2409.12136).

Twice, the largest logit wins, the second time among the rest. A winner's weight is its softmax
among the logits near it: those z with (best - z) / max(|z|, best) <= 2 * eps. The weights of the
two are not normalised against each other. In training the paper samples the winners and estimates
their gradient; that is not offered, and the gradient here is that of the weights as they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sparse_mixer(logits: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Ids [T, 2] int32 and weights [T, 2] float32 of logits [T, E] float32, E >= 2."""
    ids, weights = [], []
    rest = logits
    for _ in range(2):
        winner = jnp.argmax(rest, axis=-1)
        is_winner = jax.nn.one_hot(winner, logits.shape[-1], dtype=bool)
        best = jax.lax.stop_gradient(jnp.max(rest, axis=-1, keepdims=True))
        fixed = jax.lax.stop_gradient(logits)
        far = (best - fixed) / jnp.maximum(jnp.abs(fixed), best) > 2 * eps
        probabilities = jax.nn.softmax(jnp.where(far, -jnp.inf, rest), axis=-1)
        weights.append(jnp.sum(jnp.where(is_winner, probabilities, 0.0), axis=-1))
        ids.append(winner.astype(jnp.int32))
        rest = jnp.where(is_winner, -jnp.inf, rest)
    return jnp.stack(ids, axis=-1), jnp.stack(weights, axis=-1)
