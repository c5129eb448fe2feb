"""What the layer keeps for its backward pass, and what buffers its compiled form holds."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
import oracle

T, H = 96, 40
CONFIG = dropless.MoEConfig(11, 3, 24)


def saved_bytes(cfg, x, params, prepared=None):
    """Bytes that the vjp holds beyond its arguments, and beyond x."""
    _, vjp = jax.vjp(lambda x, p: dropless.moe(x, p, cfg, prepared=prepared)[0], x, params)
    arguments = {id(leaf) for leaf in jax.tree.leaves((params, prepared))}
    arguments |= {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, prepared, x))}
    held = {}
    for leaf in jax.tree.leaves(vjp):
        if isinstance(leaf, jax.Array) and leaf.size:
            held[leaf.unsafe_buffer_pointer()] = leaf.nbytes
    return sum(size for pointer, size in held.items() if pointer not in arguments)


def routing_bytes(t, e, k):
    """Logits, ids, weights, both maps, offsets; and a copy of x of which only the shape differs."""
    return t * e * 4 + 4 * t * k * 4 + (e + 1) * 4


@pytest.mark.parametrize(
    ("precision", "save_h", "x_dtype", "h_bytes"),
    [
        ("f32", "bf16", jnp.float32, 4.0),
        ("bf16", "bf16", jnp.float32, 2.0),
        ("bf16", "bf16", jnp.bfloat16, 2.0),
        ("bf16", "fp8", jnp.bfloat16, 1.0),
        ("fp8", "bf16", jnp.bfloat16, 2.0),
        ("fp8", "fp8", jnp.bfloat16, 1.0),
        # One config for GPUs and CPUs: where "auto" chooses float32, h stays float32.
        ("auto", "fp8", jnp.float32, 4.0),
        ("auto", "fp8", jnp.bfloat16, 1.0),
    ],
)
def test_saved_activations_are_x_h_and_the_routing(precision, save_h, x_dtype, h_bytes):
    cfg = dataclasses.replace(CONFIG, precision=precision, save_h=save_h)
    x, params, _ = oracle.layer_case(cfg, (T, H), x_dtype)
    m, i = T * cfg.experts_per_token, cfg.expert_dim
    h = m * 2 * i * h_bytes + (m * 2 * 4 if h_bytes == 1.0 else 0)
    limit = x.nbytes + h + routing_bytes(T, cfg.num_experts, cfg.experts_per_token)
    found = saved_bytes(cfg, x, params)
    # At least h, or the measurement is wrong; at most the formula and some scalars.
    assert h <= found <= limit + 256


def test_nothing_of_h_is_written_without_a_gradient():
    x, params, _ = oracle.layer_case(CONFIG, (T, H))
    text = jax.jit(lambda x, p: dropless.moe(x, p, CONFIG)[0]).lower(x, params).as_text()
    assert f"{T * 3}x2x24x" not in text
    text = (
        jax.jit(jax.grad(lambda x, p: dropless.moe(x, p, CONFIG)[0].sum()))
        .lower(x, params)
        .as_text()
    )
    assert f"{T * 3}x2x24x" in text


@pytest.mark.parametrize("precision", ["f32", "bf16", "fp8"])
def test_k1_no_buffer_has_a_factor_of_experts_times_rows(precision):
    # FP8 weight gradients have scratch of M + 128 E rows, which test_explain.py holds them to.
    cfg = dataclasses.replace(CONFIG, precision=precision, wgrad_precision="bf16")
    x, params, dy = oracle.layer_case(cfg, (T, H))

    def loss(x, params):
        y, aux = dropless.moe(x, params, cfg)
        return jnp.sum(y * dy) + aux.load_balance_loss

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, params).compile()
    m, e = T * cfg.experts_per_token, cfg.num_experts
    width = {"f32": 4, "s32": 4, "bf16": 2, "f8e4m3fn": 1, "u8": 1, "pred": 1}
    sizes = {
        width[dtype] * int(np.prod([int(n) for n in dims.split(",")]))
        for dtype, dims in re.findall(rf"\b({'|'.join(width)})\[([\d,]+)\]", compiled.as_text())
    }
    # The largest honest arrays, in bytes: h and dh, a stack of matrices, and a workspace of M rows
    # of H with a number a row, each part rounded up to 256 bytes. FP8 products in steps pad each
    # width to the next multiple of 16, which Hopper's copies need.
    width_of = (lambda n: -(-n // 16) * 16) if precision == "fp8" else (lambda n: n)
    i, h = width_of(cfg.expert_dim), width_of(H)
    largest = 4 * max(m * 2 * i, m * (h + 1) + 128, e * h * i)
    assert max(sizes) <= largest < 4 * e * m * min(H, cfg.expert_dim)
    assert len(sizes) > 10  # the pattern found arrays at all


def test_unused_weight_gradients_are_not_computed():
    # Frozen experts: only d(x) and d(router) are asked for.
    x, params, dy = oracle.layer_case(CONFIG, (T, H))

    def loss(x, router):
        return jnp.sum(dropless.moe(x, {**params, "router": router}, CONFIG)[0] * dy)

    text = jax.jit(jax.grad(loss, (0, 1))).lower(x, params["router"]).compile().as_text()
    assert "dropless_expert_up_backward" in text and "dropless_grouped_wgrad" not in text

    def weights_only(experts):
        return jnp.sum(dropless.moe(x, {**params, "experts": experts}, CONFIG)[0] * dy)

    text = jax.jit(jax.grad(weights_only)).lower(params["experts"]).compile().as_text()
    assert "dropless_grouped_wgrad" in text and "dropless_expert_up_backward" not in text
    assert "dropless_route_backward" not in text
