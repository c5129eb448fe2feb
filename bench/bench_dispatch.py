"""Route, plan and combine on a CPU: against the machine's copy and the same steps in jitted JAX.

Times are CPU seconds of the whole process, the smallest of the interleaved rounds: other programs
on the machine disturb them less than wall time. Bandwidth is bytes read and written per CPU second.

    PYTHONPATH=python python bench/bench_dispatch.py --out bench/results/dispatch_cpu.json
"""

from __future__ import annotations

import argparse
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np

import dropless
import harness
from bench_routing import route_in_jax

TOKENS, WIDTH, EXPERTS, PER_TOKEN = 16384, 1024, 64, 8  # T, H, E, K


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def combine_in_jax(rows, routing):
    """y[t] = sum over k of weights[t, k] * rows[row_of_slot[t, k]], summed in float32."""
    gathered = rows[routing.row_of_slot].astype(jnp.float32)
    return jnp.einsum("tkh,tk->th", gathered, routing.weights).astype(rows.dtype)


def steps(route, combine):
    def call(logits, rows):
        routing = route(logits)
        return routing, combine(rows, routing)

    return jax.jit(call)


def measure(dtype, rounds: int) -> dict:
    cfg = dropless.MoEConfig(
        num_experts=EXPERTS, experts_per_token=PER_TOKEN, expert_dim=8, precision="f32"
    )
    keys = jax.random.split(jax.random.key(0), 2)
    logits = jax.random.normal(keys[0], (TOKENS, EXPERTS))
    rows = jax.random.normal(keys[1], (TOKENS * PER_TOKEN, WIDTH)).astype(dtype)

    ours = steps(
        lambda x: dropless.route(x, cfg),
        lambda rows, routing: dropless.unpermute(rows, routing, weights=routing.weights),
    )
    in_jax = steps(lambda x: route_in_jax(x, PER_TOKEN), combine_in_jax)
    source = np.ones(rows.nbytes // 4, np.float32)
    target = np.zeros_like(source)
    calls = {
        "copy": lambda: np.copyto(target, source),
        "dropless": lambda: jax.block_until_ready(ours(logits, rows)),
        "route": jax.jit(lambda x: dropless.route(x, cfg)).lower(logits).compile(),
        "jax": lambda: jax.block_until_ready(in_jax(logits, rows)),
    }
    route = calls["route"]
    calls["route"] = lambda: jax.block_until_ready(route(logits))
    y, expected = calls["dropless"]()[1], calls["jax"]()[1]
    error = jnp.max(jnp.abs(y.astype(jnp.float32) - expected.astype(jnp.float32)))
    assert error < 0.1, f"the two ways differ by {error}"

    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            begin = cpu_seconds()
            call()
            seconds[name] = min(seconds[name], cpu_seconds() - begin)
    # Logits and rows once, the routing written and read, y once.
    moved = logits.nbytes + rows.nbytes + rows.nbytes // PER_TOKEN + 2 * 4 * 4 * TOKENS * PER_TOKEN
    copy = 2 * source.nbytes / seconds["copy"]
    return {
        "dtype": jnp.dtype(dtype).name,
        "shape": {"T": TOKENS, "H": WIDTH, "E": EXPERTS, "K": PER_TOKEN},
        "cpu_ms": {name: 1e3 * s for name, s in seconds.items()},
        "copy_gb_per_s": 1e-9 * copy,
        "dropless_gb_per_s": 1e-9 * moved / seconds["dropless"],
        "of_copy": moved / seconds["dropless"] / copy,
        "jax_over_ours": seconds["jax"] / seconds["dropless"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="dispatch_cpu.json")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    payload = {"environment": harness.environment(" ".join(sys.argv)), "results": []}
    for dtype in (jnp.float32, jnp.bfloat16):
        payload["results"].append(measure(dtype, arguments.rounds))
        print(payload["results"][-1], flush=True)
    harness.write(arguments.out, payload)


if __name__ == "__main__":
    main()
