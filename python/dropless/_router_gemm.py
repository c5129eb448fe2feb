"""The router's matrix products: float32 arithmetic at the tensor cores' bfloat16 speed.

A float32 number is the sum of three bfloat16 ones (3 x 8 bits of significand, hidden bits
included), so the product of a bfloat16 x with a float32 kernel is three bfloat16 products
accumulated in float32, without any loss: no TF32, and several times faster than float32 products on
a GPU. Where both sides are float32, six of the nine products reach 2^-24 of the largest (the method
of Henry, Tang and Heinecke, arXiv 1904.06376). CPUs multiply float32 directly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST


def split(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Three bfloat16 arrays whose sum is the float32 array ``a``, largest first.

    ``reduce_precision`` states the rounding, which the compiler could otherwise simplify away.
    """
    parts = []
    for _ in range(3):
        part = jax.lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        # A non-finite value stays in the first part: inf - inf would spread NaN.
        a = jnp.where(jnp.isfinite(part), a - part, 0)
    return tuple(parts)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _on_gpu(split_version, direct_version, *args):
    return jax.lax.platform_dependent(*args, cuda=split_version, default=direct_version)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [T, H] bfloat16 or float32 times kernel [H, E] float32 -> [T, E] float32."""
    if x.dtype != jnp.bfloat16:
        return jnp.dot(x, kernel, precision=_HIGHEST)

    def direct(x, kernel):
        return jnp.dot(x.astype(jnp.float32), kernel, precision=_HIGHEST)

    return _on_gpu(matmul_split, direct, x, kernel)


def matmul_split(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``matmul`` for bfloat16 x as one product [T, H] x [H, 3E]."""
    parts = _dot(x, jnp.concatenate(split(kernel), axis=1)).reshape(x.shape[0], 3, -1)
    return parts[:, 2] + parts[:, 1] + parts[:, 0]


def grad_x(d_logits: jax.Array, kernel: jax.Array, dtype) -> jax.Array:
    """d_logits [T, E] times the transposed kernel [H, E] -> [T, H] in ``dtype``."""

    def direct(d_logits, kernel):
        return jnp.dot(d_logits, kernel.T, precision=_HIGHEST).astype(dtype)

    if dtype != jnp.bfloat16:
        return direct(d_logits, kernel)
    return _on_gpu(lambda d, w: grad_x_split(d, w).astype(dtype), direct, d_logits, kernel)


def grad_x_split(d_logits: jax.Array, kernel: jax.Array) -> jax.Array:
    """``grad_x`` in float32 as one product over a contraction of 6E, smallest terms first."""
    d, w = split(d_logits), split(kernel)
    pairs = ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))
    left = jnp.concatenate([d[i] for i, _ in pairs], axis=1)
    right = jnp.concatenate([w[j] for _, j in pairs], axis=1)
    return _dot(left, right.T)


def grad_kernel(x: jax.Array, d_logits: jax.Array) -> jax.Array:
    """x [T, H] transposed times d_logits [T, E] -> [H, E] float32."""

    def direct(x, d_logits):
        return jnp.dot(x.astype(jnp.float32).T, d_logits, precision=_HIGHEST)

    if x.dtype != jnp.bfloat16:
        return direct(x, d_logits)
    return _on_gpu(grad_kernel_split, direct, x, d_logits)


def grad_kernel_split(x: jax.Array, d_logits: jax.Array) -> jax.Array:
    """``grad_kernel`` for bfloat16 x as one product [H, T] x [T, 3E]."""
    parts = _dot(x.T, jnp.concatenate(split(d_logits), axis=1)).reshape(x.shape[1], 3, -1)
    return parts[:, 2] + parts[:, 1] + parts[:, 0]
