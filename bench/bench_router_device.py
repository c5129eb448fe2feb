"""Routing and plan on the GPU alone: device time of ours and of the same steps in jitted JAX.

    python bench/bench_router_device.py --out bench/results/gpu_router_h200.json

Both sides by the same profiler: the sum of the durations of all kernels and copies of a call, so
that neither pays for its host. One program routes several batches and returns all results, so that
sort and counts are really computed. `wall_us` is a batch's share of a call as the host sees it.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp

import dropless
import harness
from bench_routing import choose_biased_in_jax, choose_in_jax, route_in_jax
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


def against_jax(ours, in_jax, tokens: int, experts: int, calls: int) -> dict:
    batches = [
        jax.random.normal(jax.random.key(i), (tokens, experts), jnp.float32) for i in range(calls)
    ]
    rows = jax.jit(ours)(batches[0]).slot_of_row, jax.jit(in_jax)(batches[0])["slot_of_row"]
    # Scores that round differently may rank a token's experts otherwise: rows of other tokens move.
    differ = float(jnp.mean(rows[0] != rows[1]))
    both = {"dropless": several(ours, batches), "jax": several(in_jax, batches)}
    row = {"slots_that_differ": differ}
    for name, call in both.items():
        row[name] = device_time(call, batches=calls)
    row["jax_over_dropless"] = row["jax"]["busy_us"] / row["dropless"]["busy_us"]
    for name, times in harness.interleave(both, rounds=30, seconds=1).items():
        row[name]["wall_us"] = 1e3 * times["median_ms"] / calls
    return row


def softmax(tokens: int, experts: int, k: int, calls: int) -> dict:
    cfg = dropless.MoEConfig(
        num_experts=experts, experts_per_token=k, expert_dim=8, precision="f32"
    )
    ours = functools.partial(dropless.route, cfg=cfg)
    in_jax = functools.partial(route_in_jax, k=k)
    row = {"tokens": tokens, "experts": experts, "experts_per_token": k}
    row |= against_jax(ours, in_jax, tokens, experts, calls)
    assert row["slots_that_differ"] == 0
    return row


def of_menu(name: str, tokens: int, experts: int, k: int, calls: int) -> dict:
    router = dropless.RouterConfig(**ROUTERS[name])
    cfg = dropless.MoEConfig(
        num_experts=experts, experts_per_token=k, expert_dim=8, precision="f32", router=router
    )
    bias = 0.1 * jax.random.normal(jax.random.key(99), (experts,))
    if router.selection_bias:
        ours = functools.partial(dropless.route, cfg=cfg, selection_bias=bias)
        choose = functools.partial(choose_biased_in_jax, bias=bias, router=router)
    else:
        ours, choose = functools.partial(dropless.route, cfg=cfg), choose_in_jax
    in_jax = functools.partial(route_in_jax, k=k, choose=choose)
    row = {"router": name, "tokens": tokens, "experts": experts, "experts_per_token": k}
    return row | against_jax(ours, in_jax, tokens, experts, calls)


def report(name, row: dict) -> None:
    figures = [row[side][kind] for kind in ("busy_us", "wall_us") for side in ("dropless", "jax")]
    print(name, *(f"{f:.1f}" for f in figures), f"{row['jax_over_dropless']:.2f}", flush=True)
    print(" ", {n[:60]: round(t, 2) for n, t in row["dropless"]["us"].items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--routers", nargs="*", choices=ROUTERS, default=list(ROUTERS))
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
        payload["against_jax"].append(softmax(*size, args.calls))
        report(size, payload["against_jax"][-1])
    for name in args.routers:
        payload["menu"].append(of_menu(name, 16384, 256, 8, args.calls))
        report(name, payload["menu"][-1])
    harness.write(args.out, payload)


if __name__ == "__main__":
    main()
