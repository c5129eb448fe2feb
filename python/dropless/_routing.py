"""From router logits to experts, weights, and the place of every routed row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dropless._call import call, unify_axes
from dropless._checks import MAX_EXPERTS, as_array, check_integer, check_key
from dropless._config import SCORES, MoEConfig, RouterConfig, check_config
from dropless._params import check_float_dtype
from dropless._sparse_mixer import draws, sparse_mixer

# Row and slot numbers are int32.
_MAX_ROWS = 2**31 - 1

# As a token's first given expert: it routes freely (kRouteFreely in include/dropless/route.h).
ROUTE_FREELY = -2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Where each routed row lives.

    A *slot* is t * K + k, the k-th choice of token t. A *row* is a position in expert order: rows
    of an expert are contiguous and ordered by slot, hence by token. -1 in either map means "none".

    Attributes:
      counts: [E] int32, assignments per expert, before any capacity limit.
      offsets: [E+1] int32, expert e owns the rows ``offsets[e]`` to ``offsets[e+1]``.
      slot_of_row: [M] int32, M = T * K; -1 in rows at or past ``offsets[E]``.
      row_of_slot: [T, K] int32; -1 where the slot has no row (a padding token, or dropped).
    """

    counts: jax.Array
    offsets: jax.Array
    slot_of_row: jax.Array
    row_of_slot: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing(Plan):
    """What the router decided for T tokens, with the sums that balance losses need.

    ``weights``, ``prob_sum``, ``lse_square_sum`` and ``entropy_sum`` carry gradients to the logits.
    Sums run over real (unmasked) tokens, so adding those of several devices gives global ones.

    Attributes:
      ids: [T, K] int32, K distinct experts a token, best first: larger ranked values first, equal
        ones lowest index first, NaN after everything; -1 for padding.
      weights: [T, K] float32; 0 for padding.
      prob_sum: [E] float32, sum over tokens of softmax(logits), or of the sigmoid or sqrt-softplus
        scores divided by their sum over the experts (DeepSeek-V3, arXiv 2412.19437, eq. 17-20).
      lse_square_sum: scalar float32, sum over tokens of logsumexp(logits)^2.
      entropy_sum: scalar float32, sum over tokens of the entropy, in nats, of what prob_sum sums.
      tokens: scalar int32, real tokens.
      nonfinite_logits: scalar int32, NaN or infinite logits of real tokens.
    """

    ids: jax.Array
    weights: jax.Array
    prob_sum: jax.Array
    # As the engine returns them: scalars of their own would cost a copy each, read or not.
    _sums: jax.Array  # [2] float32
    _counters: jax.Array  # [2] int32

    @property
    def lse_square_sum(self) -> jax.Array:
        return self._sums[..., 0]  # with the axes of vmap in front

    @property
    def entropy_sum(self) -> jax.Array:
        return self._sums[..., 1]

    @property
    def tokens(self) -> jax.Array:
        return self._counters[..., 0]

    @property
    def nonfinite_logits(self) -> jax.Array:
        return self._counters[..., 1]


def check_rows(tokens: int, experts_per_token: int) -> None:
    if not isinstance(tokens, int):
        raise ValueError(
            f"the number of tokens must be known when the function is traced; got the symbolic "
            f"dimension {tokens}. Export the layer once for each size."
        )
    if tokens * experts_per_token > _MAX_ROWS:
        raise ValueError(
            f"tokens * experts_per_token must be below 2**31 on one device; got {tokens} * "
            f"{experts_per_token}. Split the batch, or shard it over more devices."
        )


def check_mask_dtype(mask: jax.Array) -> None:
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.integer):
        raise TypeError(f"mask must be bool or integer, false at padding; got {mask.dtype.name}.")


