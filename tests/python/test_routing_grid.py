"""The router's options through JAX, and experts that are given, against the oracle."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
from routing_checks import (
    SCORES,
    check_against_oracle,
    check_plan,
    config,
    logits_of,
    unit_logits,
)

NORMALISATIONS = {
    "raw": {"renormalize": False},
    "sum": {},
    "add": {"renormalize_eps": 0.5},
    "clamp": {"renormalize_eps": 1.5, "renormalize_clamp": True},
}
GROUPS = {
    "ungrouped": {},
    "max": {"num_groups": 4, "groups_kept": 2},
    "best2_zero": {
        "num_groups": 4, "groups_kept": 2, "group_score_experts": 2, "group_mask": "zero",
    },
    "best3": {"num_groups": 3, "groups_kept": 1, "group_score_experts": 3},
}  # fmt: skip
# Score, order, normalisation and groups in every combination; scale, bias and dtype in turn, so
# that each of their combinations meets every group rule. The product of all seven, 1024 routers, is
# what F7_EveryCombination of the C++ tests takes, on the reference, the CPU and the GPU; here each
# would cost a compilation.
GRID = [
    (*names, (1.0, 2.5)[i % 2], bool(i // 2 % 2), (jnp.float32, jnp.bfloat16)[i // 4 % 2])
    for i, names in enumerate(
        (score, before, norm, groups)
        for groups, score, before, norm in itertools.product(
            GROUPS, SCORES, (True, False), NORMALISATIONS
        )
    )
]


def names_of(value):
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(
    ("score", "before", "norm", "groups", "scale", "biased", "dtype"), GRID, ids=names_of
)
def test_f7_options_reach_the_engine(score, before, norm, groups, scale, biased, dtype):
    options = {**NORMALISATIONS[norm], **GROUPS[groups]}
    cfg = config(
        12, 3, score=score, score_before_topk=before, scale=scale, selection_bias=biased, **options
    )
    logits = unit_logits(37, 12, score, cfg.router.renormalize, dtype)
    bias = jnp.asarray(np.random.default_rng(1).standard_normal(12) * 0.3, jnp.float32)
    check_against_oracle(logits, cfg, bias if biased else None, jnp.arange(37) % 5 != 2)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("before", [True, False])
def test_given_experts_are_weighed_and_the_others_chosen(score, before):
    """Replay: ids from elsewhere, slots and tokens without an expert, and tokens that are free."""
    cfg = config(12, 3, score=score, score_before_topk=before, expert_scale=True)
    logits = unit_logits(40, 12, score, True)
    rng = np.random.default_rng(3)
    ids = np.argsort(rng.standard_normal((40, 12)), axis=1)[:, :3].astype(np.int32)
    ids[::5, 1] = -1
    ids[3] = -1
    scale = jnp.asarray(rng.uniform(0.5, 2, 12), jnp.float32)
    mask = jnp.arange(40) % 7 != 0
    given = jnp.asarray(ids)
    routing = check_against_oracle(logits, cfg, None, mask, given, scale)
    np.testing.assert_array_equal(routing.ids, np.where(np.asarray(mask)[:, None], ids, -1))

    free = dropless.route(logits, cfg, expert_scale=scale)
    replayed = dropless.route(logits, cfg, expert_ids=free.ids, expert_scale=scale)
    jax.tree.map(np.testing.assert_array_equal, replayed, free)
    # -2 in a token's first slot; what its other slots hold does not matter.
    mixed = np.where(np.arange(40)[:, None] % 2 == 0, np.int32([-2, 5, 5]), ids)
    routing = dropless.route(logits, cfg, expert_ids=mixed, expert_scale=scale)
    np.testing.assert_array_equal(routing.ids[::2], free.ids[::2])
    np.testing.assert_array_equal(routing.ids[1::2], ids[1::2])


def test_given_ids_that_are_no_expert_or_repeat_one_leave_their_slot_empty():
    cfg = config(5, 3)
    ids = jnp.array([[2, 2, 1], [5, 0, -7], [-3, 99, -1], [4, 4, 4]])
    routing = dropless.route(logits_of(4, 5), cfg, expert_ids=ids)
    want = [[2, -1, 1], [-1, 0, -1], [-1, -1, -1], [4, -1, -1]]
    np.testing.assert_array_equal(routing.ids, want)
    check_plan(np.asarray(want), routing, 5)
    assert int(routing.tokens) == 3
    np.testing.assert_allclose(np.asarray(routing.weights).sum(1), [1, 1, 0, 1], rtol=1e-6)


@pytest.mark.parametrize("group_mask", ["-inf", "zero"])
def test_f5_negative_bias_and_masked_groups(group_mask):
    """With a mask of 0, as published, experts of masked groups win over negative ones."""
    cfg = config(
        64, 8, score="sigmoid", selection_bias=True, num_groups=8, groups_kept=4,
        group_score_experts=2, group_mask=group_mask,
    )  # fmt: skip
    logits = logits_of(50, 64)
    routing = check_against_oracle(logits, cfg, jnp.full(64, -2.0), None)
    ranked = 1 / (1 + np.exp(-np.asarray(logits, np.float64))) - 2
    scores = np.sort(ranked.reshape(50, 8, 8), axis=-1)[..., -2:].sum(-1)
    kept = np.argsort(-scores, axis=1)[:, :4]
    inside = [set(np.asarray(i) // 8) <= set(g) for i, g in zip(routing.ids, kept, strict=True)]
    assert all(inside) if group_mask == "-inf" else not any(inside)
