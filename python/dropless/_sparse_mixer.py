"""SparseMixer, Phi-3.5-MoE's routing (arXiv 2409.12136).

Twice, one expert wins, the second time among the rest. A winner's weight is its softmax among the
logits near the largest: those z with (best - z) / max(|z|, best) <= 2 * eps. The weights of the two
are not normalised against each other.

Outside training the largest logit wins, and the gradient is that of the weights as they are. In
training the winner is drawn from that softmax, and the paper's estimate takes the gradient's place:
Heun's third-order method gives a winner that was not the largest a third of its weight, but for a
quarter of the draws, while the gradient stays that of the softmax.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

CHOICES = 2
# The published implementation's third, and the share of draws beyond which the weight is whole.
_THIRD = 0.3333
_WHOLE_ABOVE = 0.75


class Draws(NamedTuple):
    """What is random in training: of each choice, token and expert."""

    exponential: jax.Array  # [2, T, E], of mean 1: the Gumbel noise is -log of it
    uniform: jax.Array  # [2, T], from 0 to 1


def draws(key: jax.Array, tokens: int, num_experts: int) -> Draws:
    sampling, midpoint = jax.random.split(key)
    return Draws(
        jax.random.exponential(sampling, (CHOICES, tokens, num_experts)),
        jax.random.uniform(midpoint, (CHOICES, tokens)),
    )


def sparse_mixer(
    logits: jax.Array, eps: float, drawn: Draws | None = None
) -> tuple[jax.Array, jax.Array]:
    """Ids [T, 2] int32 and weights [T, 2] float32 of logits [T, E] float32, E >= 2.

    ``drawn``: None outside training. The two ids differ whatever the logits are.
    """
    # Finite, so that nothing compares equal to an expert that has won already.
    largest_float = jnp.finfo(jnp.float32).max
    ranked = jnp.nan_to_num(jax.lax.stop_gradient(logits), nan=-largest_float, posinf=largest_float)
    won = jnp.zeros(logits.shape, bool)
    ids, weights = [], []
    for choice in range(CHOICES):
        open_values = jnp.where(won, -jnp.inf, ranked)
        largest = jnp.argmax(open_values, axis=-1)
        best = jnp.max(open_values, axis=-1, keepdims=True)
        far = (best - ranked) / jnp.maximum(jnp.abs(ranked), best) > 2 * eps
        winner = largest
        if drawn is not None:
            noisy = ranked - jnp.log(drawn.exponential[choice])
            winner = jnp.argmax(jnp.where(won | far, -jnp.inf, noisy), axis=-1)
        is_winner = jax.nn.one_hot(winner, logits.shape[-1], dtype=bool)
        probabilities = jax.nn.softmax(jnp.where(won | far, -jnp.inf, logits), axis=-1)
        weight = jnp.sum(jnp.where(is_winner, probabilities, 0.0), axis=-1)
        if drawn is not None:
            whole = (winner == largest) | (drawn.uniform[choice] > _WHOLE_ABOVE)
            weight += jax.lax.stop_gradient(jnp.where(whole, 0.0, (_THIRD - 1) * weight))
        weights.append(weight)
        ids.append(winner.astype(jnp.int32))
        won |= is_winner
    return jnp.stack(ids, axis=-1), jnp.stack(weights, axis=-1)
