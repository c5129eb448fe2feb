"""What tests of the router compare, and with what."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import dropless
import oracle

SCORES = ("softmax", "sigmoid", "sqrt_softplus", "identity")


def config(e, k, **options):
    return dropless.MoEConfig(e, k, router=dropless.RouterConfig(**options))


def logits_of(t, e, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((t, e)), dtype)


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
