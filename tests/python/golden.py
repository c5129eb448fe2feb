"""Vectors of published models' blocks, made with their reference implementation, and how a block
is held against them on any device.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np

import dropless

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
# By tools/golden_families.py: the other families, and other settings of some.
FILES = {path.stem: path for path in sorted(GOLDEN.rglob("*.npz"))}
FAMILIES = list(FILES)
# Bound of the golden files' own README: relative to each array's largest value, in float32.
TOLERANCE = 1e-5


def is_state(name):
    return name.endswith(("e_score_correction_bias", "expert_bias"))


def load(family):
    """config, input and output arrays, tensors of the block, gradients of its parameters."""
    with np.load(FILES[family]) as data:
        arrays = {name: data[name] for name in data.files}
    config = json.loads(str(arrays.pop("meta")))["config"]
    tensors, buffers, gradients = (
        {name.removeprefix(kind): a for name, a in arrays.items() if name.startswith(kind)}
        for kind in ("param/", "buffer/", "grad/")
    )
    return config, arrays, tensors | buffers, gradients


def assert_close(name, got, want):
    assert got.shape == want.shape and got.dtype == want.dtype, name
    if is_state(name):  # a parameter in name only: it reaches no weight
        assert not np.asarray(got).any() and not want.any(), name
        return
    largest = np.abs(want).max()
    error = np.abs(np.asarray(got, np.float64) - want).max() / largest
    assert largest > 0 and error <= TOLERANCE, f"{name}: relative error {error:.2e}"


def assert_block_matches(family, precision, device):
    """The output and every gradient of the family's block, computed on ``device``."""
    config, arrays, tensors, gradients = load(family)
    cfg, params = dropless.models.from_hf(config, tensors)
    cfg = dataclasses.replace(cfg, precision=precision)

    def block(x, params):
        return dropless.moe(x, params, cfg)[0]

    x, dy, params = jax.device_put((arrays["x"], arrays["dy"], params), device)
    y, vjp = jax.vjp(jax.jit(block), x, params)
    dx, d_params = vjp(dy)
    assert_close("y", y, arrays["y"])
    assert_close("dx", dx, arrays["dx"])
    got = dropless.models.to_hf(cfg, d_params, config, layout="fused")
    assert got.keys() == gradients.keys() | {name for name in got if is_state(name)}
    for name, want in gradients.items():
        assert_close(name, got[name], want)
