"""Layer sizes of published models, from their config files."""

from __future__ import annotations

from typing import Any, NamedTuple

from dropless._config import MoEConfig
from dropless.models._families import FAMILIES


class Preset(NamedTuple):
    """One layer of a published model: ``config, model_dim = presets["olmoe-1b-7b"]``."""

    config: MoEConfig
    model_dim: int  # H


class _Presets(dict[str, Preset]):
    def __missing__(self, name: str) -> Preset:
        raise KeyError(f"no preset {name!r}; known: {', '.join(self)}")


# model_type; H, I, E, K; and the settings of config.json that the family's rules read beside them.
_V3 = {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
_TRINITY = {"num_shared_experts": 1, "route_scale": 2.826}
_NORMALIZED = {"norm_topk_prob": True}
_TABLE: dict[str, tuple[str, tuple[int, int, int, int], dict[str, Any]]] = {
    # mistralai/Mixtral-8x7B-v0.1, Mixtral-8x22B-v0.1
    "mixtral-8x7b": ("mixtral", (4096, 14336, 8, 2), {}),
    "mixtral-8x22b": ("mixtral", (6144, 16384, 8, 2), {}),
    # Qwen/Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B
    "qwen1.5-moe-a2.7b": (
        *("qwen2_moe", (2048, 1408, 60, 4)),
        {"shared_expert_intermediate_size": 5632},
    ),
    "qwen2-57b-a14b": (
        *("qwen2_moe", (3584, 2560, 64, 8)),
        {"shared_expert_intermediate_size": 20480},
    ),
    # Qwen/Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-480B-A35B-Instruct, Qwen3-Next-80B-A3B
    "qwen3-30b-a3b": ("qwen3_moe", (2048, 768, 128, 8), _NORMALIZED),
    "qwen3-235b-a22b": ("qwen3_moe", (4096, 1536, 128, 8), _NORMALIZED),
    "qwen3-coder-480b-a35b": ("qwen3_moe", (6144, 2560, 160, 8), _NORMALIZED),
    "qwen3-next-80b-a3b": (
        *("qwen3_next", (2048, 512, 512, 10)),
        {"shared_expert_intermediate_size": 512, **_NORMALIZED},
    ),
    # deepseek-ai/DeepSeek-V2-Lite, DeepSeek-V2, DeepSeek-V3, DeepSeek-R1
    "deepseek-v2-lite": (
        *("deepseek_v2", (2048, 1408, 64, 6)),
        {"n_shared_experts": 2, "topk_method": "greedy"},
    ),
    "deepseek-v2": (
        *("deepseek_v2", (5120, 1536, 160, 6)),
        {
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
            "routed_scaling_factor": 16.0,
        },
    ),
    "deepseek-v3": ("deepseek_v3", (7168, 2048, 256, 8), _V3),
    "deepseek-r1": ("deepseek_v3", (7168, 2048, 256, 8), _V3),
    # deepseek-ai/DeepSeek-V4-Flash, a layer without a table
    "deepseek-v4-flash": ("deepseek_v4", (4096, 2048, 256, 6), {"n_shared_experts": 1}),
    # moonshotai/Kimi-K2-Base
    "kimi-k2": (
        *("kimi_k2", (7168, 2048, 384, 8)),
        {"n_shared_experts": 1, "routed_scaling_factor": 2.827},
    ),
    # zai-org/GLM-4.5, GLM-4.5-Air
    "glm-4.5": (
        *("glm4_moe", (5120, 1536, 160, 8)),
        {"n_shared_experts": 1, "routed_scaling_factor": 2.5},
    ),
    "glm-4.5-air": ("glm4_moe", (4096, 1408, 128, 8), {"n_shared_experts": 1}),
    # openai/gpt-oss-20b, gpt-oss-120b
    "gpt-oss-20b": ("gpt_oss", (2880, 2880, 32, 4), {}),
    "gpt-oss-120b": ("gpt_oss", (2880, 2880, 128, 4), {}),
    # allenai/OLMoE-1B-7B-0924, FlexOlmo-7x7B-1T
    "olmoe-1b-7b": ("olmoe", (2048, 1024, 64, 8), {}),
    "flexolmo-7x7b": ("flex_olmo", (4096, 11008, 7, 5), {}),
    # ibm-granite/granite-3.0-1b-a400m-base, granite-3.0-3b-a800m-base
    "granite-3.0-1b-a400m": ("granitemoe", (1024, 512, 32, 8), {}),
    "granite-3.0-3b-a800m": ("granitemoe", (1536, 512, 40, 8), {}),
    # meta-llama/Llama-4-Scout-17B-16E, Llama-4-Maverick-17B-128E
    "llama-4-scout": ("llama4_text", (5120, 8192, 16, 1), {}),
    "llama-4-maverick": ("llama4_text", (5120, 8192, 128, 1), {}),
    # MiniMaxAI/MiniMax-M2
    "minimax-m2": ("minimax_m2", (3072, 1536, 256, 8), {}),
    # tencent/Hunyuan-A13B-Instruct
    "hunyuan-a13b": ("hunyuan_v1_moe", (4096, 3072, 64, 8), {}),
    # baidu/ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B
    "ernie-4.5-21b-a3b": (
        *("ernie4_5_moe", (2560, 1536, 64, 6)),
        {"moe_num_shared_experts": 2},
    ),
    "ernie-4.5-300b-a47b": ("ernie4_5_moe", (8192, 3584, 64, 8), {}),
    # ai21labs/Jamba-v0.1, AI21-Jamba-1.5-Large
    "jamba-v0.1": ("jamba", (4096, 14336, 16, 2), {}),
    "jamba-1.5-large": ("jamba", (8192, 24576, 16, 2), {}),
    # microsoft/Phi-3.5-MoE-instruct
    "phi-3.5-moe": ("phimoe", (4096, 6400, 16, 2), {}),
    # rednote-hilab/dots.llm1.base
    "dots.llm1": (
        *("dots1", (4096, 1408, 128, 6)),
        {"n_shared_experts": 2, "routed_scaling_factor": 2.5, **_NORMALIZED},
    ),
    # LiquidAI/LFM2-8B-A1B
    "lfm2-8b-a1b": ("lfm2_moe", (2048, 1792, 32, 4), {}),
    # upstage/Solar-Open-100B
    "solar-open-100b": ("solar_open", (4096, 1280, 128, 8), {"n_shared_experts": 1}),
    # arcee-ai/Trinity-Nano, Trinity-Mini (AFMoE)
    "trinity-nano": ("afmoe", (1024, 256, 128, 8), _TRINITY),
    "trinity-mini": ("afmoe", (2048, 1024, 128, 8), _TRINITY),
}


def _preset(model_type: str, sizes: tuple[int, int, int, int], rest: dict[str, Any]) -> Preset:
    family = FAMILIES[model_type]
    names = ("hidden_size", family.expert_dim[0], family.num_experts[0], family.top_k[0])
    return Preset(*family.read_config(dict(zip(names, sizes, strict=True)) | rest))


presets: dict[str, Preset] = _Presets({name: _preset(*row) for name, row in _TABLE.items()})
"""Layers of published models by name."""
