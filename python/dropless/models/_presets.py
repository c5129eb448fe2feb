"""Layer sizes of published models, from their config files."""

from __future__ import annotations

from typing import NamedTuple

from dropless._config import MoEConfig, RouterConfig

_RENORMALIZED = RouterConfig(score="softmax", score_before_topk=True, renormalize=True)
_AS_IS = RouterConfig(score="softmax", score_before_topk=True, renormalize=False)


class Preset(NamedTuple):
    """One layer of a published model: ``config, model_dim = presets["olmoe-1b-7b"]``."""

    config: MoEConfig
    model_dim: int  # H


class _Presets(dict[str, Preset]):
    def __missing__(self, name: str) -> Preset:
        raise KeyError(f"no preset {name!r}; known: {', '.join(self)}")


def _preset(
    model_dim: int, expert_dim: int, experts: int, top_k: int, router: RouterConfig
) -> Preset:
    config = MoEConfig(
        num_experts=experts, experts_per_token=top_k, expert_dim=expert_dim, router=router
    )
    return Preset(config, model_dim)


presets: dict[str, Preset] = _Presets(
    {
        # mistralai/Mixtral-8x7B-v0.1 and Mixtral-8x22B-v0.1
        "mixtral-8x7b": _preset(4096, 14336, 8, 2, _RENORMALIZED),
        "mixtral-8x22b": _preset(6144, 16384, 8, 2, _RENORMALIZED),
        # Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B, both with norm_topk_prob
        "qwen3-30b-a3b": _preset(2048, 768, 128, 8, _RENORMALIZED),
        "qwen3-235b-a22b": _preset(4096, 1536, 128, 8, _RENORMALIZED),
        # allenai/OLMoE-1B-7B-0924, norm_topk_prob off
        "olmoe-1b-7b": _preset(2048, 1024, 64, 8, _AS_IS),
    }
)
"""Layers of published models by name."""
