"""What the layer is compared with: written in plain JAX, each with the layer's own parameters."""

import jax
import jax.numpy as jnp


def _router(x, params, k):
    logits = x.astype(jnp.float32) @ params["router"]["kernel"]
    probs = jax.nn.softmax(logits, axis=-1)
    weights, ids = jax.lax.top_k(probs, k)
    return weights / weights.sum(-1, keepdims=True), ids


def ragged_dot_layer(x, params, k, dtype):
    """The layer as a JAX user writes it today: sort, gather, three `jax.lax.ragged_dot`, scatter.

    x [T, H] -> [T, H]. GEMM operands have `dtype`.
    """
    num_experts = params["router"]["kernel"].shape[1]
    weights, ids = _router(x, params, k)
    order = jnp.argsort(ids.reshape(-1), stable=True)
    sizes = jnp.bincount(ids.reshape(-1), length=num_experts).astype(jnp.int32)
    rows = x.astype(dtype)[order // k]
    experts = {name: w.astype(dtype) for name, w in params["experts"].items()}
    gate = jax.lax.ragged_dot(rows, experts["gate"], sizes)
    up = jax.lax.ragged_dot(rows, experts["up"], sizes)
    out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, experts["down"], sizes)
    out = out * weights.reshape(-1)[order, None].astype(dtype)
    return jnp.zeros_like(x).at[order // k].add(out.astype(x.dtype))


def dense_params(key, model_dim, width, dtype):
    """One SwiGLU FFN of hidden width `width` = K·I: the FLOPs of the MoE layer, no routing."""
    keys = jax.random.split(key, 3)
    scale = model_dim**-0.5
    return {
        "gate": (jax.random.normal(keys[0], (model_dim, width)) * scale).astype(dtype),
        "up": (jax.random.normal(keys[1], (model_dim, width)) * scale).astype(dtype),
        "down": (jax.random.normal(keys[2], (width, model_dim)) * width**-0.5).astype(dtype),
    }


def dense_ffn(x, params, dtype):
    """Dense SwiGLU: x [T, H] -> [T, H], operands in `dtype`."""
    p = {name: w.astype(dtype) for name, w in params.items()}
    x = x.astype(dtype)
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def six_gemms(tokens, model_dim, width, dtype, key):
    """The dense FFN's GEMMs alone, forward and backward: a call without arguments, one jit.

    gate and up are one GEMM of 2·width columns, so the six are fc1, fc2 and both gradients of each.
    """
    ks = jax.random.split(key, 6)
    normal = jax.random.normal
    x = normal(ks[0], (tokens, model_dim)).astype(dtype)
    w1 = normal(ks[1], (model_dim, 2 * width)).astype(dtype)
    w2 = normal(ks[2], (width, model_dim)).astype(dtype)
    a = normal(ks[3], (tokens, width)).astype(dtype)
    dh = normal(ks[4], (tokens, 2 * width)).astype(dtype)
    dy = normal(ks[5], (tokens, model_dim)).astype(dtype)

    @jax.jit
    def run(x, w1, w2, a, dh, dy):
        return x @ w1, a @ w2, dy @ w2.T, dh @ w1.T, x.T @ dh, a.T @ dy

    return lambda: run(x, w1, w2, a, dh, dy)
