"""The checked conversion between a block's parameters and a checkpoint's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dropless._config import MoEConfig
from dropless._params import PreparedExperts, param_shapes
from dropless.models import _fp8, _mxfp4
from dropless.models._families import Family, Layout
from dropless.models._mxfp4 import MXFP4Experts
from dropless.models._rules import PerExpert, Shapes

_PER_EXPERT_NAME = re.compile(r"experts\.\d+\.")
# Fields of MoEConfig that say which function the block is; the others say how it is computed.
_BLOCK_FIELDS = (
    "num_experts",
    "experts_per_token",
    "expert_dim",
    "router",
    "activation",
    "expert_bias",
    "shared_expert_dim",
    "shared_expert_gate",
)
_LISTED = 6  # names an error shows of each kind: enough to see the pattern, short with 128 experts


def layout_of(family: Family, tensors: Mapping[str, Any]) -> str:
    """The layout these tensors are in, by their names."""
    check_mapping("tensors", tensors)
    odd = [name for name in tensors if not isinstance(name, str)]
    if odd:
        raise TypeError(f"tensors: expected names, got {odd[0]!r}")
    per_expert = any(_PER_EXPERT_NAME.match(name) for name in tensors)
    if per_expert and "per_expert" in family.layouts:
        return "per_expert"

    def known(layout: str) -> int:
        names = [getattr(rule, "tensor", None) for rule in family.layouts[layout]]
        return sum(name in tensors for name in names)

    return max((name for name in family.layouts if name != "per_expert"), key=known)


def default_layout(family: Family, config: Mapping[str, Any]) -> str:
    # Release 5.0 of transformers replaced the tensors of released files by the fused ones.
    version = re.match(r"\d+", str(config.get("transformers_version") or "5"))
    if version is None or int(version[0]) >= 5:
        return "fused"
    return next((name for name in family.layouts if name != "fused"), "fused")


def leaf_shapes(cfg: MoEConfig, model_dim: int) -> Shapes:
    """The parameters' shapes, by ``group.leaf``."""
    groups = param_shapes(model_dim, cfg)
    return {f"{group}.{leaf}": s for group, leaves in groups.items() for leaf, s in leaves.items()}


def rules_of(layout: Layout, shapes: Shapes) -> Layout:
    """The rules about parameters that the block has."""
    return tuple(rule for rule in layout if set(rule.leaves) <= shapes.keys())