def route(
    logits: jax.Array,
    cfg: MoEConfig,
    *,
    selection_bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    expert_ids: jax.Array | None = None,
    expert_scale: jax.Array | None = None,
    sampling_key: jax.Array | None = None,
) -> Routing:
    """Chooses K experts for each token; all arithmetic is float32.

    Args:
      logits: [T, E] float32 or bfloat16.
      cfg: E, K, the router's options and the capacity limit, if any.
      selection_bias: [E] float32, added for selection only. Required with
        ``cfg.router.selection_bias``, refused without.
      mask: [T] bool or integer, false (0) for padding, which gets ids -1 and weights 0 and enters
        no sum and no count. None: every token is real.
      expert_ids: [T, K] integer, experts that are given instead of chosen: the weights are those of
        their logits, with gradients. -2 as a token's first id lets it route freely; -1, what is no
        expert, and what repeats an id of its token leave their slot empty.
      expert_scale: [E], multiplies the weights of each expert. Required with
        ``cfg.router.expert_scale``, refused without.
      sampling_key: a PRNG key, with ``RouterConfig.sparse_mixer_eps`` alone: experts are drawn, and
        the weights carry SparseMixer's estimate of the gradient. None: as outside training.

    Returns:
      A ``Routing``, differentiable in reverse mode with respect to ``logits`` and
      ``expert_scale``.

    Raises:
      ValueError, TypeError: a shape or dtype is not what is listed above.
    """
    check_config(cfg)
    logits = as_array("logits", logits, "[T, E] float32 or bfloat16")
    mask, selection_bias, expert_ids, expert_scale = (
        a if a is None else as_array(name, a, expected)
        for name, a, expected in (
            ("mask", mask, "[T] of bool or integers"),
            ("selection_bias", selection_bias, "[E] float32"),
            ("expert_ids", expert_ids, "[T, K] of integers"),
            ("expert_scale", expert_scale, "[E] float32 or bfloat16"),
        )
    )
    if sampling_key is not None:
        check_key("sampling_key", sampling_key)
    e, k = cfg.num_experts, cfg.experts_per_token
    if logits.ndim != 2 or logits.shape[1] != e:
        raise ValueError(
            f"logits must have shape [T, E] with E = num_experts = {e}; got {logits.shape}."
        )
    check_float_dtype("logits", logits.dtype)
    _check_vector("selection_bias", selection_bias, cfg.router.selection_bias, e)
    _check_vector("expert_scale", expert_scale, cfg.router.expert_scale, e)
    t = logits.shape[0]
    check_rows(t, k)
    if mask is not None:
        if mask.shape != (t,):
            raise ValueError(f"mask must have shape [T] = ({t},); got {mask.shape}.")
        check_mask_dtype(mask)
        mask = mask.astype(bool).astype(jnp.uint8)
    if selection_bias is not None:
        selection_bias = jax.lax.stop_gradient(selection_bias).astype(jnp.float32)
    if expert_ids is not None:
        if expert_ids.shape != (t, k) or not jnp.issubdtype(expert_ids.dtype, jnp.integer):
            raise ValueError(
                f"expert_ids must be integers of shape [T, K] = ({t}, {k}); got "
                f"{expert_ids.dtype.name}{list(expert_ids.shape)}."
            )
        expert_ids = expert_ids.astype(jnp.int32)
    if t == 0:
        return _route_nothing(e, k)
    mixed = None
    if cfg.router.sparse_mixer_eps is not None:
        if expert_ids is not None:
            raise ValueError("expert_ids must be None with RouterConfig.sparse_mixer_eps.")
        # Padding may be NaN, which a weight of 0 would not keep from the gradient.
        real = logits if mask is None else jnp.where(mask[:, None] != 0, logits, 0)
        drawn = None if sampling_key is None else draws(sampling_key, t, e)
        expert_ids, mixed = sparse_mixer(
            real.astype(jnp.float32), cfg.router.sparse_mixer_eps, drawn
        )
    elif sampling_key is not None:
        raise ValueError("sampling_key must be None without RouterConfig.sparse_mixer_eps.")
    operands = unify_axes((logits, selection_bias, mask, expert_ids))
    ids, weights, *rest = _route((cfg.router, k, cfg.capacity(t)), *operands)
    if mixed is not None:
        weights = jnp.where(ids < 0, 0.0, mixed)
    return routing_of((ids, weights, *rest), expert_scale)


def routing_of(outputs: Sequence[jax.Array], expert_scale: jax.Array | None) -> Routing:
    """From the results of the operation ``route``."""
    ids, weights, prob_sum, sums, counters, *places = outputs
    if expert_scale is not None:
        weights = _scale_by_expert(*unify_axes((weights, expert_scale)), ids)
    return Routing(*places, ids, weights, prob_sum, sums, counters)


