"""The router's matrix products: float32 arithmetic at the tensor cores' bfloat16 speed.

A float32 number is the sum of three bfloat16 ones (3 x 8 bits of significand, hidden bits
included), so the product of a bfloat16 x with a float32 kernel is three bfloat16 products
accumulated in float32, without any loss: no TF32, and several times faster than float32 products on
a GPU. Where both sides are float32, six of the nine products reach 2^-24 of the largest (the method
of Henry, Tang and Heinecke, arXiv 1904.06376). The terms lie side by side along the contraction or
the columns, so that each of the three products is one. CPUs multiply float32 directly.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dropless._call import call

_HIGHEST = jax.lax.Precision.HIGHEST
LEFT, RIGHT = 0, 1  # ProductSide of include/dropless/router_terms.h

# [R, 3C] and [R, 6C] bfloat16: the terms of a matrix [R, C], and those of the six products.
Terms = tuple[jax.Array, jax.Array]


def split(a: jax.Array, side: int, *, pairs: bool = True) -> Terms:
    """The terms of ``a`` [R, C] float32 as the ``side`` factor of products; no pairs if not asked.

    Two equal calls in one program are one.
    """
    r, c = a.shape
    results = [((r, 3, c), jnp.bfloat16), ((r, 6, c), jnp.bfloat16) if pairs else None]
    return flat_terms(*call("router_terms", results, [a], side=side))


def flat_terms(terms: jax.Array, pairs: jax.Array | None) -> Terms:
    """From the shapes of the operations."""
    r = terms.shape[0]
    return terms.reshape(r, -1), None if pairs is None else pairs.reshape(r, -1)


def _dot(a: jax.Array, b: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=dtype)


def on_gpu(split_version, direct_version, *args):
    """One of the two by the platform that the program is compiled for."""
    return jax.lax.platform_dependent(*args, cuda=split_version, default=direct_version)


def _sum_of_terms(parts: jax.Array) -> jax.Array:
    """[R, 3C] products of the terms to their sum [R, C], smallest first."""
    parts = parts.reshape(parts.shape[0], 3, -1)
    return parts[:, 2] + parts[:, 1] + parts[:, 0]


def matmul(x: jax.Array, kernel: jax.Array, *, differentiated: bool = False) -> jax.Array:
    """x [T, H] bfloat16 or float32 times kernel [H, E] float32 -> [T, E] float32.

    ``differentiated``: the backward pass of the same program splits the kernel, too.
    """
    if x.dtype != jnp.bfloat16:
        return jnp.dot(x, kernel, precision=_HIGHEST)

    def direct(x, kernel):
        return jnp.dot(x.astype(jnp.float32), kernel, precision=_HIGHEST)

    def with_terms(x, kernel):
        return matmul_split(x, split(kernel, RIGHT, pairs=differentiated))

    return on_gpu(with_terms, direct, x, kernel)


def matmul_split(x: jax.Array, kernel: Terms) -> jax.Array:
    """``matmul`` for bfloat16 x."""
    return _sum_of_terms(matmul_terms(x, kernel))


def matmul_terms(x: jax.Array, kernel: Terms) -> jax.Array:
    """The terms [T, 3E] that ``matmul`` adds up, from one product [T, H] x [H, 3E]."""
    return _dot(x, kernel[0])


def grad_x(d_logits: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    """d_logits [T, E] times the transposed kernel [H, E] -> [T, H] in ``dtype``."""
    return jnp.dot(d_logits, kernel.T, precision=_HIGHEST).astype(dtype)


def grad_x_split(d_logits: Terms, kernel: Terms, dtype: Any) -> jax.Array:
    """``grad_x`` as one product over a contraction of 6E, smallest terms first."""
    return _dot(d_logits[1], kernel[1].T, dtype)


def grad_kernel(x: jax.Array, d_logits: jax.Array) -> jax.Array:
    """x [T, H] transposed times d_logits [T, E] -> [H, E] float32."""
    return jnp.dot(x.astype(jnp.float32).T, d_logits, precision=_HIGHEST)


def grad_kernel_split(x: jax.Array, d_logits: Terms) -> jax.Array:
    """``grad_kernel`` for bfloat16 x as one product [H, T] x [T, 3E]."""
    return _sum_of_terms(_dot(x.T, d_logits[0]))
