"""The layer as a pure function."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dropless import _balance, _routing
from dropless._checks import as_array, check_key
from dropless._config import MoEConfig, check_config, device_in_use
from dropless._experts import Spec, experts
from dropless._params import (
    Params,
    PreparedExperts,
    check_float_dtype,
    check_params,
    check_prepared,
)
from dropless._precision import LayerSizes, choose_precision
from dropless._router import route_tokens, router_logits
from dropless._routing import Routing
from dropless._sharding import bound_axis_names, sharded, token_sharding
from dropless._shared import shared_expert
from dropless._weighted_input import experts_of_weighted_input


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEAux:
    """What a layer tells about one call. Padding tokens count nowhere; under a mesh all is global.

    The losses carry gradients and are returned unweighted: add ``coefficient * loss`` to yours.

    Attributes:
      expert_counts: [E] int32, assignments per expert, before any capacity limit. Their sum is K
        times the number of real tokens.
      load_balance_loss: scalar float32, E * sum over e of f_e * P_e (Switch Transformer, arXiv
        2101.03961, eq. 4), f_e = expert_counts / (K * tokens), P_e the mean routing probability: 1
        under uniform routing whatever E and K, up to E if all goes to one expert. The gradient
        flows through P_e. With ``RouterConfig.balance_loss="sequence"``, the mean over the
        sequences that have a real token of this loss of each sequence.
      z_loss: scalar float32, mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq.
        5).
      router_entropy: scalar float32, mean over tokens of the entropy of the routing probabilities,
        in nats: 0 to log(E).
      dropped_tokens: scalar int32, assignments dropped; always 0 unless ``overflow="drop"``.
      rounds: scalar int32, exchanges that were needed until every row was served.
      nonfinite_logits: scalar int32, router logits that are NaN or infinite.
      prob_sum: [E] float32, sum over tokens of the routing probabilities; carries gradients. With
        the counts and ``tokens`` it makes losses over more than one call: ``load_balance_loss``.
      tokens: scalar int32, real tokens.
    """

    expert_counts: jax.Array
    load_balance_loss: jax.Array
    z_loss: jax.Array
    router_entropy: jax.Array
    dropped_tokens: jax.Array
    rounds: jax.Array
    nonfinite_logits: jax.Array
    prob_sum: jax.Array
    tokens: jax.Array

    @classmethod
    def zeros(cls, num_experts: int) -> MoEAux:
        """What a call with no tokens returns."""
        i32, f32 = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        counts, sums = (jnp.zeros((num_experts,), dtype) for dtype in (jnp.int32, jnp.float32))
        return cls(counts, f32, f32, f32, i32, i32, i32, sums, i32)


def _aux(routing: Routing, balance_loss: jax.Array | None, axes: tuple[str, ...]) -> MoEAux:
    """``balance_loss`` is that of the batch if None."""
    dropped = jnp.sum(routing.counts, dtype=jnp.int32) - routing.offsets[-1]
    sums = (
        routing.counts, routing.prob_sum, routing.lse_square_sum, routing.entropy_sum,
        routing.tokens, routing.nonfinite_logits, dropped,
    )  # fmt: skip
    if axes:
        sums = jax.lax.psum(sums, axes)
    counts, prob_sum, lse_square_sum, entropy_sum, tokens, nonfinite, dropped = sums
    if balance_loss is None:
        k = routing.ids.shape[1]
        balance_loss = _balance.load_balance_loss(counts, prob_sum, tokens, k)
    return MoEAux(
        expert_counts=counts,
        load_balance_loss=balance_loss,
        z_loss=_balance.mean_over_tokens(lse_square_sum, tokens),
        router_entropy=_balance.mean_over_tokens(entropy_sum, tokens),
        dropped_tokens=dropped,
        rounds=jnp.ones((), jnp.int32),
        nonfinite_logits=nonfinite,
        prob_sum=prob_sum,
        tokens=tokens,
    )


def _check_input(x: Any, mask: Any, expert_ids: Any, token_ids: Any, cfg: Any) -> None:
    check_config(cfg)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"x must have shape [..., H] with H >= 1; got {x.shape}.")
    check_float_dtype("x", x.dtype)
    if cfg.router.balance_loss == "sequence" and x.ndim < 2:
        raise ValueError(
            f'RouterConfig.balance_loss="sequence" needs x [..., S, H], S the tokens of a '
            f"sequence; got {x.shape}."
        )
    if (token_ids is not None) != (cfg.router.expert_table is not None):
        raise ValueError(
            f"token_ids must be given exactly if RouterConfig.expert_table is; got "
            f"{'None' if token_ids is None else 'an array'} and "
            f"RouterConfig.expert_table={cfg.router.expert_table}."
        )
    if expert_ids is not None and token_ids is not None:
        raise ValueError("expert_ids and token_ids both say which experts to use; give one.")
    lead = x.shape[:-1]
    for name, array, shape, what in (
        ("expert_ids", expert_ids, (*lead, cfg.experts_per_token), "and K last"),
        ("token_ids", token_ids, lead, "without the last axis"),
    ):
        if array is None:
            continue
        if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(
                f"{name} must be integers of x's shape {what}, {shape}; got {array.dtype.name}"
                f"{list(array.shape)}."
            )
    if mask is None:
        return
    if mask.shape != lead:
        raise ValueError(
            f"mask must have x's shape without the last axis, {x.shape[:-1]}; got {mask.shape}."
        )
    _routing.check_mask_dtype(mask)


def moe(
    x: jax.Array,
    params: Params,
    cfg: MoEConfig,
    *,
    mask: jax.Array | None = None,
    expert_ids: jax.Array | None = None,
    token_ids: jax.Array | None = None,
    jitter_key: jax.Array | None = None,
    prepared: PreparedExperts | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    token_axes: str | Sequence[str] = ("data",),
    expert_axis: str | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> tuple[jax.Array, MoEAux]:
    """Routes every token to K of E experts and sums their weighted outputs; drops no token.

    y = sum over the chosen experts e of p_e * down_e(act(gate_e(x)) * up_e(x)), plus the output of
    the shared expert if there is one. Pure: it works
    under jit, grad, vmap, scan, checkpoint and shard_map. Reverse mode only, and once: forward-mode
    differentiation (``jax.jvp``, ``jax.jacfwd``, ``jax.hessian``) raises JAX's ``TypeError`` about
    ``custom_vjp``, a second gradient ``NotImplementedError``. Shapes are numbers: ``jax.export`` of
    the layer takes no symbolic dimension of x.

    Args:
      x: [..., H] float32 or bfloat16.
      params: as ``dropless.init`` makes them; float32 or bfloat16. Each gradient has its
        parameter's dtype.
      cfg: the layer.
      mask: [...] bool or integer, false (0) at padding tokens: their y and gradients are 0 and they
        change nothing else.
      expert_ids: [..., K] integer, experts that are given instead of chosen, to replay decisions:
        see ``route``. -2 as a token's first id lets it route freely, -1 leaves a slot empty.
      token_ids: [...] integer, each token's row of ``params["router"]["expert_table"]``, which
        gives its experts. Required with ``RouterConfig.expert_table``, refused without. A number
        outside the table makes its token padding.
      jitter_key: a PRNG key: x is multiplied by the noise that ``RouterConfig.jitter`` describes,
        and ``RouterConfig.sparse_mixer_eps`` draws experts as in Phi-3.5-MoE's training. Every
        device draws its own. None: nothing is random, as in evaluation.
      prepared: ``prepare_experts(params, cfg)``, to reuse over several calls of one optimiser step.
      mesh: default: the ambient one, or that of x's type. Under Explicit axes x's type says how
        tokens are split, under Auto axes ``token_axes`` does. Experts are replicated.
        An array that was taken off an Auto mesh keeps it in its type: under jit, give a mesh of its
        one device.
      token_axes: Auto mesh axes that split x along its first axis. Unknown names are ignored if
        ``mesh`` is not given.
      expert_axis: a mesh axis to shard experts over; only axes of size 1 are supported yet.
      axis_name: inside your own ``shard_map``, the axes that tokens are split over: ``aux`` is then
        summed over them.

    Returns:
      y, like x in shape and dtype, and a ``MoEAux``.

    Raises:
      ValueError, TypeError: an argument is not what is listed above; raised when traced.
      NotImplementedError: ``expert_axis`` has more than one device.
    """
    x = as_array("x", x, "[..., H] float32 or bfloat16")
    mask, expert_ids, token_ids = (
        a if a is None else as_array(name, a, expected)
        for name, a, expected in (
            ("mask", mask, "[...] of bool or integers"),
            ("expert_ids", expert_ids, "[..., K] of integers"),
            ("token_ids", token_ids, "[...] of integers"),
        )
    )
    if jitter_key is not None:
        check_key("jitter_key", jitter_key)
    _check_input(x, mask, expert_ids, token_ids, cfg)
    expert_dim = check_params(params, cfg, x.shape[-1])
    device = device_in_use(x, mesh)
    axes = bound_axis_names("axis_name", axis_name)
    sharding = token_sharding(x, mesh, token_axes, expert_axis, cfg.strict)
    if prepared is not None and cfg.precision == "auto":
        precision = getattr(prepared, "precision", None)
    else:
        tokens = math.prod(x.shape[:-1]) // (1 if sharding is None else sharding.parts)
        param_bytes = params["experts"]["gate"].dtype.itemsize
        sizes = LayerSizes(tokens, x.shape[-1], expert_dim, param_bytes)
        precision = choose_precision(cfg, x.dtype, device, sizes).precision
    if prepared is not None:
        check_prepared(prepared, params, cfg, precision)
    spec = Spec.of(cfg, precision, device.platform)
    if x.size == 0:
        return jnp.zeros_like(x), MoEAux.zeros(cfg.num_experts)
    axes += sharding.axes if sharding is not None else ()

    per_token = {"mask": mask, "expert_ids": expert_ids, "token_ids": token_ids}
    sequence_axes = () if sharding is None else sharding.axes_of(-2)

    def on_device(x, per_token, replicated):
        params, prepared, jitter_key = replicated
        if jitter_key is not None:
            for axis in axes:
                jitter_key = jax.random.fold_in(jitter_key, jax.lax.axis_index(axis))
            if cfg.router.jitter > 0:
                x = _jittered(x, jitter_key, cfg.router.jitter)
            mixed = cfg.router.sparse_mixer_eps is not None
            sampling_key = jax.random.fold_in(jitter_key, 1) if mixed else None
        else:
            sampling_key = None
        per_device = {**per_token, "sampling_key": sampling_key}
        return _moe(x, per_device, params, prepared, cfg, spec, axes, sequence_axes)

    replicated = (params, prepared, jitter_key)
    if sharding is None:
        return on_device(x, per_token, replicated)
    return sharded(on_device, sharding, cfg.strict, x, per_token, replicated)


def _jittered(x, key, jitter):
    """x times uniform noise from 1 - jitter to 1 + jitter, rounded once to x's dtype."""
    noise = jax.random.uniform(key, x.shape, jnp.float32, 1 - jitter, 1 + jitter)
    return (x.astype(jnp.float32) * noise).astype(x.dtype)


