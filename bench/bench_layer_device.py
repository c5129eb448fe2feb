"""The layer on a GPU beyond its speed at full batches: launches, decoding, stacked layers, memory.

    python bench/bench_layer_device.py --out bench/results/gpu_layer_facts_h200.json

launches: kernels and copies of one forward and backward, from a profiler trace.
decode:   few tokens, forward: device time against reading the chosen experts' weights once.
stack:    24 layers in a scan and unrolled: compile time, step time, copies of a layer's weights.
memory:   device memory over training steps with changing routing.
"""

import argparse
import dataclasses
import re
import sys
import time

import jax
import jax.numpy as jnp

import dropless
import harness
import shapes
from device_trace import device_time


def build(shape, layers=None, **router):
    """cfg, bfloat16 params (stacked if ``layers`` is given), x of one shape."""
    cfg = dropless.MoEConfig(
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        expert_dim=shape.expert_dim,
        precision="bf16",
        router=dropless.RouterConfig(**router),
    )
    make = lambda key: dropless.init(key, shape.model_dim, cfg, param_dtype=jnp.bfloat16)  # noqa: E731
    key = jax.random.key(0)
    params = make(key) if layers is None else jax.lax.map(make, jax.random.split(key, layers))
    x = jax.random.normal(jax.random.key(1), (shape.tokens, shape.model_dim), jnp.float32)
    return cfg, params, x.astype(jnp.bfloat16)


def gradient_step(apply):
    def loss(x, params):
        return jnp.sum(apply(x, params).astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))


def launches(name: str) -> dict:
    cfg, params, x = build(shapes.GPU[name])
    dy = jax.random.normal(jax.random.key(2), x.shape, jnp.float32).astype(x.dtype)

    @jax.jit
    def step(x, params, dy):
        y, vjp = jax.vjp(lambda x, p: dropless.moe(x, p, cfg)[0], x, params)
        return y, *vjp(dy)

    return {"shape": name} | device_time(lambda: step(x, params, dy), repeats=3)


def decode(name: str, tokens: int, bandwidth: float) -> dict:
    shape = dataclasses.replace(shapes.GPU[name], tokens=tokens)
    cfg, params, x = build(shape)
    step = jax.jit(lambda x, p: dropless.moe(x, p, cfg))
    chosen = int((step(x, params)[1].expert_counts > 0).sum())
    weights = chosen * 3 * shape.model_dim * shape.expert_dim * 2  # bytes
    result = device_time(lambda: step(x, params)[0], repeats=10)
    floor_us = weights / bandwidth * 1e6
    return {
        "shape": name,
        "tokens": tokens,
        "experts_chosen": chosen,
        "floor_us": floor_us,
        "floor_over_ours": floor_us / result["busy_us"],
    } | result


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 2 GiB."""
    x = jnp.zeros((2**29,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    times = harness.interleave({"copy": lambda: copy(x)}, rounds=10, seconds=2)
    return 2 * x.nbytes / (times["copy"]["min_ms"] * 1e-3)


def stack(name: str, tokens: int, layers: int) -> dict:
    shape = dataclasses.replace(shapes.GPU[name], tokens=tokens)
    cfg, params, x = build(shape, layers)

    def body(x, layer):
        return x + dropless.moe(x, layer, cfg)[0], None

    def scanned(x, params):
        return jax.lax.scan(body, x, params)[0]

    def unrolled(x, params):
        return jax.lax.scan(body, x, params, unroll=layers)[0]

    result = {"shape": name, "tokens": tokens, "layers": layers}
    calls = {}
    matrix = rf"\[(1,)?{shape.num_experts},({shape.model_dim},{shape.expert_dim}|"
    matrix += rf"{shape.expert_dim},{shape.model_dim})\]"
    copies = re.compile(rf"= bf16{matrix}\S* (copy|dynamic-slice|slice|fusion)\(")
    for kind, apply in (("scan", scanned), ("unrolled", unrolled)):
        begin = time.perf_counter()
        step = jax.jit(gradient_step(apply)).lower(x, params).compile()
        result[kind] = {
            "compile_s": time.perf_counter() - begin,
            # Instructions of the compiled program that make a layer's matrices of experts anew.
            "expert_matrix_copies": len(copies.findall(step.as_text())),
            "temporary_bytes": step.memory_analysis().temp_size_in_bytes,
        }
        calls[kind] = lambda step=step: step(x, params)[0]
    for kind, times in harness.interleave(calls, rounds=10, seconds=6, warmup=1).items():
        result[kind]["step"] = times
    medians = [result[kind]["step"]["median_ms"] for kind in ("scan", "unrolled")]
    result["scan_over_unrolled"] = medians[0] / medians[1]
    return result


def memory(name: str, tokens: int, steps: int) -> dict:
    shape = dataclasses.replace(shapes.GPU[name], tokens=tokens)
    cfg, params, _ = build(shape)

    @jax.jit
    def step(key, params):
        # Another direction at every step: other experts are crowded.
        x = jax.random.normal(key, (tokens, shape.model_dim)) + 3 * jax.random.normal(
            jax.random.fold_in(key, 1), (shape.model_dim,)
        )
        (_, (_, grads)) = gradient_step(lambda x, p: dropless.moe(x, p, cfg)[0])(
            x.astype(jnp.bfloat16), params
        )
        return jax.tree.map(lambda p, g: p - (1e-4 * g).astype(p.dtype), params, grads)

    device = jax.devices()[0]
    in_use, peak = [], []
    for i in range(steps):
        params = jax.block_until_ready(step(jax.random.key(i), params))
        stats = device.memory_stats()
        in_use.append(stats["bytes_in_use"])
        peak.append(stats["peak_bytes_in_use"])
    flat = max(in_use[3:]) <= in_use[2] and peak[-1] == peak[2]
    return {
        "shape": name,
        "tokens": tokens,
        "steps": steps,
        "in_use_after_3": in_use[2],
        "most_in_use_later": max(in_use[3:]),
        "peak_after_3": peak[2],
        "peak_at_end": peak[-1],
        "flat": flat,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--parts", nargs="*", default=["launches", "decode", "memory", "stack"])
    args = parser.parse_args()
    said = [a for a in sys.argv[1:] if a not in ("--out", args.out)]
    command = " ".join(["python", "bench/bench_layer_device.py", *said])
    payload = {"environment": harness.environment(command)}
    s2, s4 = "S2-qwen3-30b", "S4-olmoe"

    def decoded():
        bandwidth = copy_bandwidth()
        rows = [decode(name, t, bandwidth) for name in (s2, s4) for t in (1, 16, 64)]
        return {"copy_bytes_per_second": bandwidth, "rows": rows}

    parts = {
        "launches": lambda: [launches(name) for name in (s2, s4)],
        "decode": decoded,
        "memory": lambda: memory(s4, 4096, 200),
        "stack": lambda: stack(s4, 2048, 24),
    }
    for part in args.parts:
        begin = time.perf_counter()
        try:
            payload[part] = parts[part]()
        except Exception as error:
            payload[part] = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(part, f"{time.perf_counter() - begin:.1f} s", payload[part], flush=True)
        harness.write(args.out, payload)


if __name__ == "__main__":
    main()
