"""Mixture-of-Experts blocks of published models: their settings and their checkpoints.

``from_hf`` and ``to_hf`` convert one block between the parameters of ``dropless.moe`` and the
tensors of a Hugging Face checkpoint. Tensors are named relative to the block, as ``gate.weight``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dropless._config import MoEConfig
from dropless.models import _layouts, mixtral, olmoe, qwen3_moe
from dropless.models._presets import Preset, presets

__all__ = ["Preset", "families", "from_hf", "presets", "to_hf"]

_FAMILIES = {family.name: family for family in (mixtral.FAMILY, qwen3_moe.FAMILY, olmoe.FAMILY)}

families: tuple[str, ...] = tuple(_FAMILIES)
"""The values of ``model_type`` that ``from_hf`` and ``to_hf`` know."""


def from_hf(
    config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> tuple[MoEConfig, dict[str, dict[str, Any]]]:
    """Converts one block of a checkpoint into a config and parameters.

    Both layouts in use are read: ``fused``, where all experts share ``experts.gate_up_proj
    [E,2I,H]`` (gate rows first) and ``experts.down_proj [E,H,I]``, and ``per_expert``, one linear
    for each expert and matrix. Bits and dtypes are kept; NumPy arrays stay NumPy arrays, and JAX
    arrays (traced ones too) stay JAX arrays.

    Args:
      config: the model's ``config.json``.
      tensors: every tensor of the block under its name relative to the block.

    Returns:
      ``(cfg, params)`` for ``dropless.moe``.

    Raises:
      ValueError: a family that is not known, a setting that is missing or not supported, or
        tensors that are missing, left over, or not of the shape that the config says, listed.
      TypeError: ``config`` or ``tensors`` is no mapping.
    """
    family = _family(config)
    cfg, dims = family.read_config(config)
    layout = _layouts.layout_of(family, tensors)
    return cfg, _layouts.read(family, layout, dims, tensors)


def to_hf(
    cfg: MoEConfig,
    params: Mapping[str, Mapping[str, Any]],
    config: Mapping[str, Any],
    *,
    layout: str | None = None,
) -> dict[str, Any]:
    """Converts parameters, or their gradients, into a checkpoint's tensors; undoes ``from_hf``.

    Every output element is one input element, so the map is linear and gradients convert with it.

    Args:
      cfg: the block's config.
      params: the parameters of ``dropless.init``, or a pytree of the same structure.
      config: the model's ``config.json``.
      layout: ``"fused"`` or ``"per_expert"``, as in ``from_hf``. None takes the one that the
        transformers release named by ``config["transformers_version"]`` keeps in memory:
        ``per_expert`` before 5.0, ``fused`` since, and also where no release is named.

    Returns:
      Tensors under their names relative to the block.

    Raises:
      ValueError: a family that is not known, a ``cfg`` that is not the one ``config`` describes, or
        parameters that are missing, left over, or of another shape, listed.
      TypeError: ``cfg`` is no ``MoEConfig``, or ``params`` or ``config`` no mapping.
    """
    family = _family(config)
    expected, dims = family.read_config(config)
    _layouts.check_config(family.name, expected, cfg)
    layout = layout or _layouts.default_layout(config)
    if layout not in family.layouts:
        raise ValueError(f"layout: expected one of {list(family.layouts)}, got {layout!r}")
    return _layouts.write(family, layout, dims, params)


def _family(config: Mapping[str, Any]) -> _layouts.Family:
    _layouts.check_mapping("config", config)
    name = config.get("model_type")
    if not isinstance(name, str) or name not in _FAMILIES:
        raise ValueError(f"config['model_type']: expected one of {list(families)}, got {name!r}")
    return _FAMILIES[name]
