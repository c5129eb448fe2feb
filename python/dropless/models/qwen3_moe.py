"""Qwen3-MoE: 30B-A3B, 235B-A22B and Coder-480B (``Qwen3MoeSparseMoeBlock``).

Routing: softmax over all experts in float32, top-k, and the k probabilities divided by their sum if
the config's ``norm_topk_prob`` says so, as it does in the released models (arXiv 2505.09388).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dropless._config import MoEConfig
from dropless.models import _layouts


def read_config(config: Mapping[str, Any]) -> tuple[MoEConfig, _layouts.Dims]:
    """The block's settings and sizes, from the model's ``config.json``."""
    renormalize = bool(config.get("norm_topk_prob", False))
    return _layouts.softmax_config(
        config, expert_dim="moe_intermediate_size", renormalize=renormalize
    )


FAMILY = _layouts.Family(
    name="qwen3_moe",
    read_config=read_config,
    layouts=_layouts.common_layouts(gate="gate_proj", up="up_proj", down="down_proj"),
)
