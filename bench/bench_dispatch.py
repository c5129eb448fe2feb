"""Route, plan and combine on a CPU: against the machine's copy and the same steps in jitted JAX.

The copy is `memcpy` by as many threads as XLA has (`taskset -c` decides how many), each its own
part, into memory touched before: the most that this machine moves. Bandwidth counts bytes read and
written. Times are medians of interleaved rounds. The rows that are combined are a result of the
engine, as they are in the layer: it asks the system for large pages.

    PYTHONPATH=python python bench/bench_dispatch.py --out bench/results/dispatch_cpu.json
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import dropless
import harness
from bench_routing import route_in_jax

TOKENS, WIDTH, EXPERTS, PER_TOKEN = 16384, 1024, 64, 8  # T, H, E, K


def threaded_copy(nbytes: int):
    """A call that copies `nbytes` between two arrays that were written before, by all threads."""
    threads = len(os.sched_getaffinity(0))
    source = np.ones(nbytes // 4, np.float32)
    target = np.zeros_like(source)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(lambda part: np.copyto(*part), parts))


def combine_in_jax(rows, routing):
    """y[t] = sum over k of weights[t, k] * rows[row_of_slot[t, k]], summed in float32."""
    gathered = rows[routing["row_of_slot"]].astype(jnp.float32)
    return jnp.einsum("tkh,tk->th", gathered, routing["weights"]).astype(rows.dtype)


def steps(route, combine):
    def call(logits, rows):
        routing = route(logits)
        return routing, combine(rows, routing)

    return jax.jit(call)


def measure(dtype, rounds: int, seconds: float) -> dict:
    cfg = dropless.MoEConfig(
        num_experts=EXPERTS, experts_per_token=PER_TOKEN, expert_dim=8, precision="f32"
    )
    keys = jax.random.split(jax.random.key(0), 2)
    logits = jax.random.normal(keys[0], (TOKENS, EXPERTS))
    x = jax.random.normal(keys[1], (TOKENS, WIDTH)).astype(dtype)

    def combine(rows, routing):
        return dropless.unpermute(rows, routing, weights=routing.weights)

    route = jax.jit(lambda x: dropless.route(x, cfg))
    routing = route(logits)
    permute = jax.jit(dropless.permute)
    rows = permute(x, routing)
    ours, in_jax = (
        steps(route, combine),
        steps(lambda x: route_in_jax(x, PER_TOKEN), combine_in_jax),
    )
    y, expected = ours(logits, rows)[1], in_jax(logits, rows)[1]
    error = jnp.max(jnp.abs(y.astype(jnp.float32) - expected.astype(jnp.float32)))
    assert error < 0.1, f"the two ways differ by {error}"

    combine = jax.jit(combine)
    calls = {
        "copy": threaded_copy(rows.nbytes),
        "dropless": lambda: ours(logits, rows),
        "route": lambda: route(logits),
        "combine": lambda: combine(rows, routing),
        "permute": lambda: permute(x, routing),
        "jax": lambda: in_jax(logits, rows),
    }
    times = harness.interleave(calls, rounds=rounds, seconds=seconds)
    median = {name: t["median_ms"] for name, t in times.items()}
    copy = 2 * rows.nbytes / median["copy"]  # bytes a millisecond
    # Logits and rows once, the routing written and read, y once.
    moved = logits.nbytes + rows.nbytes + rows.nbytes // PER_TOKEN + 2 * 4 * 4 * TOKENS * PER_TOKEN
    permuted = x.nbytes + rows.nbytes + 4 * TOKENS * PER_TOKEN
    return {
        "dtype": jnp.dtype(dtype).name,
        "shape": {"T": TOKENS, "H": WIDTH, "E": EXPERTS, "K": PER_TOKEN},
        "times": times,
        "copy_gb_per_s": 1e-6 * copy,
        "dropless_gb_per_s": 1e-6 * moved / median["dropless"],
        "of_copy": moved / median["dropless"] / copy,
        "permute_of_copy": permuted / median["permute"] / copy,
        "jax_over_ours": median["jax"] / median["dropless"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="dispatch_cpu.json")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0, help="per element type")
    args = parser.parse_args()
    said = [a for a in sys.argv[1:] if a not in ("--out", args.out)]
    payload = {
        "environment": harness.environment(
            shlex.join(["python", "bench/bench_dispatch.py", *said])
        ),
        "threads": len(os.sched_getaffinity(0)),
        "results": [],
    }
    for dtype in (jnp.float32, jnp.bfloat16):
        payload["results"].append(measure(dtype, args.rounds, args.seconds))
        print(payload["results"][-1], flush=True)
    harness.write(args.out, payload)


if __name__ == "__main__":
    main()
