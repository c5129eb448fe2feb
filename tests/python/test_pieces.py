"""Grouped products and row moves on their own: tails, empty groups, offsets, two derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
import oracle

KINDS = {"f32": jnp.float32, "bf16": jnp.bfloat16}


def arrays(sizes, m, c, n, dtype=jnp.float32, seed=0):
    """lhs [m, c], rhs [len(sizes), c, n], dy [m, n], sizes."""
    rng = np.random.default_rng(seed)
    shapes = ((m, c), (len(sizes), c, n), (m, n))
    scales = (1.0, c**-0.5, 1.0)
    made = (
        jnp.asarray(rng.standard_normal(s) * f, dtype) for s, f in zip(shapes, scales, strict=True)
    )
    return *made, jnp.asarray(sizes, jnp.int32)


def groups_of(sizes, m):
    """[(first, last)] with everything past m cut."""
    ends = np.minimum(np.cumsum(sizes), m)
    return list(zip(np.concatenate([[0], ends[:-1]]), ends, strict=True))


def dense_dot(lhs, rhs, sizes):
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for g, (a, b) in enumerate(groups_of(sizes, len(lhs))):
        out[a:b] = lhs[a:b] @ rhs[g]
    return out


def dense_wgrad(x, dy, sizes):
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    return np.stack([x[a:b].T @ dy[a:b] for a, b in groups_of(sizes, len(x))])


def check_dot(sizes, m, c, n, kind="f32", seed=0):
    """Output and both gradients; rows past the end are poisoned with NaN and must not matter."""
    lhs, rhs, dy, gs = arrays(sizes, m, c, n, KINDS[kind], seed)
    past = np.arange(m) >= int(np.sum(sizes))
    lhs, dy = (jnp.where(past[:, None], jnp.nan, a).astype(a.dtype) for a in (lhs, dy))
    out, vjp = jax.vjp(lambda a, b: dropless.ragged_dot(a, b, gs), lhs, rhs)
    d_lhs, d_rhs = vjp(dy)
    limit = oracle.bound(kind, max(c, n, m), 1)
    # Only rows of a group: the zeros behind them would make the scale of errors too small.
    swapped = np.swapaxes(np.asarray(rhs, np.float64), 1, 2)
    oracle.assert_close("out", out[~past], dense_dot(lhs, rhs, sizes)[~past], limit)
    oracle.assert_close("d_lhs", d_lhs[~past], dense_dot(dy, swapped, sizes)[~past], limit)
    oracle.assert_close("d_rhs", d_rhs, dense_wgrad(lhs, dy, sizes), limit, groups=True)
    assert not np.asarray(out, np.float32)[past].any()
    assert not np.asarray(d_lhs, np.float32)[past].any()


SIZES = {
    "b1_small": ([8, 0, 8, 0], 16, 64, 32),
    "b1_mostly_empty": ([5, 0, 0, 9, 0, 0, 1, 0, 0, 0, 17, 0, 0, 3, 0, 0, 0, 2], 37, 33, 43),
    "b2_published": ([162, 0, 257, 446, 0, 83], 948, 208, 76),
    "a1_tail": ([300, 0, 412, 288], 1536, 40, 24),
    "a2_long_buffer": ([31, 2, 0, 95, 40, 7, 60, 21], 2176, 16, 24),
    "b4_no_rows": ([0, 0, 0], 9, 16, 8),
    "a5_one_group": ([300], 512, 136, 40),
    "d1_unaligned": ([1, 7, 9, 15, 17, 31, 63, 65, 127, 129, 255], 719, 24, 40),
    "one_row": ([1], 1, 5, 3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIZES)
def test_ragged_dot_and_its_gradients(name, kind):
    check_dot(*SIZES[name], kind)


def test_a1_d9_rows_past_the_end_are_zero_three_times():
    sizes = [300, 0, 412, 288]
    lhs, rhs, dy, gs = arrays(sizes, 1536, 40, 24)
    poisoned = [a.at[1000:].set(jnp.nan) for a in (lhs, dy)]

    @jax.jit
    def both(lhs, rhs, dy):
        out, vjp = jax.vjp(lambda a, b: dropless.ragged_dot(a, b, gs), lhs, rhs)
        return out, *vjp(dy)

    clean = both(lhs.at[1000:].set(0), rhs, dy.at[1000:].set(0))
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, both(poisoned[0], rhs, poisoned[1]), clean)
    assert not np.asarray(clean[0])[1000:].any() and not np.asarray(clean[1])[1000:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_b7_every_group_below_128_rows(kind):
    sizes = list(range(1, 128))
    check_dot(sizes, sum(sizes), 24, 20, kind)


@pytest.mark.parametrize("modulus", [8, 16, 64, 128, 256])
def test_d1_group_offsets_at_every_residue(modulus):
    for first in range(0, modulus, max(1, modulus // 8)):
        sizes = [first + 1, modulus + 3, 2 * modulus - first]
        check_dot(sizes, sum(sizes), 16, 24, "bf16", seed=first)


@pytest.mark.parametrize("c", [1, 8, 33, 64, 96, 129, 200])
@pytest.mark.parametrize("n", [1, 8, 17, 64, 130])
def test_d2_any_width(c, n):
    check_dot([3, 0, 18, 2], 25, c, n)


def test_sizes_that_exceed_the_rows_are_cut():
    lhs, rhs, _, _ = arrays([1, 1, 1], 10, 8, 4)
    sizes = jnp.array([4, 2_000_000_000, 2_000_000_000], jnp.int32)
    out = dropless.ragged_dot(lhs, rhs, sizes)
    oracle.assert_close("out", out, dense_dot(lhs, rhs, [4, 6, 0]), oracle.bound("f32", 24, 1))
    np.testing.assert_array_equal(
        dropless.ragged_dot(lhs, rhs, jnp.array([-3, 4, 0])),
        dropless.ragged_dot(lhs, rhs, jnp.array([0, 4, 0])),
    )


@pytest.mark.parametrize("offset", [0, 2, 5])
def test_j13_group_offset_touches_only_local_groups(offset):
    sizes, local = [6, 0, 11, 3, 9, 0, 4, 2], 3
    lhs, rhs, dy, gs = arrays(sizes, 40, 24, 17)
    mine = rhs[offset : offset + local]
    for form in (jnp.array([offset]), jnp.array(offset)):
        out, vjp = jax.vjp(
            lambda a, b, form=form: dropless.ragged_dot(a, b, gs, group_offset=form), lhs, mine
        )
    d_lhs, d_rhs = vjp(dy)
    first, last = sum(sizes[:offset]), sum(sizes[: offset + local])
    inside = (np.arange(40) >= first) & (np.arange(40) < last)
    whole = dense_dot(lhs, rhs, sizes) * inside[:, None]
    oracle.assert_close("out", out, whole, oracle.bound("f32", 24, 1))
    swapped = np.swapaxes(np.asarray(rhs), 1, 2)
    oracle.assert_close(
        "d_lhs", d_lhs, dense_dot(dy, swapped, sizes) * inside[:, None], oracle.bound("f32", 24, 1)
    )
    oracle.assert_close(
        "d_rhs",
        d_rhs,
        dense_wgrad(lhs, dy, sizes)[offset : offset + local],
        oracle.bound("f32", 24, 1),
    )
    assert not np.asarray(out)[~inside].any() and not np.asarray(d_lhs)[~inside].any()


def test_j13_local_groups_add_up_to_all():
    sizes = [6, 0, 11, 3, 9, 4]
    lhs, rhs, _, gs = arrays(sizes, 36, 24, 17)
    whole = dropless.ragged_dot(lhs, rhs, gs)
    parts = [
        dropless.ragged_dot(lhs, rhs[o : o + 2], gs, group_offset=jnp.array([o])) for o in (0, 2, 4)
    ]
    np.testing.assert_array_equal(sum(np.asarray(p) for p in parts), whole)


@pytest.mark.parametrize("offset", [-1, 3, 2**40, [3], np.array([-7]), jnp.array(3)])
def test_n2_a_known_group_offset_out_of_range_is_an_error(offset):
    lhs, rhs, _, gs = arrays([6, 0, 11, 3], 24, 8, 5)
    got = offset if isinstance(offset, int) else np.asarray(offset).item()
    with pytest.raises(ValueError, match=f"group_offset must be from 0 to 2.*; got {got}"):
        dropless.ragged_dot(lhs, rhs[:2], gs, group_offset=offset)
    with pytest.raises(ValueError, match=f"group_offset must be from 0 to 2.*; got {got}"):
        jax.jit(lambda a: dropless.ragged_dot(a, rhs[:2], gs, group_offset=offset))(lhs)


def test_a_traced_group_offset_out_of_range_is_cut():
    lhs, rhs, _, gs = arrays([6, 0, 11, 3], 24, 8, 5)
    dot = jax.jit(lambda offset: dropless.ragged_dot(lhs, rhs[:2], gs, group_offset=offset))
    for offset, cut in (-5, 0), (3, 2), (2**31 - 1, 2):
        np.testing.assert_array_equal(dot(offset), dot(cut))


def test_b8_no_local_matrices():
    lhs, _, dy, gs = arrays([3, 4], 9, 8, 5)
    out, vjp = jax.vjp(
        lambda a, b: dropless.ragged_dot(a, b, gs, group_offset=jnp.array([1])),
        lhs,
        jnp.zeros((0, 8, 5)),
    )
    d_lhs, d_rhs = vjp(dy)
    assert out.shape == (9, 5) and not np.asarray(out).any()
    assert d_lhs.shape == lhs.shape and not np.asarray(d_lhs).any() and d_rhs.shape == (0, 8, 5)


@pytest.mark.parametrize(("m", "c", "n"), [(0, 8, 5), (4, 0, 5), (4, 8, 0)])
def test_empty_dimensions(m, c, n):
    lhs, rhs = jnp.zeros((m, c)), jnp.zeros((2, c, n))
    out, vjp = jax.vjp(lambda a, b: dropless.ragged_dot(a, b, jnp.array([1, 2])), lhs, rhs)
    assert out.shape == (m, n) and not np.asarray(out).any()
    assert [g.shape for g in vjp(out)] == [lhs.shape, rhs.shape]


def test_same_arguments_and_result_as_jax_lax():
    lhs, rhs, _, gs = arrays([7, 0, 20, 3], 40, 24, 17)
    ours = dropless.ragged_dot(lhs, rhs, gs, jax.lax.Precision.HIGHEST, jnp.float32, None)
    theirs = jax.lax.ragged_dot(lhs, rhs, gs, jax.lax.Precision.HIGHEST, jnp.float32)
    np.testing.assert_allclose(ours[:30], theirs[:30], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_preferred_element_type(kind, wanted):
    lhs, rhs, _, gs = arrays([7, 0, 20], 27, 24, 17, KINDS[kind])
    out = dropless.ragged_dot(lhs, rhs, gs, preferred_element_type=wanted)
    assert out.dtype == wanted
    finest = "f32" if wanted == jnp.float32 else "bf16"
    oracle.assert_close("out", out, dense_dot(lhs, rhs, [7, 0, 20]), oracle.bound(finest, 24, 1))
    mixed = dropless.ragged_dot(lhs, rhs.astype(jnp.float32), gs)
    assert mixed.dtype == jnp.float32


def test_j8_group_sizes_of_any_integer_type():
    lhs, rhs, _, _ = arrays([7, 0, 20], 27, 24, 17)
    results = [
        dropless.ragged_dot(lhs, rhs, jnp.array([7, 0, 20], t))
        for t in (jnp.int32, jnp.uint8, jnp.int16)
    ]
    with jax.enable_x64(True):
        results += [
            dropless.ragged_dot(lhs, rhs, jnp.array([7, 0, 20], t)) for t in (jnp.int64, jnp.uint64)
        ]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def masked_dot(lhs, rhs, sizes):
    """ragged_dot in plain jnp: every group's matrix on every row, and a mask."""
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(lhs.shape[0])[:, None]
    member = (rows >= (ends - sizes)[None]) & (rows < ends[None])
    return jnp.einsum("mc,gcn,mg->mn", lhs, rhs, member.astype(lhs.dtype))


