"""Routing and dispatch plan: ours against the same steps in jitted JAX, on the device at hand.

One call routes ``--calls`` independent batches of logits in one program, so that the host's part of
a call is shared by many; times are per batch.

    PYTHONPATH=python python bench/bench_routing.py --out bench/results/routing_h200.json
"""

from __future__ import annotations

import argparse
import functools
import sys

import jax
import jax.numpy as jnp

import dropless
import harness


def choose_in_jax(logits: jax.Array, k: int):
    """Softmax, the K largest, divided by their sum: (ids, weights, probabilities)."""
    probs = jax.nn.softmax(logits, axis=-1)
    weights, ids = jax.lax.top_k(probs, k)
    return ids, weights / jnp.sum(weights, axis=-1, keepdims=True), probs


def choose_biased_in_jax(logits: jax.Array, k: int, bias: jax.Array, router):
    """Sigmoid scores ranked with a bias, within the groups kept: DeepSeek-V3's published router."""
    t, e = logits.shape
    scores = jax.nn.sigmoid(logits)
    ranked = scores + bias
    if router.num_groups > 1:
        groups = ranked.reshape(t, router.num_groups, -1)
        best, _ = jax.lax.top_k(groups, router.group_score_experts)
        _, kept = jax.lax.top_k(best.sum(-1), router.groups_kept)
        is_kept = jnp.any(kept[:, :, None] == jnp.arange(router.num_groups), axis=1)
        masked = 0.0 if router.group_mask == "zero" else -jnp.inf
        ranked = jnp.where(is_kept[:, :, None], groups, masked).reshape(t, e)
    _, ids = jax.lax.top_k(ranked, k)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    weights /= jnp.sum(weights, axis=1, keepdims=True) + router.renormalize_eps
    return ids, weights * router.scale, scores / jnp.sum(scores, axis=1, keepdims=True)


def route_in_jax(logits: jax.Array, k: int, choose=choose_in_jax):
    """What ``dropless.route`` returns, in the shortest public-JAX form, by the names there."""
    t, e = logits.shape
    ids, weights, probs = choose(logits, k)
    slots = ids.reshape(-1)
    slot_of_row = jnp.argsort(slots, stable=True).astype(jnp.int32)
    row_of_slot = (
        jnp.zeros((t * k,), jnp.int32)
        .at[slot_of_row]
        .set(jnp.arange(t * k, dtype=jnp.int32), unique_indices=True)
    )
    counts = jnp.bincount(slots, length=e)
    offsets = jnp.concatenate([jnp.zeros((1,), counts.dtype), jnp.cumsum(counts)])
    lse = jax.nn.logsumexp(logits, axis=-1)
    entropy = -jnp.sum(jax.scipy.special.xlogy(probs, probs))
    nonfinite = jnp.sum(~jnp.isfinite(logits))
    return {
        "counts": counts.astype(jnp.int32),
        "offsets": offsets.astype(jnp.int32),
        "slot_of_row": slot_of_row,
        "row_of_slot": row_of_slot.reshape(t, k),
        "ids": ids,
        "weights": weights,
        "prob_sum": jnp.sum(probs, axis=0),
        "lse_square_sum": jnp.sum(lse**2),
        "entropy_sum": entropy,
        "tokens": jnp.int32(t),
        "nonfinite_logits": nonfinite,
    }


def repeated(route, batches):
    """A call that routes every batch in one program and returns all results.

    The results of the call before are donated, so that memory addresses repeat, as they do inside a
    training step: XLA records a command buffer anew for addresses that it has not seen.
    """
    program = jax.jit(
        lambda batches, _: [route(x) for x in batches], donate_argnums=1, keep_unused=True
    )
    shapes = jax.eval_shape(lambda b: [route(x) for x in b], batches)
    results = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def call():
        nonlocal results
        results = program(batches, results)
        return results

    return call


def measure(tokens: int, experts: int, k: int, calls: int, rounds: int) -> dict:
    cfg = dropless.MoEConfig(
        num_experts=experts, experts_per_token=k, expert_dim=8, precision="f32"
    )
    batches = [
        jax.random.normal(jax.random.key(i), (tokens, experts), jnp.float32) for i in range(calls)
    ]
    ours = functools.partial(dropless.route, cfg=cfg)
    in_jax = functools.partial(route_in_jax, k=k)
    # The same rows on random logits: otherwise the comparison means nothing.
    rows = jax.jit(ours)(batches[0]).slot_of_row, jax.jit(in_jax)(batches[0])["slot_of_row"]
    assert jnp.array_equal(*rows)
    variants = {"dropless": repeated(ours, batches), "jax": repeated(in_jax, batches)}
    times = harness.interleave(variants, rounds=rounds, seconds=10)
    result = {"tokens": tokens, "experts": experts, "experts_per_token": k, "calls": calls}
    for name, row in times.items():
        result[name + "_us"] = {key: 1e3 * row[key + "_ms"] / calls for key in ("median", "min")}
    result["ratio"] = result["jax_us"]["median"] / result["dropless_us"]["median"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="routing.json")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    payload = {"environment": harness.environment(" ".join(sys.argv)), "results": []}
    for tokens, experts, k in ((8192, 128, 8), (16384, 64, 8), (8192, 8, 2), (8192, 256, 8)):
        row = measure(tokens, experts, k, arguments.calls, arguments.rounds)
        payload["results"].append(row)
        print(row, flush=True)
    harness.write(arguments.out, payload)


if __name__ == "__main__":
    main()
