"""The layer on a GPU beyond its speed at full batches: launches, decoding, stacked layers, memory.

    python bench/bench_layer_device.py --out bench/results/gpu_layer_facts_h200.json

memory:   device memory over training steps with changing routing.
repeats:  the bits of all results over a hundred steps at full size.
launches: kernels and copies of one forward and backward, from a profiler trace.
decode:   few tokens, forward: device time against reading the chosen experts' weights once.
stack:    24 layers in a scan, with and without slices that are read in place, and 24 layers whose
          weights are arrays of their own: compile time, step time, copies of a layer's weights.
"""

import argparse
import dataclasses
import functools
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


def read_bandwidth() -> float:
    """Bytes a second that a sum of 4 GiB reads, by device time: nothing reads weights faster."""
    x = jax.random.normal(jax.random.key(0), (2**15, 2**16), jnp.bfloat16)
    total = jax.jit(lambda x: jnp.sum(x, axis=1, dtype=jnp.float32))
    return x.nbytes / (device_time(lambda: total(x), repeats=10)["busy_us"] * 1e-6)


# XLA's own fusion of a slice with the call that reads or writes it. On by default in later
# releases than jax 0.10.
IN_PLACE = "xla_gpu_enable_dynamic_slice_fusion"


def matrix_copies(text: str, shape) -> int:
    """Instructions of a compiled program that make, or write into a stack, a layer's matrices.

    Fusions of a slice with a custom call are none: there the kernel itself reads or writes.
    """
    sides = f"({shape.model_dim},{shape.expert_dim}|{shape.expert_dim},{shape.model_dim})"
    matrix = rf"bf16\[(\d+,)?{shape.num_experts},{sides}\]"
    made = rf"= {matrix}\S* (copy|slice|dynamic-slice|dynamic-update-slice|concatenate|fusion)\("
    lines = [line for line in text.splitlines() if re.search(made, line)]
    inside = [line for line in lines if " fusion(" in line and "kind=kCustom" in line]
    return len(lines) - len(inside)


def stack(name: str, tokens: int, layers: int) -> dict:
    shape = dataclasses.replace(shapes.GPU[name], tokens=tokens)
    cfg, params, x = build(shape, layers)
    apart = [jax.tree.map(lambda leaf, i=i: leaf[i], params) for i in range(layers)]

    def body(x, layer):
        return x + dropless.moe(x, layer, cfg)[0], None

    def scanned(x, params):
        return jax.lax.scan(body, x, params)[0]

    def unrolled(x, params):
        for layer in params:
            x, _ = body(x, layer)
        return x

    result = {"shape": name, "tokens": tokens, "layers": layers}
    calls = {}
    for kind, apply, weights, options in (
        ("scan", scanned, params, {IN_PLACE: False}),
        ("scan_in_place", scanned, params, {IN_PLACE: True}),
        ("unrolled", unrolled, apart, {}),
    ):
        begin = time.perf_counter()
        step = jax.jit(gradient_step(apply)).lower(x, weights).compile(compiler_options=options)
        result[kind] = {
            "compile_s": time.perf_counter() - begin,
            "expert_matrix_copies": matrix_copies(step.as_text(), shape),
            "temporary_bytes": step.memory_analysis().temp_size_in_bytes,
        }
        calls[kind] = lambda step=step, weights=weights: step(x, weights)[0]
    for kind, times in harness.interleave(calls, rounds=7, seconds=4, warmup=1).items():
        result[kind]["step"] = times
    unrolled_ms = result["unrolled"]["step"]["median_ms"]
    for kind in ("scan", "scan_in_place"):
        result[kind]["over_unrolled"] = result[kind]["step"]["median_ms"] / unrolled_ms
    return result


