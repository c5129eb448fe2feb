"""The router: x to logits to experts as one differentiable step.

One step, so that the backward pass moves nothing between its parts in another form than they read:
the gradient of the logits leaves its kernel as the terms that the products multiply, and the
gradient that reaches x from the experts meets the router's here, where XLA may add it inside the
product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from dropless import _router_gemm as gemm
from dropless import _routing
from dropless._call import unify_axes
from dropless._config import MoEConfig
from dropless._routing import Routing


def route_tokens(
    x: jax.Array,
    router: dict[str, jax.Array],
    cfg: MoEConfig,
    *,
    mask: jax.Array | None,
    expert_ids: jax.Array | None,
    sampling_key: jax.Array | None,
) -> tuple[jax.Array, jax.Array, Routing]:
    """x as given, its logits [T, E] float32, and its ``Routing``.

    What else reads x should read the one returned: the gradient that comes back through it is then
    added to the router's in this backward pass.

    Args:
      x: [T, H] float32 or bfloat16, T > 0.
      router: ``params["router"]``.
      cfg: the layer.
      mask: [T] bool, or None.
      expert_ids, sampling_key: as in ``dropless.route``.
    """
    kernel, bias = router["kernel"], router.get("bias")
    selection_bias, expert_scale = router.get("selection_bias"), router.get("expert_scale")
    if cfg.router.sparse_mixer_eps is not None:
        logits = checkpoint_name(router_logits(x, kernel, bias, mask), "dropless_routing")
        routing = _routing.route(
            logits,
            cfg,
            mask=mask,
            expert_ids=expert_ids,
            sampling_key=sampling_key,
            selection_bias=selection_bias,
            expert_scale=expert_scale,
        )
        return x, logits, routing
    tokens, k = x.shape[0], cfg.experts_per_token
    _routing.check_rows(tokens, k)
    if selection_bias is not None:
        selection_bias = jax.lax.stop_gradient(selection_bias).astype(jnp.float32)
    static = (cfg.router, k, cfg.capacity(tokens))
    operands = unify_axes((x, kernel, bias, selection_bias, mask, expert_ids))
    try:
        x, logits, *outputs = _router_where_zero(static, *operands)
    except NotImplementedError:
        # jax.shard_map outside jit knows no cotangents that are zero by their form.
        x, logits, *outputs = _router(static, *operands)
    return x, logits, _routing.routing_of(outputs, expert_scale)


def router_logits(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, mask: jax.Array | None
) -> jax.Array:
    """x [T, H] times kernel [H, E] plus bias [E], in float32; gradients need ``mask`` [T]."""
    return _router_logits(*unify_axes((x, kernel, bias, mask)))


def _logits(x, kernel, bias, *, differentiated=False):
    logits = gemm.matmul(x, kernel.astype(jnp.float32), differentiated=differentiated)
    return logits if bias is None else logits + bias.astype(jnp.float32)[None]


@jax.custom_vjp
def _router_logits(x, kernel, bias, mask):
    del mask  # the gradient needs it
    return _logits(x, kernel, bias)


def _router_logits_fwd(x, kernel, bias, mask):
    # x is kept as given: a float32 copy of it would double the saved activations.
    return _logits(x, kernel, bias, differentiated=True), (x, kernel, bias, mask)


def _router_logits_bwd(residuals, d_logits):
    x, kernel, bias, mask = residuals

    def direct(d_logits, x, kernel):
        return _direct_gradients(d_logits, None, x, kernel, mask)

    def split(d_logits, x, kernel):
        return _split_gradients(gemm.split(d_logits, gemm.LEFT), None, x, kernel, mask)

    operands = d_logits, x, kernel.astype(jnp.float32)
    is_split = x.dtype == jnp.bfloat16
    d_x, d_kernel = gemm.on_gpu(split, direct, *operands) if is_split else direct(*operands)
    return d_x, d_kernel.astype(kernel.dtype), _bias_gradient(d_logits, bias), None


_router_logits.defvjp(_router_logits_fwd, _router_logits_bwd)


def _real(x, mask):
    """Padding tokens have no gradient, but 0 * NaN would be NaN."""
    return x if mask is None else jnp.where(mask[:, None], x, jnp.zeros((), x.dtype))


def _direct_gradients(d_logits, d_x, x, kernel, mask):
    """Those of x, ``d_x`` (None: 0) added, and of the kernel."""
    total = gemm.grad_x(d_logits, kernel, x.dtype)
    total = total if d_x is None else total + d_x
    return total, gemm.grad_kernel(_real(x, mask), d_logits)


def _split_gradients(d_logits, d_x, x, kernel, mask):
    """The same from the terms of ``d_logits``."""
    total = gemm.grad_x_split(d_logits, gemm.split(kernel, gemm.RIGHT), x.dtype)
    total = total if d_x is None else total + d_x
    return total, gemm.grad_kernel_split(_real(x, mask), d_logits)


def _bias_gradient(d_logits, bias):
    return None if bias is None else jnp.sum(d_logits, axis=0).astype(bias.dtype)


def _primal(static, x, kernel, bias, selection_bias, mask, expert_ids):
    operands = x, kernel, bias, selection_bias, mask, expert_ids
    return x, *_forward(static, *operands, differentiated=False)


_router = jax.custom_vjp(_primal, nondiff_argnums=(0,))
# The same, which need not read a cotangent to know that it is zero.
_router_where_zero = jax.custom_vjp(_primal, nondiff_argnums=(0,))


def _forward(static, x, kernel, bias, selection_bias, mask, expert_ids, *, differentiated):
    """The logits and the results of ``route``."""
    rest = selection_bias, None if mask is None else mask.astype(jnp.uint8), expert_ids

    def direct(x, kernel, bias, rest):
        logits = _logits(x, kernel, bias)
        return logits, *_routing.call_route(static, logits, *rest)

    def split(x, kernel, bias, rest):
        terms = gemm.split(kernel, gemm.RIGHT, pairs=differentiated)
        return _routing.call_route_of_terms(static, gemm.matmul_terms(x, terms), bias, *rest)

    bias = None if bias is None else bias.astype(jnp.float32)
    operands = x, kernel.astype(jnp.float32), bias, rest
    is_split = x.dtype == jnp.bfloat16
    return gemm.on_gpu(split, direct, *operands) if is_split else direct(*operands)


def _router_fwd(static, x, kernel, bias, selection_bias, mask, expert_ids):
    rest = selection_bias, mask, expert_ids
    results = _forward(static, x, kernel, bias, *rest, differentiated=True)
    logits, ids, *others = (checkpoint_name(r, "dropless_routing") for r in results)
    return (x, logits, ids, *others), (x, kernel, bias, mask, logits, ids)


def _router_bwd(static, residuals, cotangents):
    x, kernel, bias, mask, logits, ids = residuals
    d_x, d_logits, _, d_weights, d_prob_sum, d_sums, *_ = (
        None if isinstance(c, SymbolicZero) else c for c in cotangents
    )
    if d_weights is None:
        d_weights = jnp.zeros(ids.shape, jnp.float32)
    # A loss of the logits themselves has a gradient to add before they are split.
    fused = d_logits is None
    rest = d_logits, d_weights, d_prob_sum, d_sums

    def logits_gradient(logits, ids, rest):
        d_logits, *of_route = rest
        total = _routing.call_route_backward(static, logits, ids, *of_route)
        return total if d_logits is None else total + d_logits

    def direct(logits, ids, rest, d_x, x, kernel, mask):
        total = logits_gradient(logits, ids, rest)
        return *_direct_gradients(total, d_x, x, kernel, mask), _bias_gradient(total, bias)

    def split(logits, ids, rest, d_x, x, kernel, mask):
        if fused:
            total, *terms = _routing.call_route_backward_to_terms(
                static, logits, ids, *rest[1:], d_logits=bias is not None
            )
            terms = gemm.flat_terms(*terms)
        else:
            total = logits_gradient(logits, ids, rest)
            terms = gemm.split(total, gemm.LEFT)
        return *_split_gradients(terms, d_x, x, kernel, mask), _bias_gradient(total, bias)

    operands = logits, ids, rest, d_x, x, kernel.astype(jnp.float32), mask
    is_split = x.dtype == jnp.bfloat16
    d_x, d_kernel, d_bias = gemm.on_gpu(split, direct, *operands) if is_split else direct(*operands)
    return d_x, d_kernel.astype(kernel.dtype), d_bias, None, None, None


def _router_fwd_where_zero(static, *operands):
    return _router_fwd(static, *(None if o is None else o.value for o in operands))


_router.defvjp(_router_fwd, _router_bwd)
_router_where_zero.defvjp(_router_fwd_where_zero, _router_bwd, symbolic_zeros=True)
