"""The Mixture-of-Experts layer for Flax NNX."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from dropless._balance import update_selection_bias
from dropless._checks import as_array
from dropless._config import MoEConfig
from dropless._layer_options import check_dropout, layer_config
from dropless._moe import MoEAux, moe
from dropless._params import (
    STATE_NAMES,
    check_float_dtype,
    check_kernel_init,
    init,
    prepare_experts,
)

__all__ = ["AuxState", "MoELayer", "RouterState"]

# Seeds of layers made without ``rngs``, so that two of them never start equal.
_next_seed = itertools.count()


class RouterState(nnx.Variable):
    """Router state that no gradient and no optimiser touches.

    ``selection_bias [E]`` and ``expert_table [V,K]``, both float32.
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _FloatLeaves:
    """A pytree held as float arrays only, integer leaves as their bits in float32.

    ``jax.grad`` refuses arguments with integer leaves. A layer holds its last ``MoEAux``, whose
    counts are integers; in this form the layer stays something ``jax.grad`` can differentiate.
    """

    leaves: tuple[jax.Array, ...]
    is_integer: tuple[bool, ...] = dataclasses.field(metadata={"static": True})
    structure: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def pack(cls, tree: Any) -> _FloatLeaves:
        leaves, structure = jax.tree.flatten(tree)
        is_integer = tuple(jnp.issubdtype(jnp.result_type(leaf), jnp.integer) for leaf in leaves)
        packed = (
            lax.bitcast_convert_type(jnp.asarray(leaf, jnp.int32), jnp.float32)
            if integer
            else jnp.asarray(leaf)
            for leaf, integer in zip(leaves, is_integer, strict=True)
        )
        return cls(tuple(packed), is_integer, structure)

    def unpack(self) -> Any:
        pairs = zip(self.leaves, self.is_integer, strict=True)
        leaves = [_integer_of(leaf) if integer else leaf for leaf, integer in pairs]
        return jax.tree.unflatten(self.structure, leaves)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copying and pickling look for
            raise AttributeError(name)
        return getattr(self.unpack(), name)


def _integer_of(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):  # inside nnx.eval_shape's result
        return jax.ShapeDtypeStruct(leaf.shape, jnp.int32)
    if not isinstance(
        leaf, jax.Array | np.ndarray
    ):  # what Flax shows in place of arrays when printing
        return leaf
    # The cast matters only after a user has cast the whole layer to another dtype, bits and all.
    return lax.bitcast_convert_type(jnp.asarray(leaf, jnp.float32), jnp.int32)


class AuxState(nnx.Variable):
    """A layer's last ``MoEAux``: ``layer.aux.get_value()``, a field as ``layer.aux.rounds``.

    Its value is a pytree, which a checkpoint of ``nnx.to_pure_dict`` restored without a target
    makes a dict that Flax cannot put back. Leave it out there, as the next call writes it anyway:
    ``nnx.state(model, nnx.Not(dropless.nnx.AuxState))``.
    """

    def __init__(self, value: Any, **metadata: Any):
        super().__init__(_FloatLeaves.pack(value), **metadata)

    def get_value(self, **kwargs: Any) -> Any:
        """The ``MoEAux``; with ``index``, each of its arrays indexed, as for stacked layers."""
        value = self.get_raw_value()
        value = value.unpack() if isinstance(value, _FloatLeaves) else value
        index = kwargs.get("index", ...)
        return value if index is ... else jax.tree.map(lambda leaf: leaf[index], value)

    def set_value(self, value: Any, **kwargs: Any) -> None:
        """Replaces the ``MoEAux``."""
        if kwargs.get("index", ...) is not ...:
            raise ValueError("aux: it is written as a whole, not by index")
        self.set_raw_value(value if isinstance(value, _FloatLeaves) else _FloatLeaves.pack(value))


