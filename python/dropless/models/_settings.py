"""Settings of a model's ``config.json``: releases differ in their names, none in their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}


# What a multimodal model's config says once for all its parts.
_OF_ALL_PARTS = ("model_type", "transformers_version", "quantization_config")


def text_config(config: Config) -> Config:
    """The language model's part of a multimodal model's config."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    outer = {name: config[name] for name in _OF_ALL_PARTS if name in config}
    return outer | {name: value for name, value in inner.items() if value is not None}


def setting(config: Config, *names: str) -> Any:
    """The one value that a config gives under any of these names.

    A list holds a value for each layer; it counts as one value where all layers agree.
    """
    values = {
        name: _one_of_all_layers(name, config[name]) for name in names if _given(config, name)
    }
    if not values:
        raise ValueError(f"config: expected {' or '.join(names)}, found none")
    if len(set(values.values())) > 1:
        raise ValueError(f"config: expected one value, got {values}")
    return next(iter(values.values()))


def size(config: Config, *names: str) -> int:
    """A ``setting`` that is a size."""
    value = setting(config, *names)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config: expected {' or '.join(names)} to be an int >= 1, got {value!r}")
    return value


def optional(config: Config, name: str, default: Any) -> Any:
    """A ``setting`` that may be missing or null."""
    return setting(config, name) if _given(config, name) else default


def activation(config: Config) -> str:
    """Our name of the config's ``hidden_act``."""
    name = config["hidden_act"] if _given(config, "hidden_act") else "silu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(
            f"config['hidden_act']: expected one of {list(_ACTIVATIONS)}, got {name!r}"
        )
    return _ACTIVATIONS[name]


def refuse(config: Config, name: str, why: str, *allowed: Any) -> None:
    """Raises unless the setting is missing, null, or one of the allowed values."""
    value = config.get(name)
    if value is not None and value not in allowed:
        raise ValueError(f"config[{name!r}]: {why}; expected {list(allowed)}, got {value!r}")


def _given(config: Config, name: str) -> bool:
    return config.get(name) is not None


def _one_of_all_layers(name: str, value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    if not value or any(v != value[0] for v in value):
        raise ValueError(
            f"config[{name!r}]: layers differ, {value}; give the config the value of this block's "
            f"layer"
        )
    return value[0]
