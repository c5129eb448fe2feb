"""Writes golden vectors of model families: their published blocks, run with random weights.

Needs torch and transformers, in an environment of their own; Dropless is not imported:

    python tools/golden_families.py tests/golden/families

The files have the format of tests/golden/README.md. Sizes are small and all different. Selection
biases are mostly negative, so that experts of closed groups would show.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

H, I, E, K, S = 10, 6, 8, 3, 14  # noqa: E741
SHAPE = (2, 7, H)

COMMON = {
    "hidden_size": H,
    "num_experts_per_tok": K,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
WIDE = {"num_experts": E, "intermediate_size": I}
NARROW = {"num_experts": E, "moe_intermediate_size": I}
LOCAL = {"num_local_experts": E, "intermediate_size": I}
DEEPSEEK = {"n_routed_experts": E, "moe_intermediate_size": I, "n_shared_experts": 2}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
# File: module of transformers, config class, block class, settings.
CASES = {
    "afmoe": (
        *("afmoe", "AfmoeConfig", "AfmoeSparseMoeBlock"),
        {**NARROW, "num_shared_experts": 2, "route_scale": 2.826},
    ),
    "deepseek_v3_negative_bias": (
        *("deepseek_v3", "DeepseekV3Config", "DeepseekV3MoE"),
        {**DEEPSEEK, **GROUPS},
    ),
    "deepseek_v32": (
        *("deepseek_v32", "DeepseekV32Config", "DeepseekV32MoE"),
        {**DEEPSEEK, **GROUPS},
    ),
    "deepseek_v4": (
        *("deepseek_v4", "DeepseekV4Config", "DeepseekV4SparseMoeBlock"),
        {**DEEPSEEK, "n_shared_experts": 1, "swiglu_limit": 0.8, "mlp_layer_types": ["moe"] * 2},
    ),
    "dots1_groups": ("dots1", "Dots1Config", "Dots1MoE", {**DEEPSEEK, **GROUPS}),
    "ernie4_5_moe_alone": (
        *("ernie4_5_moe", "Ernie4_5_MoeConfig", "Ernie4_5_MoeSparseMoeBlock"),
        {
            "moe_num_experts": E,
            "moe_k": K,
            "moe_intermediate_size": I,
            "moe_num_shared_experts": 0,
            "moe_norm_min": 0.4,
        },
    ),
    "flex_olmo": ("flex_olmo", "FlexOlmoConfig", "FlexOlmoSparseMoeBlock", WIDE),
    "glm4_moe_groups": ("glm4_moe", "Glm4MoeConfig", "Glm4MoeMoE", {**DEEPSEEK, **GROUPS}),
    "granitemoe": ("granitemoe", "GraniteMoeConfig", "GraniteMoeMoE", LOCAL),
    "hunyuan_v1_moe": (
        *("hunyuan_v1_moe", "HunYuanMoEV1Config", "HunYuanMoEV1Moe"),
        {**WIDE, "moe_topk": [K, K]},
    ),
    "jamba": ("jamba", "JambaConfig", "JambaSparseMoeBlock", WIDE),
    "lfm2_moe": (
        *("lfm2_moe", "Lfm2MoeConfig", "Lfm2MoeSparseMoeBlock"),
        {**NARROW, "routed_scaling_factor": 1.7},
    ),
    "lfm2_moe_plain": (
        *("lfm2_moe", "Lfm2MoeConfig", "Lfm2MoeSparseMoeBlock"),
        {**NARROW, "norm_topk_prob": False, "use_expert_bias": False},
    ),
    "llama4_two_experts": (
        *("llama4", "Llama4TextConfig", "Llama4TextMoe"),
        {**LOCAL, "num_experts_per_tok": 2},
    ),
    "minimax_m2": ("minimax_m2", "MiniMaxM2Config", "MiniMaxM2SparseMoeBlock", LOCAL),
    "phimoe": (
        *("phimoe", "PhimoeConfig", "PhimoeSparseMoeBlock"),
        # Wide, so that several logits are near.
        {**LOCAL, "num_experts_per_tok": 2, "router_jitter_noise": 0.3},
    ),
    "qwen3_5_moe": (
        *("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeSparseMoeBlock"),
        {**NARROW, "shared_expert_intermediate_size": S},
    ),
    "solar_open_groups": (
        *("solar_open", "SolarOpenConfig", "SolarOpenMoE"),
        {**DEEPSEEK, **GROUPS},
    ),
}
# These have names of their own for K.
RENAMED = {"hunyuan_v1_moe", "ernie4_5_moe"}
# Blocks that are told which layer they are.
OF_LAYER = {"hunyuan_v1_moe", "deepseek_v4"}


def scale_of(name: str, shape: torch.Size) -> float:
    return 1.0 if "bias" in name else shape[-1] ** -0.5


def vectors(case: str, seed: int) -> dict[str, np.ndarray]:
    module, config_class, block_class, settings = CASES[case]
    package = f"transformers.models.{module}"
    common = {n: v for n, v in COMMON.items() if module not in RENAMED or "experts" not in n}
    configs = importlib.import_module(f"{package}.configuration_{module}")
    models = importlib.import_module(f"{package}.modeling_{module}")
    config = getattr(configs, config_class)(**(common | settings))
    config._experts_implementation = "eager"
    options = {"layer_idx": 0} if module in OF_LAYER else {}
    block = getattr(models, block_class)(config, **options).float().eval()

    generator = torch.Generator().manual_seed(seed)
    state = [*block.named_parameters(), *block.named_buffers()]
    for name, tensor in state:
        values = torch.randn(tensor.shape, generator=generator) * scale_of(name, tensor.shape)
        if "e_score" in name or "expert_bias" in name:
            values = 0.5 * values - 0.7
        tensor.data.copy_(values)
    x = torch.randn(SHAPE, generator=generator).requires_grad_()
    dy = torch.randn(SHAPE, generator=generator)
    y = block(x * 1.0)  # a copy: some blocks write to their input
    y = (y[0] if isinstance(y, tuple) else y).reshape(SHAPE)
    y.backward(dy)

    arrays = {"x": x, "y": y, "dy": dy, "dx": x.grad}
    for name, tensor in state:
        if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
            arrays |= {f"param/{name}": tensor, f"grad/{name}": tensor.grad}
        else:
            arrays[f"buffer/{name}"] = tensor
    meta = {
        "family": module,
        "block": block_class,
        "seed": seed,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "config": config.to_dict(),
    }
    return {name: a.detach().numpy() for name, a in arrays.items()} | {"meta": json.dumps(meta)}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, case in enumerate(CASES):
        np.savez(folder / f"{case}.npz", **vectors(case, seed))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/golden_families.py FOLDER")
    main(Path(sys.argv[1]))