def test_ragged_dot_is_twice_differentiable():
    lhs, rhs, dy, gs = arrays([7, 0, 20, 3], 34, 12, 9)
    v_lhs, v_rhs, *_ = arrays([7, 0, 20, 3], 34, 12, 9, seed=5)

    def second(dot, lhs, rhs, gs, dy, v_lhs, v_rhs):
        def slope(a, b):
            d_a, d_b = jax.grad(lambda a, b: jnp.sum(jnp.tanh(dot(a, b, gs)) * dy), (0, 1))(a, b)
            return jnp.sum(d_a * v_lhs) + jnp.sum(d_b * v_rhs)

        return jax.grad(slope, (0, 1))(lhs, rhs)

    got = jax.jit(lambda *a: second(dropless.ragged_dot, *a))(lhs, rhs, gs, dy, v_lhs, v_rhs)
    with jax.enable_x64(True):
        wide = oracle.to64((lhs, rhs, gs, dy, v_lhs, v_rhs))
        want = [np.asarray(w) for w in second(masked_dot, *wide)]
    for name, a, b in zip(("lhs", "rhs"), got, want, strict=True):
        oracle.assert_close(name, a, b, oracle.bound("f32", 34, 8))


def test_hessians_of_pieces_are_jacrev_of_jacrev():
    lhs, rhs, dy, gs = arrays([3, 0, 2], 6, 4, 3)
    plan = dropless.plan(jnp.array([[0, 2], [1, 0], [2, 1]], jnp.int32), 3)
    cases = {
        "lhs": (lambda a: dropless.ragged_dot(a, rhs, gs), lambda a: masked_dot(a, rhs, gs), lhs),
        "rhs": (lambda b: dropless.ragged_dot(lhs, b, gs), lambda b: masked_dot(lhs, b, gs), rhs),
        "wgrad": (
            lambda a: dropless.grouped_wgrad(a, dy, gs),
            lambda a: jax.grad(lambda b: jnp.sum(masked_dot(a, b, gs) * dy))(rhs),
            lhs,
        ),
        "permute": (
            lambda x: dropless.unpermute(dropless.permute(x, plan), plan),
            lambda x: 2 * x,
            lhs[:3],
        ),
    }
    for name, (ours, plain, point) in cases.items():
        got, want = (
            jax.jacrev(jax.jacrev(lambda p, f=f: jnp.sum(jnp.tanh(f(p)))))(point)
            for f in (ours, plain)
        )
        oracle.assert_close(name, got, want, 2 * oracle.bound("f32", 34, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_wgrad_and_its_gradients(kind):
    sizes = [7, 0, 20, 3]
    x, _, dy, gs = arrays(sizes, 34, 12, 9, KINDS[kind])
    into = jnp.asarray(np.random.default_rng(3).standard_normal((4, 12, 9)), jnp.float32)
    ct = jnp.asarray(np.random.default_rng(4).standard_normal((4, 12, 9)), jnp.float32)
    out, vjp = jax.vjp(lambda x, dy, into: dropless.grouped_wgrad(x, dy, gs, into), x, dy, into)
    assert out.dtype == jnp.float32
    oracle.assert_close(
        "out", out, dense_wgrad(x, dy, sizes) + np.asarray(into), oracle.bound("f32", 34, 1)
    )
    np.testing.assert_array_equal(out[1], into[1])  # an empty group leaves what was there
    d_x, d_dy, d_into = vjp(ct)
    limit = oracle.bound(kind, 34, 2)
    oracle.assert_close("d_x", d_x, dense_dot(dy, np.swapaxes(ct, 1, 2), sizes), limit)
    oracle.assert_close("d_dy", d_dy, dense_dot(x, ct, sizes), limit)
    np.testing.assert_array_equal(d_into, ct)


def test_e10_accumulation_in_float32_keeps_small_terms():
    x, dy = jnp.ones((1, 1), jnp.bfloat16), jnp.full((1, 1), 256.0, jnp.bfloat16)
    gs = jnp.array([1])
    total = dropless.grouped_wgrad(x, dy, gs, preferred_element_type=jnp.float32)
    total = dropless.grouped_wgrad(x, x, gs, into=total)
    assert float(total[0, 0, 0]) == 257.0
    assert float(total.astype(jnp.bfloat16)[0, 0, 0]) == 256.0  # what bfloat16 would have kept


def test_grouped_wgrad_accumulates_in_place_and_leaves_its_argument_alone():
    x, _, dy, gs = arrays([5, 3], 8, 4, 6)
    into = jnp.ones((2, 4, 6))
    kept = np.array(into)
    twice = dropless.grouped_wgrad(x, dy, gs, dropless.grouped_wgrad(x, dy, gs, into))
    np.testing.assert_array_equal(into, kept)
    oracle.assert_close(
        "twice", twice, 2 * dense_wgrad(x, dy, [5, 3]) + 1, oracle.bound("f32", 24, 1)
    )
    text = jax.jit(lambda x, dy, into: dropless.grouped_wgrad(x, dy, gs, into)).lower(x, dy, into)
    assert "output_operand_alias" in text.as_text()


def test_n2_bad_arguments_are_named():
    lhs, rhs, dy, gs = arrays([3, 4], 7, 8, 5)
    plan = dropless.plan(jnp.zeros((13, 3), jnp.int32), 5)

    def error(kind, text, function, *arguments, **options):
        with pytest.raises(kind, match=text):
            function(*arguments, **options)

    dot, wgrad = dropless.ragged_dot, dropless.grouped_wgrad
    error(ValueError, r"of one C; got \(7, 8\) and \(2, 9, 5\)", dot, lhs, jnp.zeros((2, 9, 5)), gs)
    error(
        ValueError,
        r"one entry for each of the 2 matrices; got 3",
        dot,
        lhs,
        rhs,
        jnp.array([1, 2, 3]),
    )
    error(TypeError, r"vector of integers; got float32\[2\]", dot, lhs, rhs, jnp.ones(2))
    error(TypeError, r"lhs must be .*float16.*bfloat16", dot, lhs.astype(jnp.float16), rhs, gs)
    error(
        TypeError,
        r"preferred_element_type must be .* got int32",
        dot,
        lhs,
        rhs,
        gs,
        None,
        jnp.int32,
    )
    error(
        TypeError,
        r"group_offset must be one integer",
        dot,
        lhs,
        rhs,
        gs,
        group_offset=jnp.array([0, 1]),
    )
    error(
        ValueError, r"at least 2 entries; got 1", dot, lhs, rhs, gs[:1], group_offset=jnp.array(0)
    )
    error(ValueError, r"of one M; got \(7, 8\) and \(6, 5\)", wgrad, lhs, dy[1:], gs)
    error(TypeError, r"dy must have the dtype of x", wgrad, lhs, dy.astype(jnp.bfloat16), gs)
    error(ValueError, r"into must be float32\[2, 8, 5\]; got float32\[2, 8, 4\]",
          wgrad, lhs, dy, gs, jnp.zeros((2, 8, 4)))  # fmt: skip
    error(ValueError, r"x must have shape \[T, H\] with T = 13; got \(12, 4\)",
          dropless.permute, jnp.zeros((12, 4)), plan)  # fmt: skip
    error(ValueError, r"rows must have shape \[M, H\] with M = 39; got \(13, 4\)",
          dropless.unpermute, jnp.zeros((13, 4)), plan)  # fmt: skip
    weights = jnp.zeros((13, 3), jnp.bfloat16)
    error(ValueError, r"weights must be float32\[13, 3\]; got bfloat16\[13, 3\]",
          dropless.unpermute, jnp.zeros((39, 4)), plan, weights)  # fmt: skip


def test_n2_accumulator_and_plan_are_checked():
    x, dy, sizes = jnp.ones((4, 3)), jnp.ones((4, 2)), jnp.array([1, 3])
    into = np.full((2, 3, 2), 5.0, np.float32)
    got = dropless.grouped_wgrad(x, dy, sizes, into=into.tolist())
    np.testing.assert_array_equal(got, into + np.array([1.0, 3.0])[:, None, None])
    with pytest.raises(TypeError, match=r"into must be float32 or bfloat16; got float16"):
        dropless.grouped_wgrad(x, dy, sizes, into=into.astype(np.float16))
    with pytest.raises(TypeError, match=r"preferred_element_type must be .*; got 'f33'"):
        dropless.ragged_dot(x, jnp.ones((2, 3, 2)), sizes, preferred_element_type="f33")
    for call in (dropless.permute, dropless.unpermute):
        with pytest.raises(TypeError, match=r"plan must be a dropless.Plan.*got tuple"):
            call(x, (1, 2))
