"""A decoder-only language model: pre-norm blocks of causal attention and a feed-forward layer.

RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), normalised queries and keys
(Dehghani et al. 2023), no biases. Parameters are a plain dict of float32 arrays; letters: B
windows, S tokens of a window, H model width, N heads, D = H / N, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dropless.train.config import RunConfig
from dropless.train.feed_forward import FeedForward

# The usual base of the rotary wavelengths (Su et al. 2021).
_ROTARY_BASE = 10_000.0
# Keeps the root away from zero; float32 has 1.2e-7 to offer.
_NORM_EPSILON = 1e-6


def init_model(key: jax.Array, config: RunConfig, ffn: FeedForward) -> dict[str, Any]:
    """Fresh parameters; what attention adds starts small, by the root of the number of branches."""
    width = config.model_dim
    normal = jax.nn.initializers.lecun_normal()
    embed_key, head_key, *block_keys = jax.random.split(key, 2 + config.layers)
    blocks = []
    for block_key in block_keys:
        qkv_key, out_key, ffn_key = jax.random.split(block_key, 3)
        blocks.append(
            {
                "attention_norm": jnp.ones(width),
                "qkv": normal(qkv_key, (width, 3 * width)),
                "query_norm": jnp.ones(width // config.heads),
                "key_norm": jnp.ones(width // config.heads),
                "out": normal(out_key, (width, width)) / (2 * config.layers) ** 0.5,
                "ffn_norm": jnp.ones(width),
                "ffn": ffn.init(ffn_key, width),
            }
        )
    return {
        "embed": jax.random.normal(embed_key, (config.vocab_size, width)),
        "blocks": blocks,
        "final_norm": jnp.ones(width),
        "head": normal(head_key, (width, config.vocab_size)),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``x [..., H]`` over its root mean square, times ``scale [H]``; computed in float32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + _NORM_EPSILON) * scale).astype(x.dtype)


def rotary_tables(length: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines ``[S, 1, D/2]`` of every position's angles."""
    frequency = _ROTARY_BASE ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs (first half, second half) of ``x [B, S, N, D]`` by position."""
    cosine, sine = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cosine - second * sine, first * sine + second * cosine)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attention(params: dict[str, Any], x: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention of ``x [B, S, H]``, without the residual."""
    batch, length, width = x.shape
    qkv = (x @ params["qkv"].astype(x.dtype)).reshape(batch, length, 3, heads, width // heads)
    tables = rotary_tables(length, width // heads)
    query = rotate(rms_norm(qkv[:, :, 0], params["query_norm"]), tables)
    key = rotate(rms_norm(qkv[:, :, 1], params["key_norm"]), tables)
    mixed = jax.nn.dot_product_attention(query, key, qkv[:, :, 2], is_causal=True)
    return mixed.reshape(batch, length, width) @ params["out"].astype(x.dtype)


def forward(
    params: dict[str, Any], tokens: jax.Array, config: RunConfig, ffn: FeedForward, dtype: jnp.dtype
) -> tuple[jax.Array, list[Any]]:
    """``tokens [B, S] int32`` to logits ``[B, S, V] float32`` and each layer's aux.

    Activations are of ``dtype``; aux is what the feed-forward layer returned beside its output.
    """
    with jax.named_scope("embed"):
        x = params["embed"].astype(dtype)[tokens]
    auxes = []
    for block in params["blocks"]:
        with jax.named_scope("attention"):
            x = x + attention(block, rms_norm(x, block["attention_norm"]), config.heads)
        with jax.named_scope("feed_forward"):
            y, aux = ffn(block["ffn"], rms_norm(x, block["ffn_norm"]))
            x = x + y
        auxes.append(aux)
    with jax.named_scope("head"):
        return head(params, x), auxes


def head(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Logits ``[B, S, V] float32`` of the last block's output ``x [B, S, H]``."""
    normed = rms_norm(x, params["final_norm"])
    return jnp.matmul(normed, params["head"].astype(x.dtype), preferred_element_type=jnp.float32)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean nats a token: ``logits [B, S, V] float32`` against ``targets [B, S] int32``."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)