def repeats(name: str, times: int) -> dict:
    """Steps of one program on the same arguments whose results differ in any bit from the first."""
    cfg, params, x = build(shapes.GPU[name])
    step = jax.jit(gradient_step(lambda x, p: dropless.moe(x, p, cfg)[0]))

    @jax.jit
    def differing(a, b):
        bits = {2: jnp.uint16, 4: jnp.uint32}
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        view = lambda leaf: jax.lax.bitcast_convert_type(leaf, bits[leaf.dtype.itemsize])  # noqa: E731
        return sum(jnp.sum(view(a) != view(b), dtype=jnp.int32) for a, b in pairs)

    first = step(x, params)
    different = [int(differing(step(x, params), first)) for _ in range(times)]
    return {"shape": name, "steps": times, "steps_that_differ": sum(d > 0 for d in different)}


def memory(name: str, tokens: int, steps: int) -> dict:
    shape = dataclasses.replace(shapes.GPU[name], tokens=tokens)
    cfg, params, _ = build(shape)
    keys = list(jax.random.split(jax.random.key(0), steps))  # nothing is made between the steps

    @functools.partial(jax.jit, donate_argnums=1)
    def step(key, params):
        # Another direction at every step: other experts are crowded.
        x = jax.random.normal(key, (tokens, shape.model_dim)) + 3 * jax.random.normal(
            jax.random.fold_in(key, 1), (shape.model_dim,)
        )
        (_, (_, grads)) = gradient_step(lambda x, p: dropless.moe(x, p, cfg)[0])(
            x.astype(jnp.bfloat16), params
        )
        counts = jnp.bincount(
            jnp.argmax(x @ params["router"]["kernel"], -1), length=shape.num_experts
        )

        def moved(p, g):  # by a thousandth of its length
            p32, g32 = p.astype(jnp.float32), g.astype(jnp.float32)
            scale = 1e-3 * jnp.linalg.norm(p32) / jnp.maximum(jnp.linalg.norm(g32), 1e-30)
            return (p32 - scale * g32).astype(p.dtype)

        return jax.tree.map(moved, params, grads), jnp.argmax(counts)

    device = jax.devices()[0]
    in_use, peak, fullest = [], [], set()
    for key in keys:
        params, crowded = jax.block_until_ready(step(key, params))
        fullest.add(int(crowded))
        del crowded
        stats = device.memory_stats()
        in_use.append(stats["bytes_in_use"])
        peak.append(stats["peak_bytes_in_use"])
    # The runtime may free a small array a step late; what leaks is held by every later step.
    flat = min(in_use[-20:]) <= min(in_use[2:22]) and peak[-1] == peak[2]
    return {
        "shape": name,
        "tokens": tokens,
        "steps": steps,
        "experts_that_were_fullest": len(fullest),
        "finite": all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params)),
        "in_use_after_3": in_use[2],
        "most_in_use_later": max(in_use[3:]),
        "least_in_use_of_last_20": min(in_use[-20:]),
        "peak_after_3": peak[2],
        "peak_at_end": peak[-1],
        "flat": flat,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument(
        "--parts", nargs="*", default=["memory", "repeats", "launches", "decode", "stack"]
    )
    args = parser.parse_args()
    said = [a for a in sys.argv[1:] if a not in ("--out", args.out)]
    command = " ".join(["python", "bench/bench_layer_device.py", *said])
    payload = {"environment": harness.environment(command)}
    s2, s4 = "S2-qwen3-30b", "S4-olmoe"

    def decoded():
        bandwidth = read_bandwidth()
        rows = [decode(name, t, bandwidth) for name in (s2, s4) for t in (1, 16, 64)]
        return {"read_bytes_per_second": bandwidth, "rows": rows}

    parts = {
        # First: the peak is the process's.
        "memory": lambda: memory(s4, 4096, 200),
        "repeats": lambda: [repeats(name, 100) for name in (s2, s4)],
        "launches": lambda: [launches(name) for name in (s2, s4)],
        "decode": decoded,
        "stack": lambda: [stack(s4, tokens, 24) for tokens in (2048, 16384)],
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
