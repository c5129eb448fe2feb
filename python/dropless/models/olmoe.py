"""OLMoE-1B-7B (``OlmoeSparseMoeBlock``).

Routing: softmax over all experts in float32 and top-k; the k probabilities are used as they are,
unless the config's ``norm_topk_prob`` says otherwise (arXiv 2409.02060, section 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dropless._config import MoEConfig
from dropless.models import _layouts


def read_config(config: Mapping[str, Any]) -> tuple[MoEConfig, _layouts.Dims]:
    """The block's settings and sizes, from the model's ``config.json``."""
    renormalize = bool(config.get("norm_topk_prob", False))
    return _layouts.softmax_config(config, expert_dim="intermediate_size", renormalize=renormalize)


FAMILY = _layouts.Family(
    name="olmoe",
    read_config=read_config,
    layouts=_layouts.common_layouts(gate="gate_proj", up="up_proj", down="down_proj"),
)
