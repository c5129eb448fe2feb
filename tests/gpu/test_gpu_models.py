"""Blocks of published models on a GPU: golden families in float32, full-size blocks in bfloat16.

The tests are skipped without a GPU.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import dropless

sys.path.append(str(Path(__file__).parent.parent / "python"))
from gpu import GPU, needs_gpu

import golden
import oracle

pytestmark = needs_gpu


@pytest.mark.parametrize("family", golden.FAMILIES)
def test_outputs_and_all_gradients(family):
    golden.assert_block_matches(family, "f32", GPU)


# Tokens of a full-size block, and the float32 weights of one projection it must hold.
BLOCKS = {"qwen3-30b-a3b": 8191, "deepseek-v3": 2047}
CHECKED = (0, 1, 1000, -1)  # tokens


@pytest.mark.parametrize("name", BLOCKS)
def test_full_size_block(name):
    """Every expert of the block; tokens against the same formulas in float32 over all experts."""
    cfg, model_dim = dropless.models.presets[name]
    cfg = dataclasses.replace(cfg, precision="bf16", strict=True)
    shape = (BLOCKS[name], model_dim)
    with jax.default_device(GPU):
        params = dropless.init(jax.random.key(1), model_dim, cfg, param_dtype=jnp.bfloat16)
        if cfg.router.selection_bias:
            bias = 0.02 * jax.random.normal(jax.random.key(2), (cfg.num_experts,))
            params["router"]["selection_bias"] = bias
        x = jax.random.normal(jax.random.key(3), shape, jnp.float32).astype(jnp.bfloat16)
        dy = jax.random.normal(jax.random.key(4), shape, jnp.float32).astype(jnp.bfloat16)

        def step(x, params, dy):
            y, vjp, aux = jax.vjp(lambda x, p: dropless.moe(x, p, cfg), x, params, has_aux=True)
            dx, d_params = vjp(dy)
            finite = jax.tree.map(lambda a: jnp.isfinite(a).all(), (y, dx, d_params))
            return y, dx, aux, finite, jax.tree.map(lambda a: jnp.any(a != 0), d_params)

        y, dx, aux, finite, moved = jax.jit(step)(x, params, dy)
        assert all(bool(leaf) for leaf in jax.tree.leaves(finite))
        for path, leaf in oracle.leaves(moved):
            assert bool(leaf) != ("selection_bias" in path), path
        assert int(aux.dropped_tokens) == 0
        assert int(aux.expert_counts.sum()) == shape[0] * cfg.experts_per_token

        tokens = jnp.asarray(CHECKED)

        @jax.jit
        def in_float32(x, params, dy):
            wide = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float32), tree)  # noqa: E731
            with jax.default_matmul_precision("highest"):
                y, vjp = jax.vjp(lambda x: oracle.moe(x, wide(params), cfg)[0], wide(x))
                return y, vjp(wide(dy))[0]

        y_want, dx_want = in_float32(x[tokens], params, dy[tokens])
        length = max(model_dim, cfg.expert_dim)
        oracle.assert_close("y", y[tokens], y_want, oracle.bound("bf16", length, 7))
        oracle.assert_close("dx", dx[tokens], dx_want, oracle.bound("bf16", length, 14))
