"""Blocks of published models against vectors made with their reference implementation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless

pytestmark = pytest.mark.any_jax

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
# By tools/golden_families.py: the other families, and other settings of some.
FILES = {path.stem: path for path in sorted(GOLDEN.rglob("*.npz"))}
FAMILIES = list(FILES)
# Bound of the golden files' own README: relative to each array's largest value, in float32.
TOLERANCE = 1e-5


def is_state(name):
    return name.endswith(("e_score_correction_bias", "expert_bias"))


def load(family):
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


@pytest.mark.parametrize("precision", ["f32", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_all_gradients(family, precision):
    config, arrays, tensors, gradients = load(family)
    cfg, params = dropless.models.from_hf(config, tensors)
    cfg = dataclasses.replace(cfg, precision=precision)

    def block(x, params):
        return dropless.moe(x, params, cfg)[0]

    params = jax.tree.map(jnp.asarray, params)
    y, vjp = jax.vjp(jax.jit(block), jnp.asarray(arrays["x"]), params)
    dx, d_params = vjp(jnp.asarray(arrays["dy"]))
    assert_close("y", y, arrays["y"])
    assert_close("dx", dx, arrays["dx"])
    got = dropless.models.to_hf(cfg, d_params, config, layout="fused")
    assert got.keys() == gradients.keys() | {name for name in got if is_state(name)}
    for name, want in gradients.items():
        assert_close(name, got[name], want)


def test_every_golden_file_is_used():
    assert len(FAMILIES) == 12 + 18
    read = {
        json.loads(str(np.load(path)["meta"]))["config"]["model_type"] for path in FILES.values()
    }
    # These share the class of a neighbour.
    assert set(dropless.models.families) - read == {"kimi_k2", "llama4", "qwen3_5_moe"}


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bit_equal(family):
    config, _, tensors, _ = load(family)
    cfg, params = dropless.models.from_hf(config, tensors)
    out = dropless.models.to_hf(cfg, params, config, layout="fused")
    assert out.keys() == tensors.keys()
    for name, want in tensors.items():
        assert out[name].dtype == want.dtype and out[name].shape == want.shape, name
        assert out[name].tobytes() == want.tobytes(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_is_dropped_and_counts_are_complete(family):
    config, arrays, tensors, _ = load(family)
    cfg, params = dropless.models.from_hf(config, tensors)
    _, aux = dropless.moe(jnp.asarray(arrays["x"]), jax.tree.map(jnp.asarray, params), cfg)
    tokens = arrays["x"].shape[0] * arrays["x"].shape[1]
    assert int(aux.dropped_tokens) == 0
    assert int(aux.expert_counts.sum()) == tokens * cfg.experts_per_token


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_f7_norm_topk_prob_of_the_config_decides(family):
    """With the flag the other way the output is another, by far more than the tolerance."""
    config, arrays, tensors, _ = load(family)
    flipped = config | {"norm_topk_prob": not config["norm_topk_prob"]}
    cfg, params = dropless.models.from_hf(flipped, tensors)
    y, _ = dropless.moe(jnp.asarray(arrays["x"]), jax.tree.map(jnp.asarray, params), cfg)
    error = np.abs(np.asarray(y) - arrays["y"]).max() / np.abs(arrays["y"]).max()
    assert error > 1000 * TOLERANCE


def test_mixtral_renormalises_whatever_the_config_says():
    config, _, tensors, _ = load("mixtral")
    cfg, _ = dropless.models.from_hf(config | {"norm_topk_prob": False}, tensors)
    assert cfg.router.renormalize
