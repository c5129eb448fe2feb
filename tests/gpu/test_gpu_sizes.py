"""Layers on a GPU whose arrays pass 2^31 elements: rows times width, and experts' weights.

What is read back is a few tokens and experts, held against float32 formulas over all experts.
Skipped without a GPU, or without the memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless

sys.path.append(str(Path(__file__).parent.parent / "python"))
from gpu import GPU, needs_gpu

import oracle

pytestmark = needs_gpu


def layer(num_experts, k, expert_dim, shape):
    cfg = dropless.MoEConfig(
        num_experts=num_experts,
        experts_per_token=k,
        expert_dim=expert_dim,
        precision="bf16",
        strict=True,
    )
    params = dropless.init(jax.random.key(1), shape[1], cfg, param_dtype=jnp.bfloat16)
    x, dy = (
        jax.random.normal(jax.random.key(i), shape, jnp.float32).astype(jnp.bfloat16)
        for i in (2, 3)
    )
    return cfg, params, x, dy


def wide(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float32), tree)


def assert_tokens_match(cfg, params, x, dy, y, dx, tokens):
    """y and dx of a few tokens."""
    tokens = jnp.asarray(tokens)

    @jax.jit
    def in_float32(x, params, dy):
        with jax.default_matmul_precision("highest"):
            y, vjp = jax.vjp(lambda x: oracle.moe(x, wide(params), cfg)[0], wide(x))
            return y, vjp(wide(dy))[0]

    y_want, dx_want = in_float32(x[tokens], params, dy[tokens])
    length = max(x.shape[1], cfg.expert_dim)
    oracle.assert_close("y", y[tokens], y_want, oracle.bound("bf16", length, 7))
    oracle.assert_close("dx", dx[tokens], dx_want, oracle.bound("bf16", length, 14))


@pytest.mark.parametrize(
    ("tokens", "model_dim", "num_experts", "expert_dim"),
    [(40_000, 7168, 64, 72), (300_000, 2048, 128, 40)],
)
def test_i1_rows_past_2_31_elements(tokens, model_dim, num_experts, expert_dim):
    k = 8
    assert tokens * k * model_dim > 2**31
    with jax.default_device(GPU):
        cfg, params, x, dy = layer(num_experts, k, expert_dim, (tokens, model_dim))

        @jax.jit
        def step(x, params, dy):
            y, vjp, aux = jax.vjp(lambda x, p: dropless.moe(x, p, cfg), x, params, has_aux=True)
            dx, d_params = vjp(dy)
            finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((y, dx, d_params))]
            return y, dx, d_params["experts"]["down"], aux, jnp.stack(finite)

        y, dx, d_down, aux, finite = step(x, params, dy)
        assert np.asarray(finite).all()
        assert int(aux.expert_counts.sum()) == tokens * k
        # Tokens at both ends, and those whose slots lie next to row 2^31 / H.
        edge = 2**31 // model_dim // k
        assert_tokens_match(cfg, params, x, dy, y, dx, [0, edge - 1, edge, edge + 1, tokens - 1])

        # The last expert's rows are the last of all: its weight gradient, from its tokens alone.
        last = num_experts - 1

        @jax.jit
        def d_down_of_last(x, params, dy):
            with jax.default_matmul_precision("highest"):
                logits = x.astype(jnp.float32) @ params["router"]["kernel"].astype(jnp.float32)
                ids, weights, *_ = oracle.route(logits, cfg.router, k)
                weight = jnp.sum(jnp.where(ids == last, weights, 0), -1)
                gate, up = (wide(params["experts"][n][last]) for n in ("gate", "up"))
                a = jax.nn.silu(wide(x) @ gate) * (wide(x) @ up)
                return (weight[:, None] * a).T @ wide(dy)

        want = d_down_of_last(x, params, dy)
        oracle.assert_close("d_down", d_down[last], want, oracle.bound("bf16", tokens, 14))


def test_i1_weights_past_2_31_elements():
    tokens, model_dim, num_experts, expert_dim = 514, 4096, 64, 14336
    assert num_experts * model_dim * expert_dim > 2**31
    with jax.default_device(GPU):
        cfg, params, x, dy = layer(num_experts, 2, expert_dim, (tokens, model_dim))
        # An expert that no token may choose: its gradient must be exactly 0, whatever lay there.
        idle = num_experts - 2
        params["router"]["kernel"] = params["router"]["kernel"].at[:, idle].set(0)
        params["router"]["kernel"] = params["router"]["kernel"].at[0, idle].set(-1e4)
        x = x.at[:, 0].set(jnp.abs(x[:, 0]) + 1)

        @jax.jit
        def step(x, params, dy):
            y, vjp = jax.vjp(lambda x, p: dropless.moe(x, p, cfg)[0], x, params)
            dx, d_params = vjp(dy)
            experts = d_params["experts"]
            sums = {
                n: jnp.sum(jnp.square(g.astype(jnp.float32)), (1, 2)) for n, g in experts.items()
            }
            return y, dx, sums

        y, dx, sums = step(x, params, dy)
        for name, squares in sums.items():
            squares = np.asarray(squares)
            assert np.isfinite(squares).all() and squares[idle] == 0, name
            assert (np.delete(squares, idle) > 0).all(), name
        assert_tokens_match(cfg, params, x, dy, y, dx, [0, 257, tokens - 1])
