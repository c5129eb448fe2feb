"""The experts' forward and backward as one ``custom_vjp``.

Forward: expert_up, grouped_gemm, combine. Kept for the backward pass: x as given, the
pre-activations h and the routing; never gathered x, the activations A, or the experts' outputs.
Each gradient is a call of its own, so one that nobody uses is removed by the compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dropless import _experts_fp8 as fp8
from dropless._activation import ACTIVATIONS, Activation
from dropless._call import call, unify_axes
from dropless._config import MoEConfig
from dropless._params import PreparedExperts, PreparedWeight, prepare
from dropless._pieces import combine
from dropless._routing import Plan


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static about the experts: the config with its precision resolved.

    ``gpu``: whether they will most likely run on one, whose kernels cover less of FP8 than a CPU's.
    """

    precision: str
    activation: Activation
    wgrad_fp8: bool
    h_fp8: bool
    scale_rounding: str
    gpu: bool = False
    num_sms: int = 0  # all

    @classmethod
    def of(cls, cfg: MoEConfig, precision: str, platform: str = "cpu") -> Spec:
        return cls(
            precision=precision,
            activation=cfg.glu,
            wgrad_fp8=precision == "fp8" and cfg.wgrad_precision == "fp8",
            h_fp8=cfg.save_h == "fp8" and precision != "f32",
            scale_rounding=cfg.scale_rounding,
            gpu=platform != "cpu",
            num_sms=cfg.num_sms or 0,
        )

    @property
    def in_steps(self) -> bool:
        """Whether FP8 products and what stands between them are calls of their own."""
        return self.fp8 and self.gpu and not fp8.has_fused_kernels(self.activation)

    def columns_at_once(self, biases: bool) -> bool:
        """Whether the weight gradients' operands are quantised where they are made.

        Biases' gradients are sums of dh in bfloat16, which then does not exist.
        """
        fused = self.wgrad_fp8 and self.gpu and not self.in_steps and self.activation.gated
        return fused and not biases

    @property
    def pow2(self) -> bool:
        return self.scale_rounding == "pow2"

    @property
    def fp8(self) -> bool:
        return self.precision == "fp8"

    @property
    def wide(self) -> Any:
        """Dtype of what the GEMMs write, and of the weight gradients' operands."""
        return jnp.float32 if self.precision == "f32" else jnp.bfloat16

    @property
    def attributes(self) -> dict[str, float]:
        a = self.activation
        return {
            "scale_rounding": self.pow2,
            "activation": ACTIVATIONS.index(a.kind),
            "gated": a.gated,
            "activation_slope": a.slope,
            "gate_limit": math.inf if a.gate_limit is None else a.gate_limit,
            "up_limit": math.inf if a.up_limit is None else a.up_limit,
            "up_offset": a.up_offset,
        }


def experts(
    spec: Spec,
    x: jax.Array,
    weights: jax.Array,
    params: dict[str, jax.Array],
    prepared: PreparedExperts | None,
    plan: Plan,
) -> jax.Array:
    """y[t] = sum over k of weights[t, k] * expert_{ids[t, k]}(x[t]).

    Args:
      spec: static choices.
      x: [T, H] float32 or bfloat16, T > 0.
      weights: [T, K] float32.
      params: ``gate``, ``up`` if gated, ``down`` and maybe their biases, as in ``dropless.init``.
      prepared: what the GEMMs read instead of ``params``, in ``spec.precision``; or None.
      plan: the rows' places.

    Returns:
      [T, H] in x's dtype.
    """
    maps = (plan.offsets, plan.slot_of_row, plan.row_of_slot)
    return _experts(spec, *unify_axes((x, weights, params, prepared, maps)))


