"""Mixture-of-Experts blocks of published models: their settings and their checkpoints.

``from_hf`` and ``to_hf`` convert one block between the parameters of ``dropless.moe`` and the
tensors of a Hugging Face checkpoint. Tensors are named relative to the block, as ``gate.weight``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dropless._config import MoEConfig
from dropless._params import PreparedExperts
from dropless.models import _fp8, _layouts, _mxfp4
from dropless.models._families import FAMILIES, Family
from dropless.models._mxfp4 import MXFP4Experts
from dropless.models._presets import Preset, presets
from dropless.models._safetensors import Checkpoint, open_checkpoint
from dropless.models._safetensors_write import save_checkpoint
from dropless.models._settings import text_config

__all__ = [
    "Checkpoint",
    "MXFP4Experts",
    "Preset",
    "block_config",
    "families",
    "from_hf",
    "open_checkpoint",
    "prepared_from_hf",
    "presets",
    "save_checkpoint",
    "to_hf",
]

families: tuple[str, ...] = tuple(FAMILIES)
"""The values of ``model_type`` that ``from_hf`` and ``to_hf`` know."""


def block_config(config: Mapping[str, Any]) -> tuple[MoEConfig, int]:
    """The ``MoEConfig`` and the width H of the blocks that a model's ``config.json`` describes.

    Raises:
      ValueError: a family that is not known, or a setting that is missing or not supported.
    """
    _, family, config = _family(config)
    return family.read_config(config)


def from_hf(
    config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> tuple[MoEConfig, dict[str, dict[str, Any]]]:
    """Converts one block of a checkpoint into a config and parameters.

    The layouts of the family (docs/models.md) are told apart by the tensors' names. Bits and dtypes
    are kept, but for FP8 and MXFP4 matrices, which become bfloat16: MXFP4 exactly, FP8 rounded once
    (``prepared_from_hf`` keeps the codes of both). NumPy arrays stay NumPy arrays, and JAX arrays
    (traced ones too) stay JAX arrays. Tensors are looked up one at a time: of an
    ``open_checkpoint`` no more than one is in memory beside the result.

    Args:
      config: the model's ``config.json``.
      tensors: every tensor of the block under its name relative to the block, buffers such as
        selection biases included.

    Returns:
      ``(cfg, params)`` for ``dropless.moe``.

    Raises:
      ValueError: a family that is not known, a setting that is missing or not supported, or
        tensors that are missing, left over, or not of the shape that the config says, listed.
      TypeError: ``config`` or ``tensors`` is no mapping.
    """
    name, family, config = _family(config)
    cfg, model_dim = family.read_config(config)
    _fp8.check_config(config)
    layout = _layouts.layout_of(family, tensors)
    label, shapes = f"{name}, layout {layout}", _layouts.leaf_shapes(cfg, model_dim)
    return cfg, _layouts.read(label, family.layouts[layout], shapes, tensors)


def prepared_from_hf(
    config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> PreparedExperts | MXFP4Experts:
    """The experts of an FP8 or MXFP4 checkpoint, its own codes and scales.

    Of FP8, as the GEMMs read them, for ``moe(..., prepared=)`` with ``precision="fp8"`` beside the
    parameters of ``from_hf``. Of MXFP4, as they are stored, for ``to_hf(..., prepared=)`` alone.

    Args:
      config: the model's ``config.json``.
      tensors: as for ``from_hf``; matrices of experts float8_e4m3fn with ``<name>_scale_inv``, or
        ``<name>_blocks`` with ``<name>_scales``.

    Raises:
      ValueError: as ``from_hf``, and for experts that are in neither.
    """
    name, family, config = _family(config)
    cfg, model_dim = family.read_config(config)
    _fp8.check_config(config)
    layout = _layouts.layout_of(family, tensors)
    rules, shapes = family.layouts[layout], _layouts.leaf_shapes(cfg, model_dim)
    _layouts.check_tensors(f"{name}, layout {layout}", rules, shapes, tensors)
    rules = _layouts.rules_of(rules, shapes)
    if _mxfp4.is_stored(tensors):
        return _mxfp4.kept(rules, shapes, tensors)
    return _fp8.prepared(rules, shapes, tensors)


def to_hf(
    cfg: MoEConfig,
    params: Mapping[str, Mapping[str, Any]],
    config: Mapping[str, Any],
    *,
    layout: str | None = None,
    prepared: PreparedExperts | MXFP4Experts | None = None,
) -> dict[str, Any]:
    """Converts parameters, or their gradients, into a checkpoint's tensors; undoes ``from_hf``.

    Every output element is one input element, so the map is linear and gradients convert with it.

    Args:
      cfg: the block's config.
      params: the parameters of ``dropless.init``, or a pytree of the same structure.
      config: the model's ``config.json``.
      layout: ``"fused"`` or ``"per_expert"``, where the family has both (Granite: ``"fused"`` or
        ``"released"``). None takes the one that the transformers release named by
        ``config["transformers_version"]`` keeps in memory: ``fused`` since 5.0 and where no release
        is named, the other one before.
      prepared: the experts in FP8, of ``prepared_from_hf`` or ``dropless.prepare_experts``. Their
        codes and ``<name>_scale_inv`` are then written instead of the matrices in ``params``, bit
        for bit those that ``prepared_from_hf`` read. Or the ``MXFP4Experts`` of
        ``prepared_from_hf``: blocks and scales as they were read, where ``params`` still hold
        their numbers.

    Returns:
      Tensors under their names relative to the block.

    Raises:
      ValueError: a family that is not known, a ``cfg`` that is not the one ``config`` describes,
        parameters that are missing, left over, or of another shape, listed, or ``prepared`` that is
        not in FP8, not of this block, or in MXFP4 of other numbers than those of ``params``.
      TypeError: ``cfg`` is no ``MoEConfig``, or ``params`` or ``config`` no mapping.
    """
    name, family, config = _family(config)
    expected, model_dim = family.read_config(config)
    _layouts.check_config(name, expected, cfg)
    layout = layout or _layouts.default_layout(family, config)
    if layout not in family.layouts:
        raise ValueError(f"layout: expected one of {list(family.layouts)}, got {layout!r}")
    shapes = _layouts.leaf_shapes(expected, model_dim)
    if isinstance(prepared, MXFP4Experts):
        _mxfp4.check_prepared(prepared, _layouts.rules_of(family.layouts[layout], shapes), shapes)
    elif prepared is not None:
        _fp8.check_prepared(prepared, shapes)
    return dict(_layouts.write(name, family.layouts[layout], shapes, params, prepared))


def _family(config: Mapping[str, Any]) -> tuple[str, Family, Mapping[str, Any]]:
    _layouts.check_mapping("config", config)
    config = text_config(config)
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"config['model_type']: expected one of {list(families)}, got {name!r}")
    return name, FAMILIES[name], config
