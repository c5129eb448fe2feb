"""Checks of settings: errors name the setting, what was expected and what came."""

from __future__ import annotations

from typing import Any

import numpy as np

# Real settings travel to the kernels as float32.
_FLOAT32 = np.finfo(np.float32)


def check_one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not isinstance(value, str | None) or value not in allowed:
        choices = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{name} must be one of {choices}; got {value!r}.")


def check_integer(name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an int >= {minimum}; got {value!r}.")


def check_real(name: str, value: Any, *, positive: bool) -> None:
    least = float(_FLOAT32.tiny) if positive else 0.0
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value <= float(_FLOAT32.max):
        kind = "> 0" if positive else ">= 0"
        raise ValueError(f"{name} must be a finite number {kind} in float32; got {value!r}.")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False; got {value!r}.")
