"""The NNX layer that tests of it share, and its inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import dropless

H, I, E, K = 24, 20, 6, 2  # noqa: E741
B, S = 3, 7
OPTIONS = {"num_experts": E, "experts_per_token": K, "expert_dim": I}


def inputs(seed=1, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (B, S, H), dtype)


def make(**options):
    return dropless.MoELayer(**(OPTIONS | options))


def loss_of(layer, x):
    return jnp.sum(layer(x) ** 2)


def leaves_equal(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
