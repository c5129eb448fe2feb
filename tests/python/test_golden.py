"""Blocks of published models against vectors made with their reference implementation."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
from golden import FAMILIES, FILES, TOLERANCE, assert_block_matches, load

pytestmark = pytest.mark.any_jax


@pytest.mark.parametrize("precision", ["f32", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_all_gradients(family, precision):
    assert_block_matches(family, precision, jax.devices("cpu")[0])


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
