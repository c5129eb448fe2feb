"""How the families' config files describe their routers, shared experts and activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dropless._activation import Activation
from dropless._config import RouterConfig
from dropless.models._settings import Config, activation, optional, refuse, size


def softmax(
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


def softmax_of_top_k(**options: Any) -> Callable[[Config], RouterConfig]:
    return lambda config: RouterConfig(score_before_topk=False, renormalize=False, **options)


def group_limits(config: Config, group_score_experts: int) -> dict[str, Any]:
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


def deepseek_v2(config: Config) -> RouterConfig:
    refuse(config, "topk_method", "not a method of DeepSeek-V2", "greedy", "group_limited_greedy")
    grouped = config.get("topk_method") == "group_limited_greedy"
    groups = group_limits(config, group_score_experts=1) if grouped else {}
    # DeepSeek's own release divides by the sum or scales, never both, and divides no single weight.
    if optional(config, "norm_topk_prob", False) and size(config, "num_experts_per_tok") > 1:
        return RouterConfig(renormalize_eps=1e-20, **groups)
    scale = float(optional(config, "routed_scaling_factor", 1.0))
    return RouterConfig(renormalize=False, scale=scale, **groups)


def sigmoid_with_bias(
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
            **group_limits(config, group_score_experts=2),
        )

    return router


def deepseek_v4(config: Config) -> RouterConfig:
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


def afmoe(config: Config) -> RouterConfig:
    refuse(config, "route_norm", "transformers renormalises whatever it says", True)
    return sigmoid_with_bias(scale="route_scale", normalize="route_norm")(config)


def ernie(config: Config) -> RouterConfig:
    # transformers before 5 has biases in routed experts, transformers 5 in the shared one alone.
    refuse(config, "use_bias", "linear biases in the experts are not supported", False)
    return RouterConfig(
        selection_bias=True,
        renormalize=True,
        renormalize_clamp=True,
        renormalize_eps=float(optional(config, "moe_norm_min", 1e-12)),
    )


def llama4(config: Config) -> RouterConfig:
    return RouterConfig(
        score="sigmoid",
        score_before_topk=False,
        renormalize=False,
        weight_on="input",
        jitter=float(optional(config, "router_jitter_noise", 0.0)),
    )


def phimoe(config: Config) -> RouterConfig:
    return RouterConfig(
        sparse_mixer_eps=float(optional(config, "router_jitter_noise", 0.01)),
        jitter=float(optional(config, "input_jitter_noise", 0.0)),
    )


# ---- Experts


def shared_count(
    count: str, width: str = "moe_intermediate_size"
) -> Callable[[Config], int | None]:
    """n shared experts are one of n times the width."""
    return lambda config: (optional(config, count, 0) * size(config, width)) or None


def shared_width(*names: str) -> Callable[[Config], int]:
    return lambda config: size(config, *names)


def gpt_oss_activation(config: Config) -> Activation:
    # The slope is a constant of the reference implementation, the limit a setting.
    limit = float(optional(config, "swiglu_limit", 7.0))
    return Activation("silu", slope=1.702, gate_limit=limit, up_limit=limit, up_offset=1.0)


def clamped_silu(config: Config) -> Activation:
    limit = float(optional(config, "swiglu_limit", 10.0))
    return Activation(activation(config), gate_limit=limit, up_limit=limit)
