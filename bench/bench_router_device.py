"""Routing and plan on the GPU alone: device time of ours and of the same steps in jitted JAX.

    python bench/bench_router_device.py --out bench/results/gpu_router_h200.json

Both sides by the same profiler: the sum of the durations of all kernels and copies of a call, so
that neither pays for its host. One program routes several batches and returns all results, so that
sort and counts are really computed. Routers of the menu are ours alone.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp

import dropless
import harness
from bench_routing import route_in_jax
from device_trace import device_time

SIZES = ((8192, 128, 8), (16384, 64, 8), (8192, 8, 2), (8192, 256, 8), (16384, 256, 8))
SIGMOID = {"score": "sigmoid", "renormalize_eps": 1e-20, "scale": 2.5, "selection_bias": True}
ROUTERS = {
    "softmax": {},
    "sigmoid_bias": SIGMOID,
    **{
        f"sigmoid_bias_{groups}_groups_keep_{kept}": SIGMOID
        | {
            "num_groups": groups,
            "groups_kept": kept,
            "group_score_experts": 2,
            "group_mask": "zero",
        }
        for groups, kept in ((4, 2), (8, 4), (16, 4), (32, 8))
    },
}


def several(route, batches):
    program = jax.jit(lambda batches: [route(x) for x in batches])
    return lambda: program(batches)


def against_jax(tokens: int, experts: int, k: int, calls: int) -> dict:
    cfg = dropless.MoEConfig(
        num_experts=experts, experts_per_token=k, expert_dim=8, precision="f32"
    )
    batches = [
        jax.random.normal(jax.random.key(i), (tokens, experts), jnp.float32) for i in range(calls)
    ]
    ours = functools.partial(dropless.route, cfg=cfg)
    in_jax = functools.partial(route_in_jax, k=k)
    rows = [jax.jit(route)(batches[0]).slot_of_row for route in (ours, in_jax)]
    assert jnp.array_equal(*rows)
    row = {"tokens": tokens, "experts": experts, "experts_per_token": k}
    for name, route in (("dropless", ours), ("jax", in_jax)):
        row[name] = device_time(several(route, batches), batches=calls)
    row["jax_over_dropless"] = row["jax"]["busy_us"] / row["dropless"]["busy_us"]
    return row


def of_menu(name: str, tokens: int, experts: int, k: int, calls: int) -> dict:
    cfg = dropless.MoEConfig(
        num_experts=experts,
        experts_per_token=k,
        expert_dim=8,
        precision="f32",
        router=dropless.RouterConfig(**ROUTERS[name]),
    )
    bias = 0.1 * jax.random.normal(jax.random.key(99), (experts,))
    biased = {"selection_bias": bias} if cfg.router.selection_bias else {}
    batches = [
        jax.random.normal(jax.random.key(i), (tokens, experts), jnp.float32) for i in range(calls)
    ]
    time = device_time(several(lambda x: dropless.route(x, cfg, **biased), batches), batches=calls)
    return {"router": name, "tokens": tokens, "experts": experts, "experts_per_token": k} | time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--calls", type=int, default=5)
    args = parser.parse_args()
    said = [a for a in sys.argv[1:] if a not in ("--out", args.out)]
    payload = {
        "environment": harness.environment(
            " ".join(["python", "bench/bench_router_device.py", *said])
        ),
        "against_jax": [],
        "menu": [],
    }
    for size in SIZES:
        payload["against_jax"].append(against_jax(*size, args.calls))
        row = payload["against_jax"][-1]
        print(size, row["dropless"]["busy_us"], row["jax"]["busy_us"], row["jax_over_dropless"])
    for name in ROUTERS:
        payload["menu"].append(of_menu(name, 16384, 256, 8, args.calls))
        print(name, payload["menu"][-1]["busy_us"], flush=True)
    harness.write(args.out, payload)


if __name__ == "__main__":
    main()
