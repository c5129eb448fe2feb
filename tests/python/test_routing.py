"""Routing: order of top-k, every combination of scores, gradients, and the dispatch plan."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
import oracle


def config(e, k, **options):
    return dropless.MoEConfig(e, k, router=dropless.RouterConfig(**options))


def logits_of(t, e, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((t, e)), dtype)


SCORES = ("softmax", "sigmoid", "sqrt_softplus", "identity")
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
# that each of their combinations meets every group rule. The C++ tests take the full product.
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


def unit_logits(t, e, score, renormalize, dtype=jnp.float32):
    """Normal, but positive where their sum divides: sums of either sign have few digits."""
    logits = np.random.default_rng(0).standard_normal((t, e))
    if score == "identity" and renormalize:
        logits = np.abs(logits) + 0.125
    return jnp.asarray(logits, dtype)


def outputs_of(routing):
    return (routing.weights, routing.prob_sum, routing.lse_square_sum, routing.entropy_sum)


def check_against_oracle(logits, cfg, bias, mask, expert_ids=None, expert_scale=None):
    """ids, weights, sums and every gradient against the oracle in float64."""
    t, e = logits.shape
    k = cfg.experts_per_token
    rng = np.random.default_rng(2)
    cotangents = [rng.standard_normal(s) for s in ((t, k), (e,), (), ())]
    trained = (logits,) if expert_scale is None else (logits, expert_scale)

    def loss(trained):
        r = dropless.route(
            trained[0], cfg, selection_bias=bias, mask=mask, expert_ids=expert_ids,
            expert_scale=trained[1] if expert_scale is not None else None,
        )  # fmt: skip
        pairs = zip(outputs_of(r), cotangents, strict=True)
        return sum(jnp.sum(o * c.astype(np.float32)) for o, c in pairs), r

    (_, routing), gradients = jax.jit(
        jax.value_and_grad(loss, has_aux=True), compiler_options=oracle.COMPILE_FAST
    )(trained)

    with jax.enable_x64(True):
        wide, bias64 = oracle.to64((trained, bias))
        given = None if expert_ids is None else np.asarray(expert_ids)

        def wide_loss(wide):
            ids, *outputs, _ = oracle.route(
                wide[0], cfg.router, k, bias64, None if mask is None else np.asarray(mask), given,
                wide[1] if expert_scale is not None else None,
            )  # fmt: skip
            total = sum(jnp.sum(o * c) for o, c in zip(outputs, cotangents, strict=True))
            return total, (ids, *outputs)

        (_, (ids, *outputs)), wanted = jax.value_and_grad(wide_loss, has_aux=True)(wide)
        if mask is not None:
            ids = np.where(np.asarray(mask)[:, None], ids, -1)
        outputs, wanted = jax.tree.map(np.asarray, (outputs, wanted))

    limit = oracle.bound("f32", t, 8)
    np.testing.assert_array_equal(routing.ids, ids)
    names = ("weights", "prob_sum", "lse", "entropy")
    for name, a, b in zip(names, outputs_of(routing), outputs, strict=True):
        oracle.assert_close(name, a, b, limit)
    assert gradients[0].dtype == logits.dtype
    kind = "f32" if logits.dtype == jnp.float32 else "bf16"
    oracle.assert_close("d_logits", gradients[0], wanted[0], oracle.bound(kind, t, 10))
    if expert_scale is not None:
        oracle.assert_close("d_scale", gradients[1], wanted[1], oracle.bound("f32", t, 10))
    real = (np.asarray(routing.ids) >= 0).any(1)
    assert not np.asarray(gradients[0])[~real].any()
    assert int(routing.tokens) == real.sum()
    check_plan(np.asarray(routing.ids), routing, e)
    return routing


@pytest.mark.parametrize(
    ("score", "before", "norm", "groups", "scale", "biased", "dtype"), GRID, ids=names_of
)
def test_f7_every_combination(score, before, norm, groups, scale, biased, dtype):
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


def test_h7_selection_bias_moves_by_the_sign_of_the_load():
    bias = jnp.asarray([0.5, -0.25, 0.125, 0.0, 2.0], jnp.float32)
    counts = jnp.asarray([7, 3, 5, 5, 5], jnp.int32)  # the mean is 5
    rate = np.float32(1e-3)
    got = jax.jit(dropless.update_selection_bias)(bias, counts)
    want = np.float32([0.5 - rate, -0.25 + rate, 0.125, 0.0, 2.0])
    np.testing.assert_array_equal(got, want)
    # A mean that is no whole number, loads whose sum passes int32, and none at all.
    update = functools.partial(dropless.update_selection_bias, jnp.zeros(3), rate=1.0)
    np.testing.assert_array_equal(update(jnp.asarray([2, 2, 1])), [-1, -1, 1])
    np.testing.assert_array_equal(update(jnp.asarray([1, 1, 2])), [1, 1, -1])
    big = jnp.asarray([2**31 - 1, 2**31 - 1, 2**31 - 2], jnp.int32)
    np.testing.assert_array_equal(update(big), [-1, -1, 1])
    np.testing.assert_array_equal(update(jnp.zeros(3, jnp.int32)), [0, 0, 0])
    with pytest.raises(ValueError, match=r"expert_counts must be integers .* got float32\[5\]"):
        dropless.update_selection_bias(bias, counts.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"selection_bias must be float32 \[E\]; got bfloat16"):
        dropless.update_selection_bias(bias.astype(jnp.bfloat16), counts)


def test_h4_microbatches_add_up_to_the_loss_of_the_batch():
    cfg = config(6, 2, score="sigmoid")
    logits = logits_of(1010, 6)

    def whole(logits):
        r = dropless.route(logits, cfg)
        return dropless.load_balance_loss(r.counts, r.prob_sum, r.tokens, 2)

    total, gradient = jax.value_and_grad(whole)(logits)
    parts = [dropless.route(part, cfg) for part in (logits[:10], logits[10:])]
    counts, tokens = sum(p.counts for p in parts), sum(p.tokens for p in parts)

    def part_loss(part):
        return dropless.load_balance_loss(counts, dropless.route(part, cfg).prob_sum, tokens, 2)

    losses, gradients = zip(
        *(jax.value_and_grad(part_loss)(part) for part in (logits[:10], logits[10:])), strict=True
    )
    assert float(sum(losses)) == pytest.approx(float(total), rel=1e-6)
    oracle.assert_close(
        "gradient", jnp.concatenate(gradients), gradient, oracle.bound("f32", 1010, 4)
    )


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("before", [True, False])
def test_f1_k_distinct_ids_for_any_logits(score, before):
    rows = [np.nan, -np.inf, np.inf, 0.0, 3e38, -3e38]
    logits = np.array(
        [[v] * 9 for v in rows] + [[np.nan, 1, -np.inf, np.inf, 2, np.nan, 0, -1, 3]] * 2
    )
    for k in (1, 4, 9):
        cfg = config(9, k, score=score, score_before_topk=before)
        routing = dropless.route(jnp.asarray(logits, jnp.float32), cfg)
        ids = np.asarray(routing.ids)
        assert ids.min() >= 0 and ids.max() < 9
        assert all(len(set(row)) == k for row in ids)
        assert int(routing.nonfinite_logits) == int((~np.isfinite(logits)).sum())
        assert int(routing.counts.sum()) == len(logits) * k
    # Equal values: lowest index first, also when all are NaN.
    np.testing.assert_array_equal(ids[:4], np.tile(np.arange(9), (4, 1)))


def test_f1_nan_comes_after_minus_infinity():
    cfg = config(6, 6, score_before_topk=False, score="sigmoid")
    logits = jnp.array([[jnp.nan, -jnp.inf, 2.0, jnp.nan, 7.0, -jnp.inf]])
    np.testing.assert_array_equal(dropless.route(logits, cfg).ids, [[4, 2, 1, 5, 0, 3]])


def test_f3_scores_that_bfloat16_cannot_tell_apart():
    cfg = config(4, 1)
    logits = jnp.array([[1.0, 1.0009765625, 1.0009766, -1.0]])
    assert len(set(np.asarray(logits.astype(jnp.bfloat16), np.float32)[0, :3])) == 1
    assert int(dropless.route(logits, cfg).ids[0, 0]) == int(np.argmax(np.asarray(logits)[0]))


@pytest.mark.parametrize("k", [1, 2, 7])
def test_f3_exact_ties_go_to_the_lowest_index(k):
    logits = jnp.tile(jnp.array([0.0, 1.0, 1.0, -2.0, 1.0, 1.0, 0.0]), (5, 1))
    want = [1, 2, 4, 5, 0, 6, 3][:k]
    np.testing.assert_array_equal(dropless.route(logits, config(7, k)).ids, [want] * 5)


def test_f6_selection_bias_changes_ids_and_not_weights():
    cfg = config(8, 2, score="sigmoid", renormalize=False, selection_bias=True)
    logits = logits_of(20, 8)
    bias = jnp.array([10.0, -10, -10, 10, -10, -10, -10, -10])
    routing = dropless.route(logits, cfg, selection_bias=bias)
    assert set(np.unique(routing.ids)) == {0, 3}
    picked = np.take_along_axis(np.asarray(logits, np.float64), np.asarray(routing.ids), 1)
    oracle.assert_close(
        "weights", routing.weights, 1 / (1 + np.exp(-picked)), oracle.bound("f32", 1, 4)
    )
    gradient = jax.grad(lambda b: dropless.route(logits, cfg, selection_bias=b).weights.sum())(bias)
    assert not np.asarray(gradient).any()


def test_f8_both_orders_agree_once_renormalised():
    logits = logits_of(50, 9)
    after, before = (
        dropless.route(logits, config(9, 3, score_before_topk=b)) for b in (False, True)
    )
    np.testing.assert_array_equal(after.ids, before.ids)
    np.testing.assert_allclose(after.weights, before.weights, rtol=1e-5)
    raw_after, raw_before = (
        dropless.route(logits, config(9, 3, score_before_topk=b, renormalize=False))
        for b in (False, True)
    )
    np.testing.assert_allclose(np.asarray(raw_after.weights).sum(1), 1.0, rtol=1e-5)
    assert (np.asarray(raw_before.weights).sum(1) < 0.999).all()


@pytest.mark.parametrize("e", [1, 2, 3, 7, 60, 72, 160, 257, 384, 512, 1000])
def test_f9_any_number_of_experts(e):
    logits = logits_of(23, e)
    for k in sorted({min(k, e) for k in (1, 2, 3, 6, 7, 8, 10, 12)} | ({e} if e <= 72 else set())):
        routing = dropless.route(logits, config(e, k))
        want = np.argsort(-np.asarray(logits), axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(routing.ids, want)
        check_plan(np.asarray(routing.ids), routing, e)


def test_f9_more_choices_than_experts_is_an_error():
    with pytest.raises(ValueError, match=r"experts_per_token=4 and num_experts=3"):
        config(3, 4)


def check_plan(ids, plan, e, capacity=0):
    """Every property of a plan, from ids [T, K] alone."""
    t, k = ids.shape
    flat = ids.reshape(-1)
    valid = (flat >= 0) & (flat < e)
    counts = np.bincount(flat[valid], minlength=e)
    np.testing.assert_array_equal(plan.counts, counts)
    kept = np.minimum(counts, capacity) if capacity else counts
    np.testing.assert_array_equal(plan.offsets, np.concatenate([[0], np.cumsum(kept)]))
    slots = np.full(t * k, -1)
    total = 0
    for expert in range(e):
        mine = np.flatnonzero(flat == expert)[: kept[expert]]  # ordered by slot, hence by token
        slots[total : total + len(mine)] = mine
        total += len(mine)
    np.testing.assert_array_equal(plan.slot_of_row, slots)
    rows = np.full(t * k, -1)
    rows[slots[:total]] = np.arange(total)
    np.testing.assert_array_equal(np.asarray(plan.row_of_slot).reshape(-1), rows)


@pytest.mark.parametrize("capacity", [0, 1, 5])
@pytest.mark.parametrize(("t", "k", "e"), [(1, 1, 1), (40, 3, 7), (129, 2, 64), (65, 8, 9)])
def test_plan_is_a_stable_sort(t, k, e, capacity):
    ids = np.random.default_rng(t).integers(-1, e + 1, (t, k)).astype(np.int32)
    check_plan(ids, dropless.plan(jnp.asarray(ids), e, capacity=capacity), e, capacity)


def test_g1_plan_is_the_same_every_time():
    logits = logits_of(4097, 128, dtype=jnp.bfloat16)
    function = jax.jit(lambda x: dropless.route(x, config(128, 16)))
    first = function(logits)
    check_plan(np.asarray(first.ids), first, 128)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, function(logits), first)


def test_no_tokens_and_one_token():
    empty = dropless.route(jnp.zeros((0, 5)), config(5, 2))
    assert empty.ids.shape == (0, 2) and not np.asarray(empty.counts).any()
    assert dropless.plan(jnp.zeros((0, 2), jnp.int32), 5).offsets.shape == (6,)
    one = dropless.route(jnp.zeros((1, 5)), config(5, 2))
    np.testing.assert_array_equal(one.ids, [[0, 1]])
    gradient = jax.grad(lambda x: dropless.route(x, config(5, 2)).weights.sum())(jnp.zeros((0, 5)))
    assert gradient.shape == (0, 5)


def test_n2_bad_arguments_are_named():
    cfg, logits = config(5, 2), jnp.zeros((4, 5))
    with pytest.raises(
        ValueError, match=r"logits must have shape \[T, E\] with E .* 5; got \(4, 6\)"
    ):
        dropless.route(jnp.zeros((4, 6)), cfg)
    with pytest.raises(TypeError, match=r"logits must be float32 or bfloat16; got float16"):
        dropless.route(logits.astype(jnp.float16), cfg)
    with pytest.raises(ValueError, match=r"mask must have shape \[T\] = \(4,\); got \(5,\)"):
        dropless.route(logits, cfg, mask=jnp.ones(5))
    with pytest.raises(ValueError, match=r"selection_bias must be given exactly if"):
        dropless.route(logits, cfg, selection_bias=jnp.zeros(5))
    with pytest.raises(ValueError, match=r"selection_bias must have shape \(5,\); got \(4,\)"):
        dropless.route(logits, config(5, 2, selection_bias=True), selection_bias=jnp.zeros(4))
    with pytest.raises(
        ValueError, match=r"expert_ids must be integers .* \(4, 2\); got int32\[4\]"
    ):
        dropless.route(logits, cfg, expert_ids=jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match=r"expert_scale must be given exactly if"):
        dropless.route(logits, cfg, expert_scale=jnp.ones(5))
    with pytest.raises(ValueError, match=r"ids must be \[T, K\] int32; got int32\[3\]"):
        dropless.plan(jnp.zeros(3, jnp.int32), 4)
    for e in (0, 4.0, True, "4"):
        with pytest.raises(ValueError, match=r"num_experts must be an int >= 1; got"):
            dropless.plan(jnp.zeros((3, 2), jnp.int32), e)
    with pytest.raises(ValueError, match=r"capacity must be an int >= 0; got 1.5"):
        dropless.plan(jnp.zeros((3, 2), jnp.int32), 4, capacity=1.5)
    with pytest.raises(TypeError, match=r"cfg must be a dropless.MoEConfig; got RouterConfig"):
        dropless.route(logits, dropless.RouterConfig())
    with pytest.raises(TypeError, match=r"mask must be bool or integer.*got float32"):
        dropless.route(logits, cfg, mask=jnp.ones(4))
    too_many = jax.ShapeDtypeStruct((2**28, 5), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"below 2\*\*31 on one device; got 268435456 \* 8"):
        jax.eval_shape(
            lambda x: dropless.route(x, config(8, 8)),
            jax.ShapeDtypeStruct((2**28, 8), too_many.dtype),
        )


def test_lists_are_arrays_too():
    cfg = config(5, 2, selection_bias=True)
    logits, bias, mask = [[0.1, 3, 2, 0, -1], [5, 4, 3, 2, 1]], [0.0, 0, 0, 9, 0], [True, False]
    as_lists = dropless.route(logits, cfg, selection_bias=bias, mask=mask)
    as_arrays = dropless.route(
        jnp.array(logits), cfg, selection_bias=jnp.array(bias), mask=jnp.array(mask)
    )
    jax.tree.map(np.testing.assert_array_equal, as_lists, as_arrays)
    assert as_lists.ids.tolist() == [[3, 1], [-1, -1]]
    assert dropless.plan([[0, 3]], 4).row_of_slot.tolist() == [[0, 1]]


def test_a_capacity_beyond_every_integer_type_is_no_limit():
    ids = jnp.zeros((3, 2), jnp.int32)
    unlimited = dropless.plan(ids, 4)
    jax.tree.map(np.testing.assert_array_equal, dropless.plan(ids, 4, capacity=2**64), unlimited)


def test_n2_a_symbolic_number_of_tokens_is_refused_in_words():
    (t,) = jax.export.symbolic_shape("t")
    logits = jax.ShapeDtypeStruct((t, 5), jnp.float32)
    with pytest.raises(ValueError, match=r"number of tokens must be known.*symbolic dimension t"):
        jax.export.export(jax.jit(lambda x: dropless.route(x, config(5, 2)).ids))(logits)
