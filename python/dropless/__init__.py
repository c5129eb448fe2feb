"""Dropless: Mixture-of-Experts layers for JAX that drop no token.

``moe`` is the layer as a pure function, ``MoELayer`` the Flax NNX layer, ``linen.MoELayer`` the
Flax Linen one. ``route``, ``permute``, ``ragged_dot``, ``grouped_wgrad`` and ``unpermute`` are its
pieces.
"""

from __future__ import annotations

import importlib
from typing import Any

from dropless import checkpoint_policies
from dropless._activation import Activation
from dropless._balance import load_balance_loss, update_selection_bias
from dropless._config import MoEConfig, RouterConfig
from dropless._export import export_disabled_checks
from dropless._library import libraries as _libraries
from dropless._moe import MoEAux, moe
from dropless._params import PreparedExperts, PreparedWeight, init, prepare_experts, trainable_mask
from dropless._pieces import grouped_wgrad, permute, ragged_dot, unpermute
from dropless._routing import Plan, Routing, plan, route

__version__ = _libraries.version

# Loaded when first asked for: importing Flax would more than double the time of `import dropless`.
_MODULES = ("linen", "models", "nnx", "train")
_ATTRIBUTES = {
    "MoELayer": ("dropless.nnx", "MoELayer"),
    "explain": ("dropless._explain", "explain"),
    "info": ("dropless._info", "info"),
}

__all__ = [
    "Activation",
    "MoEAux",
    "MoEConfig",
    "MoELayer",
    "Plan",
    "PreparedExperts",
    "PreparedWeight",
    "RouterConfig",
    "Routing",
    "checkpoint_policies",
    "explain",
    "export_disabled_checks",
    "grouped_wgrad",
    "info",
    "init",
    "linen",
    "load_balance_loss",
    "models",
    "moe",
    "nnx",
    "permute",
    "plan",
    "prepare_experts",
    "ragged_dot",
    "route",
    "train",
    "trainable_mask",
    "unpermute",
    "update_selection_bias",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dropless.{name}")
    if name in _ATTRIBUTES:
        module, attribute = _ATTRIBUTES[name]
        value = getattr(importlib.import_module(module), attribute)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'dropless' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
