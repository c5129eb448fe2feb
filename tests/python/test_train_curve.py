"""The program's model learns what the same model learns with a mixture of experts in plain JAX."""

from __future__ import annotations

import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import plain_moe
from dropless.train import data, loop
from dropless.train.cli import main
from dropless.train.config import resolve
from dropless.train.feed_forward import make_feed_forward
from dropless.train.step import init_state, loss_function, make_train_step
from train_runs import records

STEPS = 200
F32 = jnp.dtype(jnp.float32)
EPSILON = 2.0**-23
CONFIG = resolve(
    "tiny",
    {
        "layers": 2,
        "model_dim": 24,
        "heads": 3,
        "seq_len": 16,
        "batch_size": 4,
        "num_experts": 5,
        "experts_per_token": 2,
        "expert_dim": 20,
        "precision": "f32",
        "learning_rate": 3e-3,
        "warmup_steps": 20,
    },
)
# The longest sums of a layer: over H and I forward, over T backward.
LONGEST = max(CONFIG.model_dim, CONFIG.expert_dim, CONFIG.tokens_per_step)
# An output of the layer is a chain of three such sums (up, down, combine); each rounds like a walk.
ROUNDING = EPSILON * 3 * math.sqrt(LONGEST)


class PlainFeedForward:
    """The reference; with a seed, its outputs are off at random by what rounding may do to them."""

    def __init__(self, seed: int | None = None):
        self._seed = seed

    def init(self, key, model_dim):
        return plain_moe.init(key, model_dim, CONFIG.num_experts, CONFIG.expert_dim)

    def __call__(self, params, x):
        y, aux = plain_moe.moe(x, params, CONFIG.experts_per_token)
        if self._seed is not None:
            y *= 1 + ROUNDING * jax.random.normal(jax.random.key(self._seed), y.shape)
        return y, aux


@functools.cache
def batches() -> list[np.ndarray]:
    """This file's windows, the same for every model."""
    text = np.frombuffer(pathlib.Path(__file__).read_bytes(), np.uint8)
    iterator = data.training_batches(data.Tokens(text, 1.0), CONFIG)
    return [next(iterator) for _ in range(STEPS)]


def train(ffn) -> tuple[np.ndarray, np.ndarray]:
    """Losses [STEPS], and counts of every layer's experts [STEPS, layers, E]."""
    step = make_train_step(CONFIG, ffn, F32)
    # Every run starts from the plain model's parameters.
    state, records = init_state(CONFIG, PlainFeedForward()), []
    for batch in batches():
        state, figures = step(state, batch)
        records.append((figures["loss"], figures["expert_counts"]))
    losses, counts = zip(*jax.device_get(records), strict=True)
    return np.array(losses, np.float64), np.array(counts)


def moved_choices(counts: np.ndarray, plain: np.ndarray) -> np.ndarray:
    """[STEPS]: assignments that went to another expert than the plain model's, added up."""
    return np.cumsum(np.abs(counts - plain).sum((1, 2)) // 2)


@pytest.mark.any_jax
def test_two_hundred_steps_give_the_plain_models_curve():
    """Training may amplify rounding, so the bound is what rounding alone does to the plain model.

    Four times the largest deviation so far of two plain runs whose outputs are off by a rounding
    walk: a third random deviation exceeds that rarely, a wrong gradient at once. It has a cap of
    its own: each step adds the rounding of both layers to the parameters, as another random walk.
    Where a choice of experts was decided by rounding the losses part by more than that, so each
    perturbed run counts as far as it chose alike.
    """
    plain, plain_counts = train(PlainFeedForward())
    ours, counts = train(make_feed_forward(CONFIG))
    assert plain[-20:].mean() < plain[:20].mean() - 1.0  # there is something to learn
    perturbed = np.zeros(STEPS)
    for seed in (1, 2):
        other, other_counts = train(PlainFeedForward(seed))
        alike = moved_choices(other_counts, plain_counts) == 0
        assert alike[: STEPS // 2].all()
        perturbed = np.maximum(perturbed, np.where(alike, np.abs(other - plain), 0))
    bound = 4 * (np.maximum.accumulate(perturbed) + EPSILON * plain)
    cap = CONFIG.layers * ROUNDING * np.sqrt(np.arange(1, STEPS + 1)) * plain
    assert (bound <= cap).all(), (bound / cap).max()
    # One choice in 50,000 may be moved by rounding, late; that costs one of T tokens no more than
    # knowing nothing of it does.
    moved = moved_choices(counts, plain_counts)
    assert not moved[: STEPS // 2].any()
    bound += moved * math.log(CONFIG.vocab_size) / CONFIG.tokens_per_step
    error = np.abs(ours - plain)
    worst = int(np.argmax(error / bound))
    assert (error <= bound).all(), (worst, ours[worst], plain[worst], error[worst], bound[worst])


def test_every_gradient_of_the_whole_model_is_the_plain_models():
    params = init_state(CONFIG, PlainFeedForward())["params"]
    compute = functools.partial(loss_function, config=CONFIG, dtype=F32)
    results = [
        jax.jit(jax.grad(functools.partial(compute, ffn=ffn), has_aux=True))(params, batches()[0])
        for ffn in (PlainFeedForward(), make_feed_forward(CONFIG))
    ]
    (expected, plain_figures), (got, figures) = results
    np.testing.assert_array_equal(figures["expert_counts"], plain_figures["expert_counts"])
    for name in ("loss", "load_balance_loss", "z_loss"):
        assert figures[name] == pytest.approx(float(plain_figures[name]), rel=ROUNDING)
    # A gradient passes through at most two such layers, each rounding forward and backward.
    bound = 4 * ROUNDING
    leaves, _ = jax.tree_util.tree_flatten_with_path(expected)
    for (path, want), have in zip(leaves, jax.tree.leaves(got), strict=True):
        error = np.sqrt(np.mean((have - want) ** 2)) / np.sqrt(np.mean(want**2))
        assert error < bound, (jax.tree_util.keystr(path), error, bound)


@pytest.mark.any_jax
def test_a_small_model_learns_the_standard_librarys_source(tmp_path):
    """A short run of few parameters is far below what single bytes tell (about 3.2 nats)."""
    flags = "--model-dim 64 --heads 2 --layers 1 --expert-dim 64 --seq-len 64 --batch-size 8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time_parts", lambda *arguments: {"experts and router": 1.0})
        assert main(["--out", str(tmp_path / "out"), *flags.split(), "--steps", "120"]) == 0
    rows = records(tmp_path / "out")
    assert np.mean([row["loss"] for row in rows[-20:]]) < 2.6
    assert rows[-1]["held_out_loss"] < 2.6
    assert all(row["dropped_tokens"] == 0 for row in rows)
