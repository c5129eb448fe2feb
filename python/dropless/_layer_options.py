"""Checks of options that both Flax layers take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dropless._config import MoEConfig


def layer_config(
    config: MoEConfig | None, num_experts: int | None, options: Mapping[str, Any]
) -> MoEConfig:
    """The config of a layer given as a whole or field by field."""
    if config is not None:
        if num_experts is not None or options:
            given = (["num_experts"] if num_experts is not None else []) + list(options)
            raise TypeError(
                f"config: give a whole MoEConfig or its fields, got both (fields {given})"
            )
        if not isinstance(config, MoEConfig):
            raise TypeError(f"config: expected dropless.MoEConfig, got {type(config).__name__}")
        return config
    if num_experts is None:
        raise TypeError("num_experts: expected the number of experts, or config=MoEConfig(...)")
    known = [field.name for field in dataclasses.fields(MoEConfig)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"MoELayer got unknown options {unknown}; MoEConfig has {known}")
    return MoEConfig(num_experts, **options)


def check_dropout(rate: float) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0.0 <= rate <= 1.0:
        raise ValueError(f"dropout: expected a rate in [0, 1], got {rate!r}")
