"""The table of model families: where each reads its settings, and how its tensors are named.

Router rules follow the reference implementations in transformers 5; docs/models.md has the papers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dropless._activation import Activation
from dropless._config import MoEConfig, RouterConfig
from dropless.models._rules import Copy, Pair, PerExpert, Rule, Table, linear
from dropless.models._settings import Config, activation, optional, refuse, size

Layout = tuple[Rule, ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family. Settings are given by their names in ``config.json``.

    Attributes:
      names: values of ``model_type``.
      layouts: its tensors, by the layout's name. Rules about parameters that a block does not have
        do not apply to it.
      router: how the config describes the router.
      num_experts, top_k, expert_dim: the settings that hold E, K and I.
      shared_dim: S of the shared expert from the config; None: there is none.
      shared_gate, expert_bias: as in ``MoEConfig``.
      activation: from the config.
    """

    names: tuple[str, ...]
    layouts: Mapping[str, Layout]
    router: Callable[[Config], RouterConfig]
    num_experts: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    expert_dim: tuple[str, ...] = ("moe_intermediate_size",)
    shared_dim: Callable[[Config], int | None] = lambda config: None
    shared_gate: bool = False
    expert_bias: bool = False
    activation: Callable[[Config], Any] = activation

    def read_config(self, config: Config) -> tuple[MoEConfig, int]:
        """The block's config, and H."""
        shared_dim = self.shared_dim(config)
        cfg = MoEConfig(
            num_experts=size(config, *self.num_experts),
            experts_per_token=size(config, *self.top_k),
            expert_dim=size(config, *self.expert_dim),
            router=self.router(config),
            activation=self.activation(config),
            expert_bias=self.expert_bias,
            shared_expert_dim=shared_dim,
            shared_expert_gate=self.shared_gate and shared_dim is not None,
        )
        return cfg, size(config, "hidden_size")


# ---- Tensors

_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_W1_W3_W2 = ("w1", "w3", "w2")
_LEAVES = ("gate", "up", "down")

# transformers 5: [E, 2I, H] and [E, H, I].
_FUSED: Layout = (
    Pair("experts.gate_up_proj", "experts.gate", "experts.up", transposed=True),
    Copy("experts.down_proj", "experts.down", transposed=True),
)
# [E, H, 2I] and [E, I, H].
_FUSED_IN_OUT: Layout = (
    Pair("experts.gate_up_proj", "experts.gate", "experts.up"),
    Copy("experts.down_proj", "experts.down"),
)
_INTERLEAVED: Layout = (
    Pair("experts.gate_up_proj", "experts.gate", "experts.up", interleaved=True),
    Pair("experts.gate_up_proj_bias", "experts.gate_bias", "experts.up_bias", interleaved=True),
    Copy("experts.down_proj", "experts.down"),
    Copy("experts.down_proj_bias", "experts.down_bias"),
)


def _linears(names: tuple[str, str, str]) -> Layout:
    return tuple(
        PerExpert(f"experts.{{}}.{name}.weight", f"experts.{leaf}")
        for name, leaf in zip(names, _LEAVES, strict=True)
    )


def _shared(module: str, names: tuple[str, str, str] = _GATE_UP_DOWN) -> Layout:
    return tuple(
        linear(f"{module}.{name}.weight", f"shared.{leaf}")
        for name, leaf in zip(names, _LEAVES, strict=True)
    )


def _router(weight: str = "gate.weight", bias: str | None = None) -> Layout:
    rule = (linear(weight, "router.kernel"),)
    return rule if bias is None else (*rule, Copy(bias, "router.selection_bias"))


def _both(
    router: Layout, names: tuple[str, str, str] = _GATE_UP_DOWN, rest: Layout = ()
) -> dict[str, Layout]:
    """The layout in memory since transformers 5, and that of the released files."""
    return {
        "fused": (*router, *_FUSED, *rest),
        "per_expert": (*router, *_linears(names), *rest),
    }


# ---- Routers


def _softmax(
    renormalize: bool | None, *, default: bool = False, **options: Any
) -> Callable[[Config], RouterConfig]:
    """Softmax over all experts; None: the config says whether the K weights are renormalised.

    ``default`` is what it says where ``norm_topk_prob`` is missing.
    """

    def router(config: Config) -> RouterConfig:
        by_config = bool(optional(config, "norm_topk_prob", default))
        normalize = by_config if renormalize is None else renormalize
        jitter = float(optional(config, "router_jitter_noise", 0.0))
        return RouterConfig(renormalize=normalize, jitter=jitter, **options)

    return router


def _softmax_of_top_k(**options: Any) -> Callable[[Config], RouterConfig]:
    return lambda config: RouterConfig(score_before_topk=False, renormalize=False, **options)


