"""What keeps experts equally loaded: the balance losses and the update of the selection bias."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dropless._checks import as_array, check_integer
from dropless._sharding import bound_axis_names


def load_balance_loss(
    expert_counts: jax.Array, prob_sum: jax.Array, tokens: jax.Array, experts_per_token: int
) -> jax.Array:
    """E * sum over e of f_e * P_e, with f_e = counts / (K * tokens) and P_e = prob_sum / tokens.

    Switch Transformer's loss (arXiv 2101.03961, eq. 4) for K experts a token: 1 under uniform
    routing whatever E and K, up to E if all goes to one expert. Its gradient flows through P alone.
    0 for no tokens.

    All three are sums over tokens, so those of several calls add up: ``MoEAux`` holds them, and
    under a mesh they are global already. Over microbatches, the loss of the whole batch is that of
    the added sums. Where microbatches are differentiated one after the other, give each its own
    ``prob_sum`` with the counts and tokens of the whole batch: the losses of the microbatches then
    add up to the loss of the batch, and so do their gradients.

    Args:
      expert_counts: [E] integer, assignments per expert.
      prob_sum: [E] float32, sum over tokens of the routing probabilities.
      tokens: scalar integer, the tokens that ``expert_counts`` counts (padding excluded).
      experts_per_token: K.
    """
    counts = as_array("expert_counts", expert_counts, "[E] of integers")
    prob_sum = as_array("prob_sum", prob_sum, "[E] float32")
    tokens = as_array("tokens", tokens, "() of integers")
    check_integer("experts_per_token", experts_per_token, 1)
    if counts.ndim != 1 or prob_sum.shape != counts.shape:
        raise ValueError(
            f"expert_counts and prob_sum must both have shape [E]; got {counts.shape} and "
            f"{prob_sum.shape}."
        )
    if not jnp.issubdtype(prob_sum.dtype, jnp.floating):
        raise TypeError(f"prob_sum must be float32; got {prob_sum.dtype.name}.")
    for name, array in (("expert_counts", counts), ("tokens", tokens)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers; got {array.dtype.name}.")
    if tokens.ndim:
        raise ValueError(f"tokens must be one integer, of shape (); got shape {tokens.shape}.")
    real = jnp.maximum(tokens, 1).astype(jnp.float32)
    fraction = counts.astype(jnp.float32) / (experts_per_token * real)
    return counts.shape[0] * jnp.sum(fraction * (prob_sum / real))


def mean_over_tokens(total: jax.Array, tokens: jax.Array) -> jax.Array:
    """total / tokens, and 0 for no tokens."""
    return total / jnp.maximum(tokens, 1).astype(jnp.float32)


def routing_probabilities(logits: jax.Array, score: str) -> jax.Array:
    """[T, E] float32: what ``Routing.prob_sum`` sums, softmax or scores over their sum.

    Scores over their sum are the softmax of the scores' logarithms, which does not underflow.
    """
    z = logits.astype(jnp.float32)
    if score == "sigmoid":
        z = jax.nn.log_sigmoid(z)
    elif score == "sqrt_softplus":
        # Below -20, softplus(z) is exp(z) in float32. The inner where keeps 0 * inf out of the
        # gradient.
        low = z < -20
        z = 0.5 * jnp.where(low, z, jnp.log(jax.nn.softplus(jnp.where(low, 0.0, z))))
    return jax.nn.softmax(z, axis=-1)


def sequence_balance_loss(
    logits: jax.Array,
    ids: jax.Array,
    length: int,
    score: str,
    axes: tuple[str, ...] = (),
    sequence_axes: tuple[str, ...] = (),
) -> jax.Array:
    """Mean over sequences of each one's ``load_balance_loss`` (DeepSeek-V3, arXiv 2412.19437).

    Args:
      logits: [B * S, E].
      ids: [B * S, K] int32, -1 in empty slots; a token without an expert is padding.
      length: S on this device.
      score: ``RouterConfig.score``.
      axes: manual mesh axes that tokens are split over.
      sequence_axes: those of ``axes`` that split each sequence; the others split B.

    Returns:
      Scalar float32: the mean over the sequences that have a real token; 0 if none has.
    """
    t, e = logits.shape
    k = ids.shape[1]
    sequences = t // length
    real = jnp.any(ids >= 0, axis=1)
    # Padding may be NaN, which a gradient of 0 would not keep from the logits' gradient.
    logits = jnp.where(real[:, None], logits, 0.0)
    probabilities = jnp.where(real[:, None], routing_probabilities(logits, score), 0.0)
    prob_sum = probabilities.reshape(sequences, length, e).sum(1)
    slots = ids.reshape(sequences, length * k)
    sequence = jnp.arange(sequences)[:, None]
    counts = jnp.zeros((sequences, e), jnp.int32)
    counts = counts.at[sequence, jnp.where(slots < 0, e, slots)].add(1, mode="drop")
    tokens = real.reshape(sequences, length).sum(1, dtype=jnp.int32)
    if sequence_axes:
        counts, prob_sum, tokens = jax.lax.psum((counts, prob_sum, tokens), sequence_axes)
    losses = jax.vmap(load_balance_loss, (0, 0, 0, None))(counts, prob_sum, tokens, k)
    total, used = jnp.sum(losses), jnp.sum(tokens > 0, dtype=jnp.int32)
    batch_axes = tuple(a for a in axes if a not in sequence_axes)
    if batch_axes:
        total, used = jax.lax.psum((total, used), batch_axes)
    return mean_over_tokens(total, used)


def update_selection_bias(
    selection_bias: jax.Array,
    expert_counts: jax.Array,
    *,
    rate: float = 1e-3,
    axis_name: str | Sequence[str] | None = None,
) -> jax.Array:
    """The selection bias after a step: + rate for experts below the mean load, - rate above it.

    bias + rate * sign(mean(counts) - counts), arXiv 2408.15664 and DeepSeek-V3. Loads are compared
    as integers, without rounding. No tokens: no change.

    Args:
      selection_bias: [E] float32.
      expert_counts: [E] integer, assignments of the whole step: ``MoEAux.expert_counts``, added
        over microbatches. Under a mesh they are global already.
      rate: the step; DeepSeek-V3 used 1e-3.
      axis_name: inside your own ``shard_map``, axes to sum counts over if they are one device's.

    Returns:
      [E] float32.
    """
    bias = as_array("selection_bias", selection_bias, "[E] float32")
    counts = as_array("expert_counts", expert_counts, "[E] of integers")
    rate = as_array("rate", rate, "() of a real number")
    if rate.ndim or not any(jnp.issubdtype(rate.dtype, k) for k in (jnp.floating, jnp.integer)):
        raise TypeError(f"rate must be one real number; got {rate.dtype.name}{list(rate.shape)}.")
    if bias.ndim != 1 or bias.dtype != jnp.float32:
        raise ValueError(
            f"selection_bias must be float32 [E]; got {bias.dtype.name}{list(bias.shape)}."
        )
    if counts.shape != bias.shape or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(
            f"expert_counts must be integers of selection_bias's shape {bias.shape}; got "
            f"{counts.dtype.name}{list(counts.shape)}."
        )
    axes = bound_axis_names("axis_name", axis_name)
    if axes:
        counts = jax.lax.psum(counts, axes)
    # counts < mean without their sum, which may pass int32: quotient and remainder by E apart.
    e = counts.shape[0]
    rest = jnp.sum(counts % e)
    mean, rest = jnp.sum(counts // e) + rest // e, rest % e
    below = (counts < mean) | ((counts == mean) & (rest > 0))
    above = counts > mean
    step = jnp.asarray(rate, jnp.float32)
    return bias + jnp.where(below, step, jnp.where(above, -step, 0.0))
