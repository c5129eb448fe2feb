"""The part of a block that a run chooses: a mixture of experts, or as costly a dense layer."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

import dropless
from dropless.train.config import RunConfig


class FeedForward(Protocol):
    """What the model needs of its feed-forward layer."""

    def init(self, key: jax.Array, model_dim: int) -> dict[str, Any]:
        """Fresh float32 parameters for layers of width H = ``model_dim``."""

    def __call__(self, params: dict[str, Any], x: jax.Array) -> tuple[jax.Array, Any]:
        """``x [B, S, H]`` to ``y [B, S, H]`` and a ``MoEAux``; ``None`` without experts."""


class MoEFeedForward:
    """``dropless.moe`` with the run's settings."""

    def __init__(self, config: RunConfig, mesh: jax.sharding.Mesh | None = None):
        self.config = dropless.MoEConfig(
            num_experts=config.num_experts,
            experts_per_token=config.experts_per_token,
            expert_dim=config.expert_dim,
            precision=config.precision,
            overflow=config.overflow,
            expert_capacity_factor=config.expert_capacity_factor,
        )
        self._sharding = {} if mesh is None else {"mesh": mesh, "token_axes": ("data",)}

    def init(self, key: jax.Array, model_dim: int) -> dict[str, Any]:
        """As ``dropless.init``."""
        return dropless.init(key, model_dim, self.config)

    def __call__(self, params: dict[str, Any], x: jax.Array) -> tuple[jax.Array, Any]:
        """As ``dropless.moe``."""
        return dropless.moe(x, params, self.config, **self._sharding)


class DenseFeedForward:
    """A SwiGLU layer of width K·I: a token costs what it costs in the mixture of experts."""

    def __init__(self, config: RunConfig):
        self._width = config.experts_per_token * config.expert_dim

    def init(self, key: jax.Array, model_dim: int) -> dict[str, Any]:
        """``gate [H, K·I]``, ``up [H, K·I]``, ``down [K·I, H]``, LeCun normal."""
        gate, up, down = jax.random.split(key, 3)
        normal = jax.nn.initializers.lecun_normal()
        return {
            "gate": normal(gate, (model_dim, self._width)),
            "up": normal(up, (model_dim, self._width)),
            "down": normal(down, (self._width, model_dim)),
        }

    def __call__(self, params: dict[str, Any], x: jax.Array) -> tuple[jax.Array, None]:
        """``x [B, S, H]`` to ``y [B, S, H]`` and ``None``."""
        gate, up, down = (params[name].astype(x.dtype) for name in ("gate", "up", "down"))
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down, None


def make_feed_forward(config: RunConfig, mesh: jax.sharding.Mesh | None = None) -> FeedForward:
    """The layer that ``--ffn`` names."""
    return MoEFeedForward(config, mesh) if config.ffn == "moe" else DenseFeedForward(config)


def compute_dtype(config: RunConfig, platform: str) -> jnp.dtype:
    """The dtype of activations: float32 where the experts run in it, bfloat16 otherwise."""
    exact = config.precision == "f32" or (config.precision == "auto" and platform == "cpu")
    return jnp.dtype(jnp.float32 if exact else jnp.bfloat16)
