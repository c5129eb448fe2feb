"""A mixture of experts in plain JAX, dense over experts: every expert sees every token.

Written from the formulas alone, for the training tests to compare curves with. Router: softmax over
E, the K largest, weights over their sum. Losses: Switch Transformer's load balance (arXiv
2101.03961, eq. 4, for K experts a token) and ST-MoE's z-loss (arXiv 2202.08906, eq. 5).
"""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp


def init(key: jax.Array, model_dim: int, num_experts: int, expert_dim: int) -> dict[str, Any]:
    """Parameters in the layout of ``dropless.init``; each matrix LeCun normal on its own."""
    normal = jax.nn.initializers.lecun_normal()
    stacked = jax.nn.initializers.lecun_normal(batch_axis=0)
    router, gate, up, down = jax.random.split(key, 4)
    wide, narrow = (num_experts, model_dim, expert_dim), (num_experts, expert_dim, model_dim)
    return {
        "router": {"kernel": normal(router, (model_dim, num_experts))},
        "experts": {
            "gate": stacked(gate, wide),
            "up": stacked(up, wide),
            "down": stacked(down, narrow),
        },
    }


def moe(x: jax.Array, params: dict[str, Any], experts_per_token: int) -> tuple[jax.Array, Any]:
    """``x [..., H]`` to ``y [..., H]`` and the router's figures, named as in ``MoEAux``."""
    rows = x.reshape(-1, x.shape[-1])
    experts = {name: value.astype(x.dtype) for name, value in params["experts"].items()}
    logits = rows.astype(jnp.float32) @ params["router"]["kernel"].astype(jnp.float32)
    num_experts = logits.shape[1]
    probabilities = jax.nn.softmax(logits, axis=-1)
    best, ids = jax.lax.top_k(probabilities, experts_per_token)
    chosen = jax.nn.one_hot(ids, num_experts)  # [T, K, E]
    weights = jnp.einsum("tk,tke->te", best / best.sum(-1, keepdims=True), chosen)

    gate = jnp.einsum("th,ehi->tei", rows, experts["gate"])
    up = jnp.einsum("th,ehi->tei", rows, experts["up"])
    activation = jax.nn.silu(gate) * up * weights[..., None].astype(x.dtype)
    y = jnp.einsum("tei,eih->th", activation, experts["down"])

    counts = chosen.sum((0, 1))
    fraction = jax.lax.stop_gradient(counts) / (experts_per_token * len(rows))
    aux = types.SimpleNamespace(
        expert_counts=counts.astype(jnp.int32),
        load_balance_loss=num_experts * jnp.sum(fraction * probabilities.mean(0)),
        z_loss=jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2),
        dropped_tokens=jnp.zeros((), jnp.int32),
    )
    return y.reshape(x.shape), aux
