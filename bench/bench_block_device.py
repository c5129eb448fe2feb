"""Blocks of published models at full size on a GPU: time and memory, forward and backward.

    python bench/bench_block_device.py --out bench/results/gpu_blocks_h200.json

Every block is made from its preset, parameters in bfloat16, and runs in a process of its own, so
that the peak of device memory is its own. A rank's block has one group of DeepSeek-V3's experts,
32 of 256, and receives as many rows as the eight ranks' tokens send it on average.
"""

import argparse
import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp

import dropless
import harness
from device_trace import device_time

# preset, ranks, tokens
BLOCKS = {
    "qwen3-30b-a3b": ("qwen3-30b-a3b", 1, 16384),
    "deepseek-v3": ("deepseek-v3", 1, 8192),
    "deepseek-v3, one of 8 ranks": ("deepseek-v3", 8, 8192),
}


def config_of(preset: str, ranks: int):
    cfg, model_dim = dropless.models.presets[preset]
    cfg = dataclasses.replace(cfg, precision="bf16", strict=True)
    if ranks > 1:
        router = dataclasses.replace(cfg.router, num_groups=1, groups_kept=1)
        cfg = dataclasses.replace(cfg, num_experts=cfg.num_experts // ranks, router=router)
    return cfg, model_dim


def measure(name: str, rounds: int) -> dict:
    preset, ranks, tokens = BLOCKS[name]
    cfg, model_dim = config_of(preset, ranks)
    init = jax.jit(lambda key: dropless.init(key, model_dim, cfg, param_dtype=jnp.bfloat16))
    params = init(jax.random.key(0))
    x, dy = (
        jax.random.normal(jax.random.key(i), (tokens, model_dim), jnp.bfloat16) for i in (1, 2)
    )

    def block(x, params):
        return dropless.moe(x, params, cfg)

    def step(x, params, dy):
        y, vjp, aux = jax.vjp(block, x, params, has_aux=True)
        return y, *vjp(dy), aux

    def finite(tree):
        return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree))

    forward = jax.jit(block).lower(x, params).compile()
    step = jax.jit(step).lower(x, params, dy).compile()
    device = jax.devices()[0]
    peak = lambda: (device.memory_stats() or {}).get("peak_bytes_in_use")  # noqa: E731
    before = peak()
    y, dx, d_params, aux = step(x, params, dy)
    counts = aux.expert_counts
    row = {
        "block": name,
        "tokens": tokens,
        "model_dim": model_dim,
        "num_experts": cfg.num_experts,
        "experts_per_token": cfg.experts_per_token,
        "expert_dim": cfg.expert_dim,
        "shared_expert_dim": cfg.shared_expert_dim,
        "finite": finite((y, dx, d_params)),
        "rows": int(counts.sum()),
        "dropped": int(aux.dropped_tokens),
        "busiest_expert_over_mean": float(counts.max() / counts.mean()),
        "parameter_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "peak_bytes_before_step": before,
        "peak_bytes": peak(),
    }
    del y, dx, d_params
    for kind, program in (("forward", forward), ("forward_backward", step)):
        memory = program.memory_analysis()
        row[kind] = {
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
        }
    calls = {
        "forward": lambda: forward(x, params)[0],
        "forward_backward": lambda: step(x, params, dy)[:2],
    }
    for kind, times in harness.interleave(calls, rounds=rounds, seconds=4, warmup=1).items():
        row[kind] |= times
    # 18·M·H·I forward and backward, a third of it forward; the shared expert's as of T rows.
    width = row["rows"] * cfg.expert_dim + tokens * (cfg.shared_expert_dim or 0)
    flops = 18 * model_dim * width
    for kind, share in (("forward", 1 / 3), ("forward_backward", 1)):
        row[kind]["tflops"] = share * flops / row[kind]["median_ms"] / 1e9
    if jax.default_backend() == "gpu":
        traced = device_time(calls["forward_backward"], repeats=3)
        row["forward_backward"] |= {"device_us": traced["busy_us"], "events": traced["events"]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only, args.rounds)))
        return
    payload = {"blocks": []}
    for name in BLOCKS:
        command = [sys.executable, __file__, "--out", "-", "--only", name]
        done = subprocess.run(
            [*command, "--rounds", str(args.rounds)], capture_output=True, text=True, check=False
        )
        last = done.stdout.strip().splitlines()[-1:]
        row = (
            json.loads(last[0])
            if done.returncode == 0
            else {"block": name, "error": done.stderr[-800:]}
        )
        payload["blocks"].append(row)
        print(row, flush=True)
    # After the blocks: this process holds memory of its own once it has asked for the device.
    payload["environment"] = harness.environment(
        f"python bench/bench_block_device.py --rounds {args.rounds}"
    )
    harness.write(args.out, payload)


if __name__ == "__main__":
    main()