def _rows_operand(spec: Spec, rows: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """[R, C] as a GEMM reads it, and its scales in FP8."""
    if not spec.fp8:
        return rows.astype(spec.wide), None
    q, scale = fp8.quantize_rows(rows, spec.pow2)
    return fp8.pad(q, 1), scale


def _weight_operand(spec: Spec, q: Any, scale: Any) -> tuple[Any, Any]:
    """[E, in, out] as a GEMM reads it, and its scales in FP8."""
    return (fp8.pad(q, 1, 2), scale) if spec.fp8 else (q, None)


def wgrad_workspaces(
    spec: Spec, m: int, h: int, i: int, e: int, columns: bool
) -> tuple[tuple[int, ...], ...]:
    """What sizes the workspaces of the gradients of gate and up (which gathers x), and of down.

    ``columns``: dh and p * A come quantised.
    """
    fp8, size = 2 if columns else int(spec.wgrad_fp8), jnp.dtype(spec.wide).itemsize
    return (m, h, spec.activation.parts, i, e, 1, fp8, size), (m, i, 1, h, e, 2, fp8, size)


def _biases(spec: Spec, params: dict[str, jax.Array], *names: str) -> list[jax.Array | None]:
    found = [params[n].astype(jnp.float32) if n in params else None for n in names]
    return [fp8.pad(bias, 1) for bias in found] if spec.fp8 else found


def _forward(spec, x, weights, params, prepared, maps, *, keep_h):
    """y, and (h, h_scale), which are None unless ``keep_h``."""
    offsets, slot_of_row, row_of_slot = maps
    m, h_width = slot_of_row.shape[0], x.shape[1]
    prepared = prepared or prepare(params, spec.precision, spec.scale_rounding)
    # FP8 products read weights with the contraction innermost; bfloat16 ones take either.
    gate, up, down = (
        _weight_operand(spec, *((None, None) if w is None else _inward(spec, w)))
        for w in (prepared.gate, prepared.up, prepared.down)
    )
    with jax.named_scope("dropless_up"):
        h, h_scale, a, a_scale = _up(
            spec,
            _rows_operand(spec, x),
            (gate, up),
            _biases(spec, params, "gate_bias", "up_bias"),
            maps,
            keep_h=keep_h,
        )
    with jax.named_scope("dropless_down"):
        (rows,) = call(
            "grouped_gemm",
            [((m, down[0].shape[1 if spec.fp8 else 2]), spec.wide)],
            [a, a_scale, *down, *_biases(spec, params, "down_bias"), offsets],
            rhs_transposed=spec.fp8,
            num_sms=spec.num_sms,
        )
    with jax.named_scope("dropless_combine"):
        y = combine(rows[:, :h_width], row_of_slot, weights, x.dtype)
    if keep_h:
        h = h[..., : params["gate"].shape[2]]
    return y, (h, h_scale)


def _inward(spec: Spec, w: PreparedWeight) -> tuple[Any, Any]:
    return (w.q_t, w.scale_t) if spec.fp8 else (w.q, None)


def _up(spec, x, weights, biases, maps, *, keep_h):
    """h and its scales (None if not kept, or not float8), A and its scales (None if not FP8).

    ``x``, ``weights``: pairs of operand and scales.
    """
    offsets, slot_of_row, row_of_slot = maps
    m, (gate, up), parts = slot_of_row.shape[0], weights, spec.activation.parts
    i = gate[0].shape[1 if spec.fp8 else 2]
    if spec.in_steps:
        return fp8.expert_up(
            spec.activation,
            x,
            weights[:parts],
            biases[:parts],
            offsets,
            slot_of_row,
            experts_per_token=row_of_slot.shape[1],
            pow2=spec.pow2,
            h_dtype=fp8.F8 if spec.h_fp8 else spec.wide,
            num_sms=spec.num_sms,
        )
    # A GPU's bfloat16 kernels write no float8.
    quantise_after = spec.h_fp8 and spec.gpu and not spec.fp8
    h_fp8 = spec.h_fp8 and not quantise_after
    h, h_scale, a, a_scale = call(
        "expert_up",
        [
            ((m, parts, i), fp8.F8 if h_fp8 else spec.wide) if keep_h else None,
            ((m, parts, fp8.blocks(i)), jnp.float32) if keep_h and h_fp8 else None,
            ((m, i), x[0].dtype),
            ((m, fp8.blocks(i)), jnp.float32) if spec.fp8 else None,
        ],
        [*x, gate[0], up[0], gate[1], up[1], *biases, offsets, slot_of_row],
        workspace=(m, x[0].shape[1], x[0].dtype.itemsize),
        experts_per_token=row_of_slot.shape[1],
        weights_transposed=spec.fp8,
        num_sms=spec.num_sms,
        **spec.attributes,
    )
    if keep_h and quantise_after:
        h, h_scale = fp8.quantize_rows(h, spec.pow2)
    return h, h_scale, a, a_scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(spec, x, weights, params, prepared, maps):
    return _forward(spec, x, weights, params, prepared, maps, keep_h=False)[0]


def _experts_fwd(spec, x, weights, params, prepared, maps):
    y, kept = _forward(spec, x, weights, params, prepared, maps, keep_h=True)
    kept = jax.tree.map(lambda array: checkpoint_name(array, "dropless_h"), kept)
    return y, (x, weights, params, prepared, maps, kept)


def _experts_bwd(spec, residuals, dy):
    x, weights, params, prepared, maps, (h, h_scale) = residuals
    offsets, slot_of_row, row_of_slot = maps
    m, i, k = slot_of_row.shape[0], params["gate"].shape[2], row_of_slot.shape[1]
    parts = spec.activation.parts
    prepared = prepared or prepare(params, spec.precision, spec.scale_rounding)
    columns = spec.columns_at_once("gate_bias" in params)
    with jax.named_scope("dropless_down_backward"):
        (dh, dh_columns), dh_q, dh_scale, (pa, pa_columns), d_weights = _down_backward(
            spec,
            _rows_operand(spec, dy),
            _weight_operand(spec, prepared.down.q, prepared.down.scale),
            *_biases(spec, params, "down_bias"),
            (h, h_scale),
            weights,
            maps,
            columns=columns,
        )
    with jax.named_scope("dropless_up_backward"):
        gate, up = (
            _weight_operand(spec, w.q, w.scale)
            for w in (prepared.gate, prepared.up or PreparedWeight(None))
        )
        operand = (dh_q, dh_scale) if spec.fp8 else (dh, None)
        if spec.in_steps and not spec.activation.gated:
            dx_rows = fp8.expert_up_backward(operand, gate, offsets, spec.num_sms)
        else:
            (dx_rows,) = call(
                "expert_up_backward",
                [((m, gate[0].shape[1]), spec.wide)],
                [*operand, gate[0], up[0], gate[1], up[1], offsets],
                num_sms=spec.num_sms,
            )
        dx = combine(dx_rows[:, : x.shape[1]], row_of_slot, None, x.dtype)
    if not columns:
        dh, pa = dh[..., :i], pa[:, :i]
    wgrad = functools.partial(
        call,
        "grouped_wgrad",
        experts_per_token=k,
        fp8=spec.wgrad_fp8,
        scale_rounding=spec.pow2,
        num_sms=spec.num_sms,
    )
    with jax.named_scope("dropless_weight_gradients"):
        # Weight gradients leave the fp32 accumulator in the parameters' own dtype.
        inward = ("gate", "up")[:parts]
        up_workspace, down_workspace = wgrad_workspaces(
            spec, m, x.shape[1], i, offsets.shape[0] - 1, columns
        )
        to_rows = slot_of_row, offsets, None, None
        d_inward = wgrad(
            [*((params[name].shape, params[name].dtype) for name in inward), None][:2],
            [x.astype(spec.wide), None, dh, dh_columns, *to_rows],
            workspace=up_workspace,
            gather=1,
        )
        d_down, _ = wgrad(
            [(params["down"].shape, params["down"].dtype), None],
            [pa, pa_columns, dy.astype(spec.wide)[:, None, :], None, *to_rows],
            workspace=down_workspace,
            gather=2,
        )
        d_params = {**dict(zip(inward, d_inward, strict=False)), "down": d_down}
        if "gate_bias" in params:
            d_params |= _bias_gradients(params, dh, dy, weights, maps)
    return dx, d_weights, d_params, None, None


def _down_backward(spec, dy, down, down_bias, h, weights, maps, *, columns):
    """dh, its codes and scales (None if not FP8), p * A, and the weights' gradient.

    dh and p * A are a pair of values and None; or, with ``columns``, of the codes and scales that
    weight gradients multiply.
    """
    offsets, slot_of_row, _ = maps
    h, h_scale = h
    if h_scale is not None and spec.gpu:
        # A GPU's kernels read bfloat16, which has more digits than the codes.
        h, h_scale = fp8.dequantize_rows(h, h_scale).astype(spec.wide), None
    if spec.fp8:
        h = fp8.pad(h, 2)
    if spec.in_steps:
        activation = spec.activation
        rest = (h, weights, offsets, slot_of_row)
        options = {"pow2": spec.pow2, "num_sms": spec.num_sms}
        dh, *codes, pa, d_weights = fp8.expert_down_backward(
            activation, dy, down, down_bias, *rest, **options
        )
        return (dh, None), *codes, (pa, None), d_weights
    m, parts, i = h.shape

    def operand(planes, shape):
        """Results: values of this shape, or their codes and scales."""
        if not columns:
            return [(shape, spec.wide)], [None, None]
        blocked = fp8.token_blocks(m, offsets.shape[0] - 1), planes, fp8.blocks(i) * 128
        return [None], [((*blocked, 128), fp8.F8), (blocked, jnp.float32)]

    dh, dh_columns = operand(parts, (m, parts, i))
    pa, pa_columns = operand(1, (m, i))
    dh, dh_q, dh_scale, pa, dh_columns, dh_s, pa_columns, pa_s, d_weights = call(
        "expert_down_backward",
        [
            *dh,
            ((m, parts, i), fp8.F8) if spec.fp8 else None,
            ((m, parts, fp8.blocks(i)), jnp.float32) if spec.fp8 else None,
            *pa,
            *dh_columns,
            *pa_columns,
            (weights.shape, jnp.float32),
        ],
        [*dy, *down, down_bias, h, h_scale, weights, offsets, slot_of_row],
        workspace=(m, dy[0].shape[1], i, dy[0].dtype.itemsize),
        num_sms=spec.num_sms,
        **spec.attributes,
    )
    if columns:
        return (dh_columns, dh_s), dh_q, dh_scale, (pa_columns, pa_s), d_weights
    return (dh, None), dh_q, dh_scale, (pa, None), d_weights


def _bias_gradients(params, dh, dy, weights, maps):
    offsets, slot_of_row, row_of_slot = maps
    e, k = offsets.shape[0] - 1, row_of_slot.shape[1]
    (d_up,) = call(
        "group_sum",
        [((e, *dh.shape[1:]), jnp.float32)],
        [dh, None, None, offsets],
        gather=0,
        experts_per_token=k,
    )
    (d_down,) = call(
        "group_sum",
        [((e, 1, dy.shape[1]), jnp.float32)],
        [dy[:, None, :], slot_of_row, weights, offsets],
        gather=1,
        experts_per_token=k,
    )
    sums = {"gate_bias": d_up[:, 0], "down_bias": d_down[:, 0]}
    if "up_bias" in params:
        sums["up_bias"] = d_up[:, 1]
    return {name: total.astype(params[name].dtype) for name, total in sums.items()}


_experts.defvjp(_experts_fwd, _experts_bwd)
