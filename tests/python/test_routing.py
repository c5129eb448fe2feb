"""Routing: order of top-k, every combination of scores, gradients, and the dispatch plan."""

from __future__ import annotations

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


GRID = list(
    itertools.product(
        ("softmax", "sigmoid"),
        (True, False),
        (True, False),
        (1.0, 2.5),
        (jnp.float32, jnp.bfloat16),
    )
)


@pytest.mark.parametrize(
    ("score", "before", "renormalize", "scale", "dtype"),
    GRID,
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_f7_every_combination_of_scores(score, before, renormalize, scale, dtype):
    cfg = config(
        11, 3, score=score, score_before_topk=before, renormalize=renormalize, scale=scale,
        selection_bias=True,
    )  # fmt: skip
    logits = logits_of(37, 11, dtype=dtype)
    bias = jnp.asarray(np.random.default_rng(1).standard_normal(11) * 0.3, jnp.float32)
    mask = jnp.arange(37) % 5 != 2
    rng = np.random.default_rng(2)
    cotangents = [rng.standard_normal(s) for s in ((37, 3), (11,), (), ())]

    def loss(logits):
        r = dropless.route(logits, cfg, selection_bias=bias, mask=mask)
        outputs = (r.weights, r.prob_sum, r.lse_square_sum, r.entropy_sum)
        total = sum(
            jnp.sum(o * c.astype(np.float32)) for o, c in zip(outputs, cotangents, strict=True)
        )
        return total, r

    (_, routing), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(logits)

    with jax.enable_x64(True):
        wide, bias64 = oracle.to64((logits, bias))

        def wide_loss(wide):
            ids, *outputs, _ = oracle.route(wide, cfg.router, 3, bias64, np.asarray(mask))
            total = sum(jnp.sum(o * c) for o, c in zip(outputs, cotangents, strict=True))
            return total, (ids, *outputs)

        (_, (ids, *outputs)), wanted = jax.value_and_grad(wide_loss, has_aux=True)(wide)
        ids = np.where(np.asarray(mask)[:, None], ids, -1)
        outputs, wanted = [np.asarray(o) for o in outputs], np.asarray(wanted)

    limit = oracle.bound("f32", 37, 8)
    np.testing.assert_array_equal(routing.ids, ids)
    got = (routing.weights, routing.prob_sum, routing.lse_square_sum, routing.entropy_sum)
    for name, a, b in zip(("weights", "prob_sum", "lse", "entropy"), got, outputs, strict=True):
        oracle.assert_close(name, a, b, limit)
    assert gradient.dtype == dtype
    kind = "f32" if dtype == jnp.float32 else "bf16"
    oracle.assert_close("d_logits", gradient, wanted, oracle.bound(kind, 37, 10))
    assert not np.asarray(gradient)[~np.asarray(mask)].any()
    assert int(routing.tokens) == int(mask.sum())


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
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