def _groups(config: Config, group_score_experts: int) -> dict[str, Any]:
    # Experts of other groups are out of the question, as in DeepSeek's inference code and in
    # transformers since 5; older releases ranked them as 0, which wins against a negative bias.
    groups = optional(config, "n_group", 1)
    if groups == 1:
        return {}
    return {
        "num_groups": groups,
        "groups_kept": size(config, "topk_group"),
        "group_score_experts": group_score_experts,
    }


def _deepseek_v2(config: Config) -> RouterConfig:
    refuse(config, "norm_topk_prob", "the reference implementation ignores it", False)
    refuse(config, "topk_method", "not a method of DeepSeek-V2", "greedy", "group_limited_greedy")
    grouped = config.get("topk_method") == "group_limited_greedy"
    return RouterConfig(
        renormalize=False,
        scale=float(optional(config, "routed_scaling_factor", 1.0)),
        **(_groups(config, group_score_experts=1) if grouped else {}),
    )


def _sigmoid_with_bias(
    *,
    eps: float = 1e-20,
    scale: str = "routed_scaling_factor",
    normalize: str = "norm_topk_prob",
    default: bool = True,
) -> Callable[[Config], RouterConfig]:
    """Sigmoid scores, a selection bias, groups by their two best experts (DeepSeek-V3)."""

    def router(config: Config) -> RouterConfig:
        refuse(config, "scoring_func", "this family scores by sigmoid", "sigmoid", "noaux_tc")
        refuse(config, "score_func", "this family scores by sigmoid", "sigmoid")
        renormalize = bool(optional(config, normalize, default))
        return RouterConfig(
            score="sigmoid",
            selection_bias=bool(optional(config, "use_expert_bias", True)),
            renormalize=renormalize,
            renormalize_eps=eps if renormalize else 0.0,
            scale=float(optional(config, scale, 1.0)),
            jitter=float(optional(config, "router_jitter_noise", 0.0)),
            **_groups(config, group_score_experts=2),
        )

    return router


def _deepseek_v4(config: Config) -> RouterConfig:
    refuse(config, "scoring_func", "this family scores by sqrt(softplus)", "sqrtsoftplus")
    refuse(config, "norm_topk_prob", "the reference implementation ignores it", True)
    by_table = optional(config, "mlp_layer_types", "moe") == "hash_moe"
    return RouterConfig(
        score="sqrt_softplus",
        selection_bias=not by_table,
        expert_table=size(config, "vocab_size") if by_table else None,
        renormalize_eps=1e-20,
        scale=float(optional(config, "routed_scaling_factor", 1.5)),
    )


def _afmoe(config: Config) -> RouterConfig:
    refuse(config, "route_norm", "transformers renormalises whatever it says", True)
    return _sigmoid_with_bias(scale="route_scale", normalize="route_norm")(config)


def _ernie(config: Config) -> RouterConfig:
    refuse(config, "use_bias", "linear biases in the experts are not supported", False)
    return RouterConfig(
        selection_bias=True,
        renormalize=True,
        renormalize_clamp=True,
        renormalize_eps=float(optional(config, "moe_norm_min", 1e-12)),
    )


# ---- Settings


def _shared_count(
    count: str, width: str = "moe_intermediate_size"
) -> Callable[[Config], int | None]:
    """n shared experts are one of n times the width."""
    return lambda config: (optional(config, count, 0) * size(config, width)) or None


def _shared_width(*names: str) -> Callable[[Config], int]:
    return lambda config: size(config, *names)


def _gpt_oss_activation(config: Config) -> Activation:
    # The slope is a constant of the reference implementation, the limit a setting.
    limit = float(optional(config, "swiglu_limit", 7.0))
    return Activation("silu", slope=1.702, gate_limit=limit, up_limit=limit, up_offset=1.0)


def _clamped_silu(config: Config) -> Activation:
    limit = float(optional(config, "swiglu_limit", 10.0))
    return Activation(activation(config), gate_limit=limit, up_limit=limit)


_V3_BIAS = "gate.e_score_correction_bias"
_V4_TABLE = Table("gate.tid2eid", "router.expert_table")
_QWEN2_SHARED = (
    *_shared("shared_expert"),
    linear("shared_expert_gate.weight", "shared.output_gate"),
)
_ERNIE_BIAS = {
    "fused": "gate.moe_statics.e_score_correction_bias",
    "per_expert": "moe_statics.e_score_correction_bias",
}
_INTERMEDIATE = ("intermediate_size",)