def _check_vector(name: str, value: jax.Array | None, wanted: bool, e: int) -> None:
    if (value is not None) != wanted:
        raise ValueError(
            f"{name} must be given exactly if RouterConfig.{name} is True; got "
            f"{'an array' if value is not None else 'None'} and RouterConfig.{name}={wanted}."
        )
    if value is not None and value.shape != (e,):
        raise ValueError(f"{name} must have shape ({e},); got {value.shape}.")


def _route_nothing(e: int, k: int) -> Routing:
    def zeros(*shape, dtype=jnp.int32):
        return jnp.zeros(shape, dtype)

    f32 = jnp.float32
    return Routing(
        counts=zeros(e), offsets=zeros(e + 1), slot_of_row=zeros(0), row_of_slot=zeros(0, k),
        ids=zeros(0, k), weights=zeros(0, k, dtype=f32), prob_sum=zeros(e, dtype=f32),
        _sums=zeros(2, dtype=f32), _counters=zeros(2),
    )  # fmt: skip


@jax.custom_vjp
def _scale_by_expert(weights, scale, ids):
    """weights [T, K] times scale [E] of each slot's expert; slots without one keep their 0."""
    return jnp.where(ids < 0, 0.0, weights * scale.astype(jnp.float32)[jnp.maximum(ids, 0)])


def _scale_by_expert_fwd(weights, scale, ids):
    return _scale_by_expert(weights, scale, ids), (weights, scale, ids)


def _scale_by_expert_bwd(residuals, d_scaled):
    weights, scale, ids = residuals
    # Each expert's slots are added in their order: the scatter-add that autodiff would make is not
    # deterministic on a GPU.
    places = plan(ids, scale.shape[0])
    (d_scale,) = call(
        "group_sum",
        [((scale.shape[0], 1, 1), jnp.float32)],
        [(d_scaled * weights).reshape(-1, 1, 1), places.slot_of_row, None, places.offsets],
        gather=1,
        experts_per_token=1,
    )
    d_weights = _scale_by_expert(d_scaled, scale, ids)
    return d_weights, d_scale[:, 0, 0].astype(scale.dtype), None


_scale_by_expert.defvjp(_scale_by_expert_fwd, _scale_by_expert_bwd)


def _weight_attributes(router: RouterConfig) -> dict[str, Any]:
    return {
        "score": SCORES.index(router.score),
        "score_before_topk": router.score_before_topk,
        "renormalize": router.renormalize,
        "renormalize_eps": router.renormalize_eps,
        "renormalize_clamp": router.renormalize_clamp,
        "scale": router.scale,
    }


def _attributes(router: RouterConfig) -> dict[str, Any]:
    return {
        **_weight_attributes(router),
        "num_groups": router.num_groups,
        "groups_kept": router.groups_kept,
        "group_score_experts": router.group_score_experts,
        "group_mask_zero": router.group_mask == "zero",
    }


# What is static about a routing: the router's options, K, and the capacity limit or 0.
Static = tuple[RouterConfig, int, int]


def call_route(static: Static, logits, selection_bias, mask, expert_ids) -> tuple[jax.Array, ...]:
    """The operation; ``mask`` is uint8."""
    operands = [logits, selection_bias, mask, expert_ids]
    return _call_route("route", static, logits.shape, [], operands)


def call_route_of_terms(static: Static, terms, bias, *rest) -> tuple[jax.Array, ...]:
    """The logits, then as ``call_route`` of them: the sums of terms [T, 3E], plus bias [E]."""
    t, e = terms.shape[0], terms.shape[1] // 3
    operands = [terms.reshape(t, 3, e), bias, *rest]
    return _call_route("route_of_terms", static, (t, e), [((t, e), jnp.float32)], operands)


