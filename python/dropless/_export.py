"""What ``jax.export`` needs to know about the layer's custom calls."""

from __future__ import annotations

from typing import Any

from dropless import _library


def export_disabled_checks() -> list[Any]:
    """Safety checks to disable when exporting a function that contains Dropless calls.

    Give them to ``jax.export.export(..., disabled_checks=)``. JAX refuses custom calls it does not
    know, because it cannot promise that they will mean the same later; the contract number in each
    target's name makes that promise here: a library of another contract does not have the name.
    """
    from jax import export  # a submodule that `import jax` does not load

    return [export.DisabledSafetyCheck.custom_call(_library.target(op)) for op in _library.OPS]