_TABLE = (
    Family(("mixtral",), _both(_router(), _W1_W3_W2), _softmax(True), expert_dim=_INTERMEDIATE),
    *(
        Family(
            names,
            _both(_router(), rest=_QWEN2_SHARED),
            router,
            shared_dim=_shared_width("shared_expert_intermediate_size"),
            shared_gate=True,
        )
        for names, router in (
            (("qwen2_moe",), _softmax(None)),
            (("qwen3_next",), _softmax(None, default=True)),
            (("qwen3_5_moe_text", "qwen3_5_moe"), _softmax(True)),
        )
    ),
    Family(("qwen3_moe",), _both(_router()), _softmax(None)),
    Family(("olmoe", "flex_olmo"), _both(_router()), _softmax(None), expert_dim=_INTERMEDIATE),
    Family(
        ("deepseek_v2",),
        _both(_router(), rest=_shared("shared_experts")),
        _deepseek_v2,
        shared_dim=_shared_count("n_shared_experts"),
    ),
    *(
        Family(
            names,
            _both(_router(bias=_V3_BIAS), rest=_shared("shared_experts")),
            router,
            shared_dim=_shared_count("n_shared_experts"),
        )
        for names, router in (
            (
                ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "solar_open"),
                _sigmoid_with_bias(),
            ),
            (("dots1",), _sigmoid_with_bias(default=False)),
        )
    ),
    Family(
        ("deepseek_v4",),
        {
            "fused": (*_router(bias=_V3_BIAS), _V4_TABLE, *_FUSED, *_shared("shared_experts")),
            "per_expert": (
                *_router(bias="gate.bias"),
                _V4_TABLE,
                *_linears(_W1_W3_W2),
                *_shared("shared_experts", _W1_W3_W2),
            ),
        },
        _deepseek_v4,
        shared_dim=_shared_count("n_shared_experts"),
        activation=_clamped_silu,
    ),
    Family(
        ("afmoe",),
        _both(_router("router.gate.weight", bias="expert_bias"), rest=_shared("shared_experts")),
        _afmoe,
        shared_dim=_shared_count("num_shared_experts"),
    ),
    Family(
        ("lfm2_moe",),
        _both(_router(bias="expert_bias"), _W1_W3_W2),
        _sigmoid_with_bias(eps=1e-6),
    ),
    Family(
        ("minimax_m2",),
        _both(_router(bias="e_score_correction_bias"), _W1_W3_W2),
        _sigmoid_with_bias(eps=0.0),
        expert_dim=_INTERMEDIATE,
    ),
    Family(
        ("ernie4_5_moe",),
        {
            "fused": (
                *_router(),
                Copy(_ERNIE_BIAS["fused"], "router.selection_bias", row=True),
                *_FUSED,
                *_shared("shared_experts"),
            ),
            "per_expert": (
                *_router(),
                Copy(_ERNIE_BIAS["per_expert"], "router.selection_bias", row=True),
                *_linears(_GATE_UP_DOWN),
                *_shared("shared_experts"),
            ),
        },
        _ernie,
        num_experts=("moe_num_experts", "num_experts"),
        top_k=("moe_k", "num_experts_per_tok"),
        shared_dim=_shared_count("moe_num_shared_experts"),
    ),
    Family(
        ("gpt_oss",),
        {
            "fused": (
                *_router("router.weight"),
                Copy("router.bias", "router.bias"),
                *_INTERLEAVED,
            )
        },
        _softmax_of_top_k(bias=True),
        expert_dim=_INTERMEDIATE,
        expert_bias=True,
        activation=_gpt_oss_activation,
    ),
    Family(
        ("granitemoe",),
        {
            "fused": (*_router("router.weight"), *_FUSED),
            "released": (
                *_router("router.layer.weight"),
                Pair("input_linear.weight", "experts.gate", "experts.up", transposed=True),
                Copy("output_linear.weight", "experts.down", transposed=True),
            ),
        },
        _softmax_of_top_k(),
        expert_dim=_INTERMEDIATE,
    ),
    Family(
        ("llama4_text", "llama4"),
        {"fused": (*_router("router.weight"), *_FUSED_IN_OUT, *_shared("shared_expert"))},
        lambda config: RouterConfig(
            score="sigmoid",
            score_before_topk=False,
            renormalize=False,
            weight_on="input",
            jitter=float(optional(config, "router_jitter_noise", 0.0)),
        ),
        expert_dim=_INTERMEDIATE,
        shared_dim=_shared_width("intermediate_size"),
    ),
    Family(
        ("hunyuan_v1_moe",),
        _both(_router("gate.wg.weight"), rest=_shared("shared_mlp")),
        _softmax(True),
        top_k=("moe_topk",),
        expert_dim=_INTERMEDIATE,
        shared_dim=_shared_width("intermediate_size"),
    ),
    Family(
        ("phimoe",),
        {
            "fused": (*_router("router.weight"), *_FUSED),
            # The released files are older than the router's name.
            "per_expert": (*_router(), *_linears(_W1_W3_W2)),
        },
        lambda config: RouterConfig(
            sparse_mixer_eps=float(optional(config, "router_jitter_noise", 0.01)),
            jitter=float(optional(config, "input_jitter_noise", 0.0)),
        ),
        expert_dim=_INTERMEDIATE,
    ),
    Family(("jamba",), _both(_router("router.weight")), _softmax(False), expert_dim=_INTERMEDIATE),
)

FAMILIES: dict[str, Family] = {name: family for family in _TABLE for name in family.names}
