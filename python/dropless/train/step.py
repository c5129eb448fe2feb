"""One training step and one evaluation step, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dropless
from dropless.train.config import RunConfig
from dropless.train.feed_forward import FeedForward
from dropless.train.model import cross_entropy, forward, init_model

# The usual limit on the global gradient norm of language models since GPT-3 (Brown et al. 2020).
_GRADIENT_CLIP = 1.0
# A tenth of the peak at the cosine's end (Hoffmann et al. 2022).
_FINAL_LEARNING_RATE = 0.1


def learning_rate(config: RunConfig) -> optax.Schedule:
    """Linear warm-up, then a cosine down to a tenth of the peak, then flat."""
    warmup = min(config.warmup_steps, max(config.schedule_steps - 1, 0))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (warmup + 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(config.schedule_steps, warmup + 1),
        end_value=_FINAL_LEARNING_RATE * config.learning_rate,
    )


def make_optimizer(config: RunConfig, params: dict[str, Any]) -> optax.GradientTransformation:
    """AdamW with clipping; vectors are not decayed, state (``selection_bias``) does not move."""

    def decayed(tree):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)

    trained = optax.chain(
        optax.clip_by_global_norm(_GRADIENT_CLIP),
        optax.adamw(
            learning_rate(config), b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=decayed
        ),
    )
    labels = jax.tree.map(
        lambda trainable: "trained" if trainable else "kept", dropless.trainable_mask(params)
    )
    return optax.multi_transform({"trained": trained, "kept": optax.set_to_zero()}, labels)


def init_state(config: RunConfig, ffn: FeedForward) -> dict[str, Any]:
    """Parameters, optimiser state and step counter of a run that has not begun."""
    params = init_model(jax.random.key(config.seed), config, ffn)
    opt_state = make_optimizer(config, params).init(params)
    return {"params": params, "opt_state": opt_state, "step": jnp.zeros((), jnp.int32)}


def loss_function(
    params: dict[str, Any], batch: jax.Array, config: RunConfig, ffn: FeedForward, dtype: jnp.dtype
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What the optimiser minimises, and the figures behind it.

    ``batch [B, S+1] int32``. The first result is the cross-entropy plus the weighted router losses,
    summed over layers; the second holds ``loss`` (nats a token, cross-entropy alone) and, with
    experts, the means over layers of the router losses, the dropped tokens and ``expert_counts
    [layers, E]``.
    """
    logits, auxes = forward(params, batch[:, :-1], config, ffn, dtype)
    loss = cross_entropy(logits, batch[:, 1:])
    if auxes[0] is None:
        return loss, {"loss": loss}
    balance = jnp.stack([aux.load_balance_loss for aux in auxes])
    z = jnp.stack([aux.z_loss for aux in auxes])
    objective = loss + config.load_balance_weight * balance.sum() + config.z_loss_weight * z.sum()
    return objective, {
        "loss": loss,
        "load_balance_loss": balance.mean(),
        "z_loss": z.mean(),
        "dropped_tokens": jnp.stack([aux.dropped_tokens for aux in auxes]).sum(),
        "expert_counts": jnp.stack([aux.expert_counts for aux in auxes]),
    }


def make_train_step(
    config: RunConfig,
    ffn: FeedForward,
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding | None = None,
) -> Callable[[dict[str, Any], jax.Array], tuple[dict[str, Any], dict[str, jax.Array]]]:
    """``step(state, batch [B, S+1] int32) -> (state, figures)``; the old state is donated.

    ``sharding`` is that of the results; ``None`` leaves it to the compiler.
    """
    schedule = learning_rate(config)

    def train_step(state, batch):
        params = state["params"]
        grads, figures = jax.grad(loss_function, has_aux=True)(params, batch, config, ffn, dtype)
        with jax.named_scope("optimizer"):
            optimizer = make_optimizer(config, params)
            updates, opt_state = optimizer.update(grads, state["opt_state"], params)
            new_params = optax.apply_updates(params, updates)
        figures["grad_norm"] = optax.tree.norm(grads)
        figures["learning_rate"] = jnp.asarray(schedule(state["step"]), jnp.float32)
        return {"params": new_params, "opt_state": opt_state, "step": state["step"] + 1}, figures

    return jax.jit(train_step, donate_argnums=0, out_shardings=sharding)


def make_eval_step(
    config: RunConfig, ffn: FeedForward, dtype: jnp.dtype
) -> Callable[[dict[str, Any], jax.Array], jax.Array]:
    """``step(params, batch [B, S+1] int32) -> loss``, mean nats a token."""

    def eval_step(params, batch):
        return loss_function(params, batch, config, ffn, dtype)[1]["loss"]

    return jax.jit(eval_step)