def _moe(x, per_token, params, prepared, cfg, spec, axes, sequence_axes):
    """``moe`` on one device's tokens; ``sequence_axes`` are the ``axes`` that cut sequences."""
    tokens = checkpoint_name(x.reshape(-1, x.shape[-1]), "dropless_x")
    mask, expert_ids, token_ids = (per_token[n] for n in ("mask", "expert_ids", "token_ids"))
    if mask is not None:
        mask = mask.reshape(-1).astype(bool)
    router = params["router"]
    if token_ids is not None:
        # Outside the table there is no expert.
        rows = router["expert_table"].at[token_ids.reshape(-1)].get(mode="fill", fill_value=-1)
        expert_ids = jax.lax.stop_gradient(rows).astype(jnp.int32)
    if expert_ids is not None:
        expert_ids = expert_ids.reshape(-1, cfg.experts_per_token).astype(jnp.int32)
        is_expert = (expert_ids >= 0) & (expert_ids < cfg.num_experts)
        real = is_expert.any(axis=1) | (expert_ids[:, 0] == _routing.ROUTE_FREELY)
        mask = real if mask is None else mask & real
    with jax.named_scope("dropless_router"):
        tokens, logits, routing = route_tokens(
            tokens,
            router,
            cfg,
            mask=mask,
            expert_ids=expert_ids,
            sampling_key=per_token["sampling_key"],
        )
        balance_loss = None
        if cfg.router.balance_loss == "sequence":
            balance_loss = _balance.sequence_balance_loss(
                logits, routing.ids, x.shape[-2], cfg.router.score, axes, sequence_axes
            )
    weighted_input = cfg.router.weight_on == "input"
    run = experts_of_weighted_input if weighted_input else experts
    y = run(spec, tokens, routing.weights, dict(params["experts"]), prepared, routing)
    if "shared" in params:
        with jax.named_scope("dropless_shared"):
            shared, output_gate = params["shared"], params["shared"].get("output_gate")
            gate_logits = None
            if output_gate is not None:
                gate_logits = router_logits(tokens, output_gate, None, mask)
            shared_prepared = None if prepared is None else prepared.shared
            y += shared_expert(spec, tokens, gate_logits, mask, shared, shared_prepared)
    return y.reshape(x.shape), _aux(routing, balance_loss, axes)
