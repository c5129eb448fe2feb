"""Routing: order of top-k, the selection bias, balance losses, and the dispatch plan."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
import oracle
from routing_checks import SCORES, check_plan, config, logits_of


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


@pytest.mark.parametrize("capacity", [0, 1, 5])
@pytest.mark.parametrize(("t", "k", "e"), [(1, 1, 1), (40, 3, 7), (129, 2, 64), (65, 8, 9)])
def test_plan_is_a_stable_sort(t, k, e, capacity):
    ids = np.random.default_rng(t).integers(-1, e + 1, (t, k)).astype(np.int32)
    check_plan(ids, dropless.plan(jnp.asarray(ids), e, capacity=capacity), e, capacity)


def test_plan_of_routed_ids_inside_a_gradient():
    logits, x = logits_of(7, 5), logits_of(7, 3, seed=1)
    cfg = config(5, 2, renormalize=False)

    def moved(logits):
        routing = dropless.route(logits, cfg)
        plan = dropless.plan(routing.ids, 5)
        return jnp.sum(dropless.unpermute(dropless.permute(x, plan), plan, routing.weights)), plan

    def in_place(logits):
        return jnp.sum(dropless.route(logits, cfg).weights * x.sum(-1, keepdims=True))

    gradient, plan = jax.grad(moved, has_aux=True)(logits)
    check_plan(np.asarray(dropless.route(logits, cfg).ids), plan, 5)
    np.testing.assert_allclose(gradient, jax.grad(in_place)(logits), rtol=1e-5, atol=1e-6)


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
