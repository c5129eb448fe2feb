"""How long the parts of a step take, each timed alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dropless.train.config import RunConfig
from dropless.train.feed_forward import FeedForward
from dropless.train.model import attention, cross_entropy, head, rms_norm
from dropless.train.step import make_optimizer

# Odd, so that the median is one of them; enough to pass over a hiccup of the machine.
_REPEATS = 5


def time_parts(
    config: RunConfig, params: dict[str, Any], ffn: FeedForward, dtype: jnp.dtype
) -> dict[str, float]:
    """Median seconds a step spends in each part: forward, backward, all layers.

    Each part is compiled and run by itself on one device's share of the batch, so the parts need
    not add up to a step: in a step the compiler may fuse across them.
    """
    windows = config.batch_size // config.data_parallel
    # By way of the host, for an array that moves straight from a mesh still says so in its type.
    params = jax.device_put(jax.device_get(params), jax.devices()[0])
    block = params["blocks"][0]
    key = jax.random.key(config.seed)
    x = jax.random.normal(key, (windows, config.seq_len, config.model_dim)).astype(dtype)
    tokens = jax.random.randint(key, (windows, config.seq_len), 0, config.vocab_size)

    def feed_forward(block, x):
        return ffn(block["ffn"], rms_norm(x, block["ffn_norm"]))[0]

    def attend(block, x):
        return attention(block, rms_norm(x, block["attention_norm"]), config.heads)

    def ends(params, x):
        embedded = params["embed"].astype(dtype)[tokens]
        return cross_entropy(head(params, x + embedded), tokens)

    optimizer = make_optimizer(config, params)
    opt_state = optimizer.init(params)

    def optimize(params, opt_state):
        updates, opt_state = optimizer.update(params, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    named = "experts and router" if config.ffn == "moe" else "dense feed-forward"
    outer = {name: params[name] for name in ("embed", "final_norm", "head")}
    return {
        named: config.layers * _median_seconds(_forward_backward(feed_forward), block, x),
        "attention": config.layers * _median_seconds(_forward_backward(attend), block, x),
        "embedding, head, loss": _median_seconds(jax.grad(ends, argnums=(0, 1)), outer, x),
        "optimiser": _median_seconds(optimize, params, opt_state),
    }


def _forward_backward(part: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The part's output and its gradients, its own output serving as the cotangent."""

    def run(block, x):
        y, backward = jax.vjp(part, block, x)
        return y, backward(y)

    return run


def _median_seconds(function: Callable[..., Any], *arguments: Any) -> float:
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
