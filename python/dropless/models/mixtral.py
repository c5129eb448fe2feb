"""Mixtral 8x7B and 8x22B (``MixtralSparseMoeBlock``).

Routing: softmax over all experts in float32, top-k, and the k probabilities divided by their sum,
which is the softmax over the k largest logits (arXiv 2401.04088, section 2.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dropless._config import MoEConfig
from dropless.models import _layouts


def read_config(config: Mapping[str, Any]) -> tuple[MoEConfig, _layouts.Dims]:
    """The block's settings and sizes, from the model's ``config.json``."""
    if config.get("router_jitter_noise"):
        raise ValueError(
            "config['router_jitter_noise']: noise on the block's input is not supported; "
            f"expected 0, got {config['router_jitter_noise']}"
        )
    return _layouts.softmax_config(config, expert_dim="intermediate_size", renormalize=True)


FAMILY = _layouts.Family(
    name="mixtral",
    read_config=read_config,
    layouts=_layouts.common_layouts(gate="w1", up="w3", down="w2"),
)