def read(
    label: str, layout: Layout, shapes: Shapes, tensors: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Tensors to parameters, after checking that they are exactly those of the layout.

    Tensors are asked for one by one, and not held. FP8 and MXFP4 matrices become bfloat16.
    """
    check_tensors(label, layout, shapes, tensors)

    def load(name: str) -> Any:
        blocks = _mxfp4.blocks_name(name)
        if blocks in tensors:
            scales = _as_array(tensors[_mxfp4.scales_name(name)])
            return _mxfp4.decoded(name, _as_array(tensors[blocks]), scales)
        value = _as_array(tensors[name])
        scale = _fp8.scale_name(name)
        return value if scale not in tensors else _fp8.decoded(value, _as_array(tensors[scale]))

    params: dict[str, dict[str, Any]] = {}
    for rule in rules_of(layout, shapes):
        for name, value in rule.read(shapes, load).items():
            group, leaf = name.split(".")
            params.setdefault(group, {})[leaf] = value
    return params


def check_tensors(label: str, layout: Layout, shapes: Shapes, tensors: Mapping[str, Any]) -> None:
    """Raises unless the tensors are those of the layout, with the scales of FP8 and MXFP4 ones."""
    experts = shapes["experts.gate"][0]
    if any(isinstance(rule, PerExpert) for rule in layout) and len(tensors) < experts:
        # Before the names of all tensors are made: there may be absurdly many.
        raise ValueError(
            f"{label}: tensors do not fit; the config says {experts} experts of several tensors "
            f"each, but there are {len(tensors)} in all: {_some(list(tensors))}"
        )
    expected = _union(rule.tensors(shapes) for rule in rules_of(layout, shapes))
    given = {name: _shape_of(tensors, name) for name in tensors}
    stored: dict[str, tuple[int, ...]] = {}
    for name, shape in expected.items():
        scale = _fp8.scale_name(name)
        if _mxfp4.blocks_name(name) in given:
            stored |= _mxfp4.stored_shapes(name, shape)
            continue
        stored[name] = shape
        if scale in given or (name in given and _fp8.is_fp8(_dtype_of(tensors, name))):
            stored[scale] = _fp8.scale_shape(shape)
    check(f"{label}: tensors", stored, given)


def write(
    label: str,
    layout: Layout,
    shapes: Shapes,
    params: Mapping[str, Mapping[str, Any]],
    prepared: PreparedExperts | MXFP4Experts | None,
) -> Iterator[tuple[str, Any]]:
    """Parameters to tensors, after checking that they are exactly those of the block.

    Matrices are those of ``prepared`` where it is given, in FP8 or MXFP4 with their scales.
    """
    check_mapping("params", params)
    for group, leaves in params.items():
        check_mapping(f"params[{group!r}]", leaves)
    arrays = {
        f"{group}.{leaf}": _as_array(value)
        for group, leaves in params.items()
        for leaf, value in leaves.items()
    }
    check(f"{label}: params", shapes, {name: tuple(a.shape) for name, a in arrays.items()})
    for rule in rules_of(layout, shapes):
        if isinstance(prepared, MXFP4Experts):
            for name, value in rule.write(shapes, arrays):
                yield from _mxfp4.written(name, value, prepared)
        elif prepared is not None and _fp8.is_matrix(rule):
            yield from _fp8.written(rule, shapes, prepared)
        else:
            yield from rule.write(shapes, arrays)


def check_mapping(what: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{what}: expected a mapping, got {type(value).__name__}")


def check_config(family: str, expected: MoEConfig, given: MoEConfig) -> None:
    """Refuses a config whose block is another than the one the checkpoint's config describes."""
    if not isinstance(given, MoEConfig):
        raise TypeError(f"cfg: expected dropless.MoEConfig, got {type(given).__name__}")
    pairs = [(name, getattr(expected, name), getattr(given, name)) for name in _BLOCK_FIELDS]
    wrong = [f"{name}: config says {a}, cfg has {b}" for name, a, b in pairs if a != b]
    if wrong:
        raise ValueError(f"cfg: not the {family} block that config describes; " + "; ".join(wrong))


def check(what: str, expected: Shapes, given: Shapes) -> None:
    missing = [f"{name} {shape}" for name, shape in expected.items() if name not in given]
    unexpected = [f"{name} {shape}" for name, shape in given.items() if name not in expected]
    wrong = [
        f"{name} expected {shape}, got {given[name]}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "wrong shape": wrong}
    if any(problems.values()):
        parts = [f"{kind}: {_some(names)}" for kind, names in problems.items() if names]
        raise ValueError(f"{what} do not fit; " + "; ".join(parts))


def _some(names: list[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _union(mappings: Iterator[Shapes]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for mapping in mappings:
        twice = out.keys() & mapping.keys()
        if twice:
            raise ValueError(f"written twice: {sorted(twice)}")
        out.update(mapping)
    return out


def _shape_of(tensors: Mapping[str, Any], name: str) -> tuple[int, ...]:
    # A checkpoint on disk knows shapes and dtypes without reading what has them.
    known = getattr(tensors, "shape_of", None)
    return known(name) if known is not None else tuple(np.shape(tensors[name]))


def _dtype_of(tensors: Mapping[str, Any], name: str) -> Any:
    known = getattr(tensors, "dtype_of", None)
    return known(name) if known is not None else _as_array(tensors[name]).dtype


def _as_array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else np.asarray(value)