def _call_route(op: str, static: Static, shape, first, operands) -> tuple[Any, ...]:
    """``shape``: of the logits; ``first``: the results before those of ``route``."""
    router, k, capacity = static
    t, e = shape
    i32, f32 = jnp.int32, jnp.float32
    results = [
        *first,
        ((t, k), i32), ((t, k), f32), ((e,), f32), ((2,), f32), ((2,), i32),
        ((e,), i32), ((e + 1,), i32), ((t * k,), i32), ((t, k), i32),
    ]  # fmt: skip
    attributes = _attributes(router)
    return tuple(call(op, results, operands, workspace=(t, e), capacity=capacity, **attributes))


def call_route_backward(static: Static, logits, ids, d_weights, d_prob_sum, d_sums) -> jax.Array:
    """The gradient [T, E] in float32; ``d_prob_sum`` and ``d_sums`` may be None: 0."""
    t, e = logits.shape
    d_prob_sum = jnp.zeros((e,), jnp.float32) if d_prob_sum is None else d_prob_sum
    d_sums = jnp.zeros((2,), jnp.float32) if d_sums is None else d_sums
    operands = [logits, ids, d_weights, d_prob_sum, d_sums]
    attributes = _weight_attributes(static[0])
    return call("route_backward", [((t, e), jnp.float32)], operands, **attributes)[0]


def call_route_backward_to_terms(
    static: Static, logits, ids, d_weights, d_prob_sum, d_sums, *, d_logits: bool
) -> list[Any]:
    """The same as the left factor of ``_router_gemm``'s products, [T, 3, E] and [T, 6, E].

    Before them the gradient in float32, None unless ``d_logits`` asks for it.
    """
    t, e = logits.shape
    results = [
        ((t, e), jnp.float32) if d_logits else None,
        ((t, 3, e), jnp.bfloat16),
        ((t, 6, e), jnp.bfloat16),
    ]
    operands = [logits, ids, d_weights, d_prob_sum, d_sums]
    attributes = _weight_attributes(static[0])
    return call("route_backward_to_terms", results, operands, **attributes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _route(static, logits, selection_bias, mask, expert_ids):
    return call_route(static, logits, selection_bias, mask, expert_ids)


def _route_fwd(static, logits, selection_bias, mask, expert_ids):
    outputs = _route(static, logits, selection_bias, mask, expert_ids)
    outputs = tuple(checkpoint_name(o, "dropless_routing") for o in outputs)
    return outputs, (logits, outputs[0])


def _route_bwd(static, residuals, cotangents):
    logits, ids = residuals
    _, d_weights, d_prob_sum, d_sums, *_ = cotangents
    d_logits = call_route_backward(static, logits, ids, d_weights, d_prob_sum, d_sums)
    return d_logits.astype(logits.dtype), None, None, None


_route.defvjp(_route_fwd, _route_bwd)


def plan(ids: jax.Array, num_experts: int, *, capacity: int = 0) -> Plan:
    """Sorts chosen experts into contiguous rows, deterministically.

    Args:
      ids: [T, K] int32; ids outside [0, num_experts) take no row.
      num_experts: E.
      capacity: if positive, an expert keeps its first ``capacity`` slots and drops the rest.

    Returns:
      A ``Plan``.
    """
    ids = as_array("ids", ids, "[T, K] int32")
    if ids.ndim != 2 or ids.dtype != jnp.int32:
        raise ValueError(f"ids must be [T, K] int32; got {ids.dtype.name}{list(ids.shape)}.")
    check_integer("num_experts", num_experts, 1, MAX_EXPERTS)
    check_integer("capacity", capacity, 0, None)
    t, k = ids.shape
    check_rows(t, k)
    i32 = jnp.int32
    # Inside a gradient the ids of ``route`` come with tangents of dtype float0; those of an
    # integer operation's results are nothing at all.
    ids = ids | 0
    if ids.size == 0:
        zeros = jnp.zeros((num_experts + 1,), i32)
        return Plan(zeros[1:], zeros, jnp.zeros((0,), i32), jnp.zeros((t, k), i32))
    results = [
        ((num_experts,), i32), ((num_experts + 1,), i32), ((t * k,), i32), ((t, k), i32),
    ]  # fmt: skip
    capacity = min(capacity, ids.size)  # which fits the kernels' integer and changes nothing
    return Plan(*call("plan", results, [ids], workspace=(t, num_experts), capacity=capacity))