class MoELayer(nnx.Module):
    """A Mixture-of-Experts feed-forward layer that drops no token: ``[..., H] -> [..., H]``.

    Parameters live in ``layer.router`` and ``layer.experts`` under the names and shapes of
    ``dropless.init``. ``layer.aux`` holds the ``MoEAux`` of the last call; read inside a
    differentiated function, its losses carry gradients.

    The model width H is ``model_dim``, or that of the first input. Give ``model_dim`` wherever
    parameters must exist before the first call: an optimiser made early, a gradient of the layer
    (``nnx.grad`` and ``jax.grad`` refuse one that has none yet), ``nnx.eval_shape``, ``nnx.vmap``
    over constructors (there give ``rngs`` too, or all of the stack start equal). Until then
    ``needs_model_dim`` is the one ``nnx.Param`` of the layer, a zero that nothing reads.

    Args:
      num_experts: E. May be left out if ``config`` is given.
      config: a whole ``MoEConfig``, instead of ``num_experts`` and ``options``.
      model_dim: H; None takes it from the first input.
      dropout: rate of the ``nnx.Dropout`` on the output, which ``layer.train()`` and
        ``layer.eval()`` switch.
      param_dtype: dtype of the parameters.
      kernel_init: initialiser of every matrix, called as ``kernel_init(key, (in, out), dtype)`` for
        each expert apart; None is Flax's default, LeCun normal.
      rngs: streams ``params`` and ``dropout``. Without it seeds come from a counter of layers made.
      **options: any other field of ``MoEConfig``, such as ``experts_per_token``, ``expert_dim``,
        ``precision``.

    Raises:
      TypeError: an unknown option, or ``rngs`` of another type.
      ValueError: a value ``MoEConfig`` refuses, or a dropout rate outside [0, 1].
    """

    def __init__(
        self,
        num_experts: int | None = None,
        *,
        config: MoEConfig | None = None,
        model_dim: int | None = None,
        dropout: float = 0.0,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = None,
        rngs: nnx.Rngs | None = None,
        **options: Any,
    ):
        self.config = layer_config(config, num_experts, options)
        check_dropout(dropout)
        check_float_dtype("param_dtype", param_dtype)
        if rngs is None:
            rngs = nnx.Rngs(next(_next_seed))
        elif not isinstance(rngs, nnx.Rngs):
            raise TypeError(
                f"rngs: expected flax.nnx.Rngs or None, got {type(rngs).__name__}; try nnx.Rngs(0)"
            )
        check_kernel_init(kernel_init)
        self.param_dtype = param_dtype
        self.kernel_init = kernel_init
        key = rngs.params()  # before the dropout's, so that a rate does not change the parameters
        self.dropout = nnx.Dropout(dropout, rngs=rngs if dropout else None)
        self.router = nnx.Dict()
        self.experts = nnx.Dict()
        self.aux = AuxState(MoEAux.zeros(self.config.num_experts))
        if model_dim is None:
            self.pending_key = _freeze_key(key)
            # Stands in for the parameters, so that asking for their gradient can be refused.
            self.needs_model_dim = nnx.Param(jnp.zeros((), jnp.float32))
        else:
            self.pending_key = None
            self._store(self._init(key, model_dim))

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        return_aux: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Applies the layer.

        Args:
          x: ``[..., H]`` float32 or bfloat16.
          mask: ``[...]`` bool, False at padding tokens: they get 0 and count nowhere.
          deterministic: True switches dropout off for this call, False on; None asks the layer.
          rngs: source of the dropout mask for this call, as in ``nnx.Dropout``; needed where a
            plain ``jax.jit`` closes over a layer in training mode, as the layer's own cannot move
            on there.
          return_aux: also return the ``MoEAux``, and leave ``layer.aux`` as it is. Needed under an
            ``nnx.vmap`` that broadcasts the layer, where one ``layer.aux`` cannot hold them all.
          **kwargs: further arguments of ``dropless.moe``: ``prepared``, ``mesh``, ``token_axes``,
            ``expert_ids``, ``token_ids``, ``jitter_key``...

        Returns:
          ``y [..., H]`` in x's dtype, or ``(y, aux)``.

        Raises:
          ValueError: shapes or dtypes that do not fit, named in the message.
        """
        params = self._params_for(x)
        y, aux = moe(x, params, self.config, mask=mask, **kwargs)
        self._keep(params)  # only now: a refused x must not decide the width
        y = self.dropout(y, deterministic=deterministic, rngs=rngs)
        if return_aux:
            return y, aux
        # Where a plain jax.jit or jax.grad closes over the layer, Flax lets nothing be written.
        with contextlib.suppress(flax.errors.TraceContextError):
            self.aux.set_value(aux)
        return y

    def prepare(self) -> Any:
        """What the GEMMs read of the experts, to be made once an optimiser step.

        Returns:
          ``dropless.PreparedExperts``, for ``layer(x, prepared=...)``. The parameters get the
          gradients.

        Raises:
          ValueError: the layer has no parameters yet.
        """
        return prepare_experts(self.params, self.config)

    def update_selection_bias(
        self,
        expert_counts: jax.Array | None = None,
        *,
        rate: float = 1e-3,
        axis_name: str | Sequence[str] | None = None,
    ) -> None:
        """Moves ``selection_bias`` towards equal loads, once a step: ``update_selection_bias``.

        Args:
          expert_counts: [E] integer, assignments of the step, added over microbatches; None: of the
            last call, from ``layer.aux``.
          rate: the step.
          axis_name: inside your own ``shard_map``, axes to sum the counts over.

        Raises:
          ValueError: the layer has no selection bias, or none yet.
        """
        if self.pending_key is not None or "selection_bias" not in self.params["router"]:
            raise ValueError(
                "update_selection_bias: the layer has no selection bias; construct it with "
                "router=RouterConfig(selection_bias=True), and with model_dim= or call it first"
            )
        counts = self.aux.expert_counts if expert_counts is None else expert_counts
        bias = self.router["selection_bias"]
        bias.set_value(
            update_selection_bias(bias.get_value(), counts, rate=rate, axis_name=axis_name)
        )

    @property
    def params(self) -> dict[str, dict[str, jax.Array]]:
        """The parameters as the dict pytree of ``dropless.init``.

        Raises:
          ValueError: the layer has no parameters yet.
        """
        if self.pending_key is not None:
            raise ValueError(
                "MoELayer has no parameters yet: call it once, or construct it with model_dim="
            )
        groups = {name: getattr(self, name, None) for name in ("router", "experts", "shared")}
        return {
            # Not by items(): nnx.tabulate replaces it, and puts an attribute of its own there.
            name: {
                leaf: variable.get_value()
                for leaf, variable in vars(group).items()
                if isinstance(variable, nnx.Variable)
            }
            for name, group in groups.items()
            if group is not None
        }

    def _params_for(self, x: jax.Array) -> Mapping[str, Any]:
        if self.pending_key is None:
            return self.params
        shape = as_array("x", x, "[..., H] float32 or bfloat16").shape
        if not shape or shape[-1] == 0:
            raise ValueError(
                f"x: expected [..., H] with H > 0 to take the model width from, got shape {shape}"
            )
        _made_too_late(self.needs_model_dim.get_value())
        return self._init(_thaw_key(self.pending_key), shape[-1])

    def _keep(self, params: Mapping[str, Any]) -> None:
        if self.pending_key is None:
            return
        # As for aux. The seed is kept if they cannot be stored: those stored later will be equal.
        with contextlib.suppress(flax.errors.TraceContextError):
            self._store(params)
            self.pending_key = None
            del self.needs_model_dim

    def _init(self, key: jax.Array, model_dim: int) -> Mapping[str, Mapping[str, jax.Array]]:
        dtype, kernel_init = self.param_dtype, self.kernel_init
        return init(key, model_dim, self.config, param_dtype=dtype, kernel_init=kernel_init)

    def _store(self, params: Mapping[str, Mapping[str, jax.Array]]) -> None:
        for group, leaves in params.items():
            if not hasattr(self, group):
                setattr(self, group, nnx.Dict())
            for name, value in leaves.items():
                kind = RouterState if name in STATE_NAMES else nnx.Param
                getattr(self, group)[name] = kind(value)


@jax.custom_jvp
def _made_too_late(stand_in: jax.Array) -> jax.Array:
    """``stand_in``, with an error in words where the layer's gradient is asked for."""
    return stand_in


@_made_too_late.defjvp
def _refuse_gradient(primals, tangents):
    raise ValueError(
        "model_dim: expected H, because the layer's gradient or an optimiser over it needs "
        "parameters that exist; got None and a layer whose first call this is. Construct it with "
        "MoELayer(..., model_dim=H), or call it once before nnx.grad, jax.grad or nnx.Optimizer"
    )


def _freeze_key(key: jax.Array) -> tuple[str, tuple[int, ...]]:
    """A PRNG key as plain numbers, since ``jax.grad`` would refuse a layer that holds a key."""
    if isinstance(key, jax.core.Tracer) or key.shape:
        raise ValueError(
            "model_dim: expected H, because a layer constructed inside a transformation (nnx.jit, "
            "nnx.vmap, nnx.eval_shape) must make its parameters there; got None"
        )
    words = jax.random.key_data(key)
    return str(jax.random.key_impl(key)), tuple(int(word) for word in words)


def _thaw_key(frozen: tuple[str, tuple[int, ...]]) -> jax.Array:
    impl, words = frozen
    return jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl=impl)
