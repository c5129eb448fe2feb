"""Layers of every width on a GPU, and groups that begin at every residue of 256 rows.

Skipped without a GPU. tools/gpu/run.sh runs this file once more with DROPLESS_GPU_PATH=sm80.
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

WIDTHS = (1, 7, 64, 200, 1408, 1416, 2880)


def gradients(cfg, coefficients, **options):
    def scalar(x, params, dy):
        outputs = dropless.moe(x, params, cfg, **options)
        return oracle.objective(outputs, dy, coefficients), outputs

    return jax.jit(jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("model_dim", WIDTHS)
def test_f3_every_width(model_dim, width):
    narrow = min(model_dim, width) < 64
    tokens = 41 if narrow else 83
    # No loss where each token's gradients are looked at alone.
    coefficients = (0.0, 0.0, 0.0) if narrow else (0.03, 0.02, 0.05)
    cfg = dropless.MoEConfig(3, 2, width, precision="bf16", strict=True)
    with jax.default_device(jax.devices("cpu")[0]):
        shape = (tokens, model_dim)
        x, params, dy = oracle.layer_case(cfg, shape, jnp.bfloat16, jnp.bfloat16)
        (y_want, aux_want), (dx_want, dparams_want) = oracle.value_and_gradients(
            cfg, x, params, None, dy, coefficients
        )
    step = gradients(cfg, coefficients)
    (_, (y, aux)), (dx, dparams) = step(*jax.device_put((x, params, dy), GPU))
    np.testing.assert_array_equal(aux.expert_counts, aux_want["expert_counts"])
    length = max(tokens, model_dim, width)
    forward, backward = (oracle.bound("bf16", length, n) for n in (7, 14))
    wanted = dict(oracle.leaves(dparams_want))
    if not narrow:
        oracle.assert_close("y", y, y_want, forward)
        oracle.assert_close("dx", dx, dx_want, backward)
        for path, gradient in oracle.leaves(dparams):
            matrices = gradient.ndim == 3
            oracle.assert_close(path, gradient, wanted[path], backward, groups=matrices)
        return
    # Sums of few terms may be far smaller than their terms: every element has a scale of its own.
    with jax.default_device(jax.devices("cpu")[0]):
        scales = condition(cfg, x, params, dy)
    results = (y, y_want, forward), (dx, dx_want, backward), (dparams, dparams_want, backward)
    for scale, (got, want, bound) in zip(scales, results, strict=True):
        want = dict(oracle.leaves(want))
        scale = dict(oracle.leaves(scale))
        for path, leaf in oracle.leaves(got):
            size = np.hypot(scale[path], want[path])
            error = np.abs(np.asarray(leaf, np.float64) - want[path]) / np.where(size > 0, size, 1)
            assert np.isfinite(error).all(), path
            # As in assert_close; experts have errors of their own, the rest may share one.
            assert oracle.rms(error) <= bound * oracle.spread(cfg.num_experts), path
            assert error.max() <= 16 * bound, path


def condition(cfg, x, params, dy, samples=4):
    """How far (y, dx, dparams) move when their terms do, relative to that: what roundings act on.

    Root mean square over random relative changes of every element of the experts, in float64, each
    token with changes of its own: they stand for roundings of h, A and dh. Three factors of a term
    change at once, where a rounding changes one.
    """
    rng = np.random.default_rng(5)
    step = 2.0**-20

    def results(i, experts):
        (y, _), (dx, dparams) = oracle.value_and_gradients(
            cfg, x[i : i + 1], {**params, "experts": experts}, None, dy[i : i + 1], (0.0,) * 3
        )
        return y[0], dx[0], dparams

    def moved(leaf):
        return np.asarray(leaf, np.float64) * (1 + step * rng.standard_normal(leaf.shape))

    per_token = []
    for i in range(len(x)):
        still = results(i, params["experts"])
        squares = 0.0
        for _ in range(samples):
            other = results(i, jax.tree.map(moved, params["experts"]))
            changes = jax.tree.map(lambda a, b: np.square((a - b) / step), other, still)
            squares = changes if squares == 0.0 else jax.tree.map(np.add, squares, changes)
        per_token.append(jax.tree.map(lambda leaf: leaf / (3 * samples), squares))
    y, dx, dparams = zip(*per_token, strict=True)
    sums = jax.tree.map(lambda *leaves: np.sqrt(np.sum(leaves, 0)), *dparams)
    return np.sqrt(np.stack(y)), np.sqrt(np.stack(dx)), sums


# Odd sizes of 256 experts begin at every residue of 256: below, around and above a tile's rows.
@pytest.mark.parametrize("size", [1, 127, 129, 257])
def test_groups_at_every_offset(size):
    num_experts, model_dim, width = 256, 72, 40
    tokens = num_experts * size
    offsets = np.arange(num_experts) * size
    assert len(set(offsets % 256)) == 256
    cfg = dropless.MoEConfig(num_experts, 1, width, precision="bf16", strict=True)
    with jax.default_device(jax.devices("cpu")[0]):
        x, params, dy = oracle.layer_case(cfg, (tokens, model_dim), jnp.bfloat16, jnp.bfloat16)
    expert_of_token = np.random.default_rng(3).permutation(np.repeat(np.arange(num_experts), size))
    ids = jnp.asarray(expert_of_token[:, None], jnp.int32)
    step = gradients(cfg, (0, 0, 0), expert_ids=ids)
    (_, (y, aux)), (dx, dparams) = step(*jax.device_put((x, params, dy), GPU))
    np.testing.assert_array_equal(aux.expert_counts, size)

    # One weight a token: it is 1, and nothing comes back through it. Tokens of an expert in order.
    order = np.argsort(expert_of_token, kind="stable").reshape(num_experts, size)
    rows, d_rows = (np.asarray(a, np.float64)[order] for a in (x, dy))
    gate, up, down = (np.asarray(params["experts"][n], np.float64) for n in ("gate", "up", "down"))
    h = rows @ gate
    u, s = rows @ up, 1 / (1 + np.exp(-h))
    a, d_a = h * s * u, d_rows @ down.transpose(0, 2, 1)
    d_h, d_u = d_a * u * s * (1 + h * (1 - s)), d_a * h * s
    want = {
        "y": a @ down,
        "dx": d_h @ gate.transpose(0, 2, 1) + d_u @ up.transpose(0, 2, 1),
        "gate": rows.transpose(0, 2, 1) @ d_h,
        "up": rows.transpose(0, 2, 1) @ d_u,
        "down": a.transpose(0, 2, 1) @ d_rows,
    }
    got = {"y": np.asarray(y)[order], "dx": np.asarray(dx)[order], **dparams["experts"]}
    length = max(size, model_dim)
    for name, wanted in want.items():
        limit = oracle.bound("bf16", length, 7 if name == "y" else 14)
        if size == 1:  # rows that all come from one token
            last = wanted.shape[-1]
            flat = [np.asarray(array).reshape(-1, last) for array in (got[name], wanted)]
            oracle.assert_rows_close(name, *flat, limit)
            continue
        # A token's row shares one error, so a group has as many as it has rows.
        each = [size] * num_experts
        oracle.assert_close(name, got[name], wanted, limit, groups=True, values=each)
