"""The Mixture-of-Experts layer for Flax Linen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dropless._activation import Activation
from dropless._balance import update_selection_bias
from dropless._checks import as_array
from dropless._config import MoEConfig, RouterConfig
from dropless._layer_options import check_dropout
from dropless._moe import moe
from dropless._params import STATE_NAMES, check_float_dtype, init, initial_vector, param_shapes

__all__ = ["MoELayer"]

_CONFIG_FIELDS = tuple(field.name for field in dataclasses.fields(MoEConfig))


class _Params(nn.Module):
    """Makes the variables of a layer, in the scope of that layer."""

    config: MoEConfig
    model_dim: int
    param_dtype: Any
    kernel_init: Any

    @nn.compact
    def __call__(self) -> dict[str, dict[str, jax.Array]]:
        def make(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
            options = {"param_dtype": self.param_dtype, "kernel_init": self.kernel_init}
            return init(key, self.model_dim, self.config, **options)

        # All of them in one go; on apply Flax calls the function below for the shapes alone.
        made = make(self.make_rng("params")) if self.is_initializing() else None
        shapes = param_shapes(self.model_dim, self.config)
        params = {}
        for group, leaves in shapes.items():

            def trained(key: jax.Array, group: str = group) -> dict[str, jax.Array]:
                values = (made or make(key))[group]
                return {name: value for name, value in values.items() if name not in STATE_NAMES}

            params[group] = dict(self.param(group, trained))
            for name in STATE_NAMES & leaves.keys():
                state = self.variable(
                    "router_state", name, initial_vector, name, leaves[name], self.config, None
                )
                params[group][name] = state.value
        return params


class MoELayer(nn.Module):
    """A Mixture-of-Experts feed-forward layer that drops no token: ``[..., H] -> [..., H]``.

    Parameters are those of ``dropless.init`` under the same names and shapes, in the collection
    ``params``; ``selection_bias`` and ``expert_table`` are in the collection ``router_state``,
    where no optimiser finds them. Every call outside ``init`` sows its ``MoEAux`` as ``moe_aux`` in
    the collection ``intermediates``.

    Attributes:
      num_experts: E.
      experts_per_token, expert_dim, router, ...: every further field of ``MoEConfig``, as there.
      dropout: rate of the dropout on the layer's output; it draws from the RNG stream ``dropout``.
      deterministic: True switches dropout off. Give it here or to each call, as with
        ``nn.Dropout``; it may be left out where the rate is 0.
      param_dtype: dtype of the parameters.
      kernel_init: initialiser of every matrix, called as ``kernel_init(key, (in, out), dtype)`` for
        each expert apart; None is Flax's default, LeCun normal.
    """

    num_experts: int
    experts_per_token: int = 2
    expert_dim: int | None = None
    router: RouterConfig = RouterConfig()
    activation: str | Activation = "silu"
    expert_bias: bool = False
    shared_expert_dim: int | None = None
    shared_expert_gate: bool = False
    precision: str = "auto"
    expert_capacity_factor: float = 1.0
    overflow: str = "rounds"
    wgrad_precision: str = "fp8"
    save_h: str = "bf16"
    scale_rounding: str = "fp32"
    fallback: str | None = None
    strict: bool = False
    num_sms: int | None = None
    dropout: float = 0.0
    deterministic: bool | None = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = None

    @property
    def config(self) -> MoEConfig:
        """The layer's settings as ``dropless.moe`` takes them."""
        return MoEConfig(**{name: getattr(self, name) for name in _CONFIG_FIELDS})

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        return_aux: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Applies the layer.

        Args:
          x: ``[..., H]`` float32 or bfloat16.
          mask: ``[...]`` bool, False at padding tokens: they get 0 and count nowhere.
          deterministic: True switches dropout off, False on.
          return_aux: also return the ``MoEAux``, and sow nothing.
          **kwargs: further arguments of ``dropless.moe``: ``prepared``, ``mesh``, ``token_axes``,
            ``expert_ids``, ``token_ids``, ``jitter_key``...

        Returns:
          ``y [..., H]`` in x's dtype, or ``(y, aux)``.

        Raises:
          ValueError: shapes or dtypes that do not fit, named in the message.
        """
        cfg = self.config
        check_dropout(self.dropout)
        x = as_array("x", x, "[..., H] float32 or bfloat16")
        check_float_dtype("x", x.dtype)
        shape = x.shape
        if not shape or shape[-1] == 0:
            raise ValueError(f"x must have shape [..., H] with H >= 1; got {shape}.")
        y, aux = moe(x, self._params(shape[-1]), cfg, mask=mask, **kwargs)
        if self.dropout > 0:
            deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
            y = nn.Dropout(self.dropout)(y, deterministic=deterministic)
        if return_aux:
            return y, aux
        if not self.is_initializing():
            self.sow("intermediates", "moe_aux", aux)
        return y

    def update_selection_bias(
        self,
        expert_counts: jax.Array,
        *,
        rate: float = 1e-3,
        axis_name: str | Sequence[str] | None = None,
    ) -> None:
        """Moves ``selection_bias`` towards equal loads, once a step.

        See ``dropless.update_selection_bias``. For example
        ``layer.apply(variables, aux.expert_counts, method="update_selection_bias",
        mutable=["router_state"])``.

        Args:
          expert_counts: [E] integer, assignments of the step, added over microbatches.
          rate: the step.
          axis_name: inside your own ``shard_map``, axes to sum the counts over.

        Raises:
          ValueError: the variables hold no selection bias.
        """
        bias = self.get_variable("router_state", "selection_bias")
        if bias is None:
            raise ValueError(
                "update_selection_bias: router_state holds no selection_bias; construct the layer "
                "with router=RouterConfig(selection_bias=True)"
            )
        bias = update_selection_bias(bias, expert_counts, rate=rate, axis_name=axis_name)
        self.put_variable("router_state", "selection_bias", bias)

    def _params(self, model_dim: int) -> dict[str, dict[str, jax.Array]]:
        params = _Params(self.config, model_dim, self.param_dtype, self.kernel_init)
        nn.share_scope(self, params)
        return params()
