"""What a layer is: frozen, hashable configs without arrays."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, Literal

import jax

from dropless._activation import ACTIVATIONS, Activation
from dropless._checks import (
    MAX_EXPERTS,
    check_flag,
    check_integer,
    check_one_of,
    check_real,
    unwrap_numbers,
)

SCORES = ("softmax", "sigmoid", "sqrt_softplus", "identity")
PRECISIONS = ("auto", "f32", "bf16", "fp8")

# A dense SwiGLU feed-forward network of width 8/3 * H has the parameters of a classic one of width
# 4 * H (Shazeer, arXiv 2002.05202, section 3); K experts of width 8/3 * H / K cost a token the
# same.
_DENSE_WIDTH = 8 / 3
# Widths are rounded up to a multiple of this, half of the 128 columns that one scale covers.
_WIDTH_MULTIPLE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How tokens choose experts and how the chosen outputs are weighed.

    Logits z become scores. With ``score_before_topk`` the *ranked values* are the scores of all E
    experts (plus ``selection_bias``), else the logits (plus ``selection_bias``). The K largest
    ranked values are taken: equal ones lowest index first, NaN last.

    Attributes:
      score: ``"softmax"`` over experts, or of each expert alone ``"sigmoid"`` (DeepSeek-V3),
        ``"sqrt_softplus"``, sqrt(log(1 + exp(z))) (DeepSeek-V4), or ``"identity"``, the logit.
      score_before_topk: True scores all E experts and then takes the K best; False takes the K best
        logits and scores those alone (Mixtral, gpt-oss, Granite). With softmax and ``renormalize``
        the two give equal weights.
      renormalize: divide a token's K weights by their sum (Qwen's ``norm_topk_prob``).
      renormalize_eps: added to that sum; DeepSeek-V3 uses 1e-20.
      renormalize_clamp: the divisor is max(sum, renormalize_eps) instead (ERNIE-4.5, 1e-12).
      scale: multiplies the weights last (DeepSeek's ``routed_scaling_factor``).
      expert_scale: then ``params["router"]["expert_scale"]`` ([E], trained) multiplies the weights
        of each expert (Gemma-4).
      weight_on: the weights multiply each expert's ``"output"``, or its ``"input"`` (Llama-4).
      selection_bias: ``params["router"]["selection_bias"]`` ([E], float32) is added when experts
        are selected and never to their weights. It is state, not a parameter: its gradient is zero,
        and ``update_selection_bias`` moves it.
      bias: ``params["router"]["bias"]`` ([E]) is added to the logits (gpt-oss).
      num_groups: experts form this many equal groups of neighbours. 1: no groups.
      groups_kept: experts are taken from this many groups, those of the best scores.
      group_score_experts: a group's score is the sum of this many of its best ranked values: 1 is
        their maximum (DeepSeek-V2), 2 DeepSeek-V3's rule.
      group_mask: what replaces the ranked values of the other groups: ``"-inf"``, or ``"zero"`` as
        in transformers before 5, where a negative selection bias lets masked experts win.
      expert_table: size V of a fixed table that maps token ids to experts instead of the logits
        (DeepSeek-V4's first layers): ``params["router"]["expert_table"]`` ([V, K] of whole numbers,
        float32 so that ``jax.grad`` takes the whole of ``params``; state like ``selection_bias``).
        The weights still are those of the logits.
      jitter: for training: x is multiplied, element by element, by a random number from 1 - jitter
        to 1 + jitter, for the router and the experts alike (Mixtral's ``router_jitter_noise``). It
        happens where a key is given: ``moe(..., jitter_key=)``.
      sparse_mixer_eps: route two experts a token as Phi-3.5-MoE does: in turn, the largest logit of
        those left, weighted by its softmax among the logits within a relative distance of 2 * eps.
        Where ``moe`` gets a ``jitter_key``, as in training: experts are drawn from that softmax,
        and SparseMixer's estimate replaces the gradient (arXiv 2409.12136). The other options of
        selection and weights keep their defaults. None: as the options above say.
      balance_loss: what ``MoEAux.load_balance_loss`` averages over: the whole ``"batch"``, or each
        ``"sequence"`` (x is then [..., S, H]) on its own (DeepSeek-V3, arXiv 2412.19437, eq.
        17-20).
    """

    score: Literal["softmax", "sigmoid", "sqrt_softplus", "identity"] = "softmax"
    score_before_topk: bool = True
    renormalize: bool = True
    renormalize_eps: float = 0.0
    scale: float = 1.0
    selection_bias: bool = False
    bias: bool = False
    renormalize_clamp: bool = False
    expert_scale: bool = False
    weight_on: Literal["output", "input"] = "output"
    num_groups: int = 1
    groups_kept: int = 1
    group_score_experts: int = 1
    group_mask: Literal["-inf", "zero"] = "-inf"
    expert_table: int | None = None
    jitter: float = 0.0
    sparse_mixer_eps: float | None = None
    balance_loss: Literal["batch", "sequence"] = "batch"

    def __post_init__(self):
        unwrap_numbers(self)
        check_one_of("RouterConfig.score", self.score, SCORES)
        for name in (
            *("score_before_topk", "renormalize", "renormalize_clamp"),
            *("selection_bias", "bias", "expert_scale"),
        ):
            check_flag(f"RouterConfig.{name}", getattr(self, name))
        check_real("RouterConfig.renormalize_eps", self.renormalize_eps, positive=False)
        check_real("RouterConfig.scale", self.scale, positive=True)
        check_one_of("RouterConfig.weight_on", self.weight_on, ("output", "input"))
        for name in ("num_groups", "groups_kept", "group_score_experts"):
            check_integer(f"RouterConfig.{name}", getattr(self, name), 1)
        if self.groups_kept > self.num_groups:
            raise ValueError(
                f"RouterConfig.groups_kept must be at most num_groups; got groups_kept="
                f"{self.groups_kept} and num_groups={self.num_groups}."
            )
        check_one_of("RouterConfig.group_mask", self.group_mask, ("-inf", "zero"))
        if self.expert_table is not None:
            check_integer("RouterConfig.expert_table", self.expert_table, 1)
        check_real("RouterConfig.jitter", self.jitter, positive=False)
        if self.jitter > 1:
            raise ValueError(f"RouterConfig.jitter must be from 0 to 1; got {self.jitter!r}.")
        check_one_of("RouterConfig.balance_loss", self.balance_loss, ("batch", "sequence"))

        if self.sparse_mixer_eps is not None:
            check_real("RouterConfig.sparse_mixer_eps", self.sparse_mixer_eps, positive=True)
            free = {"sparse_mixer_eps", "bias", "weight_on", "jitter", "balance_loss"}
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                if field.name not in free and value != field.default:
                    raise ValueError(
                        f"RouterConfig.sparse_mixer_eps excludes {field.name}; got "
                        f"sparse_mixer_eps={self.sparse_mixer_eps} and {field.name}={value!r}."
                    )

    def check_groups(self, num_experts: int, experts_per_token: int) -> None:
        """Raises unless the groups fit E experts of which K are taken."""
        if self.sparse_mixer_eps is not None and experts_per_token != 2:
            raise ValueError(
                f"RouterConfig.sparse_mixer_eps needs experts_per_token=2; got {experts_per_token}."
            )
        if num_experts % self.num_groups:
            raise ValueError(
                f"RouterConfig.num_groups must divide num_experts; got num_groups="
                f"{self.num_groups} and num_experts={num_experts}."
            )
        group = num_experts // self.num_groups
        if self.groups_kept * group < experts_per_token:
            raise ValueError(
                f"the kept groups must hold experts_per_token experts; got groups_kept="
                f"{self.groups_kept} groups of {group} and experts_per_token={experts_per_token}."
            )
        if self.num_groups > 1 and self.group_score_experts > group:
            raise ValueError(
                f"RouterConfig.group_score_experts must be at most the {group} experts of a group; "
                f"got {self.group_score_experts}."
            )


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A Mixture-of-Experts layer: E experts, K of which serve each token.

    Attributes:
      num_experts: E.
      experts_per_token: K, at most E.
      expert_dim: I, the experts' width. None: such that a token costs what a dense SwiGLU network
        of width 8/3 * H costs, rounded up to a multiple of 64 (see ``resolved_expert_dim``).
      router: see ``RouterConfig``.
      activation: a kind of ``Activation``, such as ``"silu"``, for experts gated by it and nothing
        more; or an ``Activation``.
      expert_bias: the routed experts' matrices have biases.
      shared_expert_dim: S, width of the shared expert, which serves every token, its output added
        to that of the routed ones: a dense network with the same activation in
        ``params["shared"]``. n shared experts of width I are one of width n * I. None: there is
        none.
      shared_expert_gate: its output is multiplied by sigmoid(x . output_gate) (Qwen2-MoE).
      precision: of the matrix products' operands. ``"f32"``, ``"bf16"``, ``"fp8"`` (e4m3 in blocks
        of 128; on a CPU it is emulated), or ``"auto"``: decided when the function is traced, from
        the devices in use: x's own dtype on a CPU; on a Hopper GPU FP8 where it is expected to be
        faster, quantising the weights counted (docs/fp8.md; ``explain`` says why); bfloat16 on
        every other.
      expert_capacity_factor: sizes buffers between devices; what does not fit is sent in a further
        round. With ``overflow="drop"``, an expert takes at most
        ``ceil(expert_capacity_factor * T * K / E)`` assignments and drops the rest.
      overflow: ``"rounds"`` never drops; ``"drop"`` is the classic capacity layer.
      wgrad_precision: with ``precision="fp8"``, of the weight gradients' operands. ``"fp8"`` is as
        fast or up to 6 % faster on an H200 (docs/gpu_fp8.md); ``"bf16"`` has the smaller error.
      save_h: how the pre-activations are kept for the backward pass: ``"bf16"``, or ``"fp8"`` at
        half the memory. Where the operands are float32 they are kept in float32: asking for
        ``"f32"`` and ``"fp8"`` at once is an error, but ``"auto"`` may choose float32 on a CPU.
      scale_rounding: of FP8 scales: kept in ``"fp32"``, or rounded up to a power of two
        (``"pow2"``).
      fallback: ``"bf16"`` runs bfloat16 where FP8 was asked of a GPU that has none; None is an
        error.
      strict: make an error of what else warns: a fallback, or a gather of x or of expert weights.
      num_sms: how many of a GPU's streaming multiprocessors the grouped products take at most, 2
        or more, so that collectives which overlap with them find the others free; None, all of
        them. Results have the same bits. Routing, row moves and the router's product are not
        limited; a CPU ignores it.
    """

    num_experts: int
    experts_per_token: int = 2
    expert_dim: int | None = None
    _: dataclasses.KW_ONLY
    router: RouterConfig = RouterConfig()
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"] | Activation = "silu"
    expert_bias: bool = False
    shared_expert_dim: int | None = None
    shared_expert_gate: bool = False
    precision: Literal["auto", "f32", "bf16", "fp8"] = "auto"
    expert_capacity_factor: float = 1.0
    overflow: Literal["rounds", "drop"] = "rounds"
    wgrad_precision: Literal["bf16", "fp8"] = "fp8"
    save_h: Literal["bf16", "fp8"] = "bf16"
    scale_rounding: Literal["fp32", "pow2"] = "fp32"
    fallback: Literal["bf16"] | None = None
    strict: bool = False
    num_sms: int | None = None

    def __post_init__(self):
        unwrap_numbers(self)
        check_integer("num_experts", self.num_experts, 1, MAX_EXPERTS)
        check_integer("experts_per_token", self.experts_per_token, 1)
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token must be at most num_experts; got experts_per_token="
                f"{self.experts_per_token} and num_experts={self.num_experts}."
            )
        if self.expert_dim is not None:
            check_integer("expert_dim", self.expert_dim, 1)
        if not isinstance(self.router, RouterConfig):
            raise ValueError(f"router must be a dropless.RouterConfig; got {self.router!r}.")
        self.router.check_groups(self.num_experts, self.experts_per_token)
        if not isinstance(self.activation, Activation):
            check_one_of("activation", self.activation, ACTIVATIONS)
        elif self.activation == Activation(self.activation.kind):
            # One spelling of each, so that equal layers have equal configs.
            object.__setattr__(self, "activation", self.activation.kind)
        check_flag("expert_bias", self.expert_bias)
        if self.shared_expert_dim is not None:
            check_integer("shared_expert_dim", self.shared_expert_dim, 1)
        check_flag("shared_expert_gate", self.shared_expert_gate)
        if self.shared_expert_gate and self.shared_expert_dim is None:
            raise ValueError("shared_expert_gate=True needs shared_expert_dim; got None.")
        check_one_of("precision", self.precision, PRECISIONS)
        check_real("expert_capacity_factor", self.expert_capacity_factor, positive=True)
        check_one_of("overflow", self.overflow, ("rounds", "drop"))
        check_one_of("wgrad_precision", self.wgrad_precision, ("bf16", "fp8"))
        check_one_of("save_h", self.save_h, ("bf16", "fp8"))
        if self.save_h == "fp8" and self.precision == "f32":
            raise ValueError(
                'save_h="fp8" needs precision="bf16", "fp8" or "auto"; got precision="f32". Use '
                'save_h="bf16", which keeps float32 pre-activations for float32 operands.'
            )
        check_one_of("scale_rounding", self.scale_rounding, ("fp32", "pow2"))
        check_one_of("fallback", self.fallback, (None, "bf16"))
        check_flag("strict", self.strict)
        if self.num_sms is not None:
            check_integer("num_sms", self.num_sms, 2)

    def resolved_expert_dim(self, model_dim: int) -> int:
        """I for a model of width H: ``expert_dim``, or ceil(8/3 * H / K / 64) * 64."""
        if self.expert_dim is not None:
            return self.expert_dim
        width = _DENSE_WIDTH * model_dim / self.experts_per_token
        return math.ceil(width / _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE

    @property
    def glu(self) -> Activation:
        """``activation`` in full."""
        full = isinstance(self.activation, Activation)
        return self.activation if full else Activation(self.activation)

    def capacity(self, tokens: int) -> int:
        """Assignments that an expert takes of T tokens; 0 means without limit."""
        if self.overflow == "rounds":
            return 0
        rows = self.expert_capacity_factor * tokens * self.experts_per_token / self.num_experts
        # A token chooses an expert once, so T assignments are all there can be.
        return max(1, math.ceil(min(rows, tokens)))


def check_config(cfg: Any) -> None:
    if not isinstance(cfg, MoEConfig):
        raise TypeError(f"cfg must be a dropless.MoEConfig; got {type(cfg).__name__}.")


def device_in_use(x: Any, mesh: Any = None) -> jax.Device:
    """The device that a function traced now will most likely run on."""
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.devices.flat[0]
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        return next(iter(x.devices()))
    default = jax.config.jax_default_device
    if isinstance(default, jax.Device):
        return default
    return jax.devices(default)[0]


_said: set[str] = set()


def first_time(text: str) -> bool:
    """Whether a text has not been said before."""
    new = text not in _said
    _said.add(text)
    return new


def warn_once(text: str) -> None:
    """Warns of a slow or different path the first time it is taken."""
    if first_time(text):
        warnings.warn(text, RuntimeWarning, stacklevel=3)
