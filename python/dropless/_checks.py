"""Checks of settings and arrays: errors name the argument, what was expected and what came."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Real settings travel to the kernels as float32.
_FLOAT32 = np.finfo(np.float32)
# Above it float32, which the table of experts is kept in, does not hold every expert's number.
MAX_EXPERTS = 2**24
# No axis of an array is longer: row numbers are int32.
_MAX_SIZE = 2**31 - 1


def unwrap_numbers(config: Any) -> None:
    """Numpy's scalars in a frozen dataclass become Python's: settings read from an array or a
    data frame are those of the same value written out."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, np.generic):
            object.__setattr__(config, field.name, value.item())


def check_one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not isinstance(value, str | None) or value not in allowed:
        choices = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{name} must be one of {choices}; got {value!r}.")


def check_integer(name: str, value: Any, minimum: int, maximum: int | None = _MAX_SIZE) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an int >= {minimum}; got {value!r}.")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}; got {value!r}.")


def check_real(name: str, value: Any, *, positive: bool) -> None:
    least = float(_FLOAT32.tiny) if positive else 0.0
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value <= float(_FLOAT32.max):
        kind = "> 0" if positive else ">= 0"
        raise ValueError(f"{name} must be a finite number {kind} in float32; got {value!r}.")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False; got {value!r}.")


def as_array(name: str, value: Any, expected: str) -> jax.Array:
    """``value`` as ``jnp.asarray`` takes it, or an error in words that it is no array of numbers.

    Args:
      expected: shape and dtype, for the error: ``"[T, H] float32 or bfloat16"``.
    """
    try:
        # Of None, older releases of JAX make an array of one NaN.
        if value is not None:
            return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"{name} must be an array {expected}; got {in_words(value)}.")


def in_words(value: Any) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        return f"{value.dtype.name}{list(value.shape)}"
    return f"{kind} {value!r}" if isinstance(value, str | int | float) else kind


def check_key(name: str, key: Any) -> None:
    try:
        jax.eval_shape(jax.random.bits, key)  # traced, not run
    except (TypeError, ValueError, OverflowError):
        came = f"{key.dtype}{list(key.shape)}" if isinstance(key, jax.Array) else in_words(key)
        raise TypeError(
            f"{name} must be one PRNG key, as jax.random.key(0) makes it; got {came}."
        ) from None
