"""Our layer in bf16 and in FP8 over many sizes: what `precision="auto"` is fitted to.

    python bench/fp8_choice.py --out bench/results/gpu_fp8_choice_h200.json
    python bench/fp8_choice.py --fit bench/results/gpu_fp8_choice_h200.json

Forward and backward with every gradient, in rounds of all variants of a size. "fp8" and "bf16"
prepare the experts in each call, "_prepared" were given them, "_prepare" is that alone, "_8" are
eight microbatches: prepared once, eight calls. "in_a_row_ms" is the time of a call among calls in a
row, as a training step makes them: the device is never idle, and its power limit is felt.
"alone_ms" is the time of a call that is waited for before the next one.
"""

import argparse
import dataclasses
import fcntl
import functools
import json
import math
import os
import shlex
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dropless
import harness
import shapes

GPT_OSS = dropless.Activation("silu", slope=1.702, gate_limit=7.0, up_limit=7.0, up_offset=1.0)
POOL = 2**27  # random numbers that all weights are made of
TIMED_SECONDS = 0.03  # of calls in a row
ROUNDS = 5
MICROBATCHES = 8
# Of FP8: two quantisers of x and dy and three of the experts, some 3 us each.
LAUNCHES_MS = 0.015

PLAIN = ("bf16", "fp8_prepared")
FULL = ("bf16", "fp8", "fp8_prepared", "fp8_prepare")
FLOAT32 = ("bf16", "fp8", "bf16_prepared", "fp8_prepared")


@dataclasses.dataclass(frozen=True)
class Case:
    """A size, the parameters' dtype, and which programs are timed."""

    shape: shapes.Shape
    params: str = "bfloat16"
    variants: tuple[str, ...] = PLAIN
    activation: object = "silu"
    microbatches: bool = False


def cases():
    """Sizes of public models with full batches, fewer tokens, and others around them."""
    full = shapes.GPU.values()
    found = [Case(s, variants=FULL, microbatches=True) for s in full]
    found += [Case(s, params="float32", variants=FLOAT32) for s in full]
    s1, s2, s3, s4, s5, s6 = full
    fewer = ((s1, 512), (s1, 2048), (s2, 1024), (s2, 4096), (s3, 1024), (s3, 4096))
    fewer += ((s4, 1024), (s4, 4096), (s5, 1024), (s6, 1024))
    found += [Case(dataclasses.replace(s, tokens=t)) for s, t in fewer]
    sizes = ((8192, 512, 256, 16, 4), (8192, 1024, 512, 8, 2), (16384, 1024, 2048, 8, 2))
    sizes += ((4096, 4096, 11008, 1, 1), (32768, 512, 1024, 64, 4), (8192, 2048, 4096, 8, 2))
    found += [Case(shapes.Shape("other", *size)) for size in sizes]
    # FP8 has no fused kernels for it: float32 steps lie between its products.
    return [*found, Case(s5, activation=GPT_OSS, variants=("bf16", "fp8"))]


def config(case, name):
    shape = case.shape
    return dropless.MoEConfig(
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        expert_dim=shape.expert_dim,
        activation=case.activation,
        precision=name.split("_")[0],
    )


def abstract(case):
    """x, params and what each precision prepares of them, as shapes."""
    shape = case.shape
    params = jax.eval_shape(
        lambda key: dropless.init(
            key, shape.model_dim, config(case, "bf16"), param_dtype=jnp.dtype(case.params)
        ),
        jax.random.key(0),
    )
    ready = {
        name: jax.eval_shape(
            functools.partial(dropless.prepare_experts, cfg=config(case, name)), params
        )
        for name in ("bf16", "fp8")
        if f"{name}_prepared" in case.variants
    }
    return jax.ShapeDtypeStruct((shape.tokens, shape.model_dim), jnp.bfloat16), params, ready


def programs(case):
    """name -> compiled program, and "fill" that makes x, params, dy and prepared experts."""
    x, params, ready = abstract(case)

    def fill(pool):
        def leaf(like, scale):
            values = jnp.resize(pool, like.shape).astype(jnp.float32)
            return (values * scale).astype(like.dtype)

        weights = jax.tree.map(lambda p: leaf(p, p.shape[-2] ** -0.5), params)
        # As random as codes and scales are; what they stand for changes no time.
        codes = jax.tree.map(lambda p: leaf(p, 100.0 if p.dtype.itemsize == 1 else 1e-4), ready)
        # Tokens must differ from the router's columns, which begin the pool.
        return leaf(x, 1.0)[::-1], weights, leaf(x, 1.0), codes

    def step(x, params, ready, dy, cfg):
        y, vjp = jax.vjp(lambda x, p: dropless.moe(x, p, cfg, prepared=ready)[0], x, params)
        return y, *vjp(dy)

    made = {}
    pool = jax.ShapeDtypeStruct((POOL,), jnp.bfloat16)
    made["fill"] = jax.jit(fill).lower(pool).compile()
    for name in case.variants:
        cfg = config(case, name)
        if name.endswith("_prepare"):
            prepare = functools.partial(dropless.prepare_experts, cfg=cfg)
            made[name] = jax.jit(prepare).lower(params).compile()
        else:
            given = ready[name.split("_")[0]] if name.endswith("_prepared") else None
            run = jax.jit(functools.partial(step, cfg=cfg), keep_unused=True)
            made[name] = run.lower(x, params, given, x).compile()
    return made


def timed(calls, rounds):
    """name -> milliseconds of a call in interleaved rounds, in a row and alone."""
    count, row, alone = {}, {name: [] for name in calls}, {name: [] for name in calls}

    def milliseconds(call, times):
        begin = time.perf_counter()
        for _ in range(times):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - begin) * 1e3 / times

    for name, call in calls.items():
        jax.block_until_ready(call())
        count[name] = max(1, math.ceil(TIMED_SECONDS * 1e3 / milliseconds(call, 1)))
    for _ in range(rounds):
        for name, call in calls.items():
            milliseconds(call, 1)
            alone[name].append(milliseconds(call, 1))
            row[name].append(milliseconds(call, count[name]))
    return {
        name: {
            "in_a_row_ms": round(statistics.median(row[name]), 4),
            "least_ms": round(min(row[name]), 4),
            "most_ms": round(max(row[name]), 4),
            "calls": count[name],
            "alone_ms": round(statistics.median(alone[name]), 4),
        }
        for name in calls
    }


def measure(case, made, pool):
    x, params, dy, codes = made["fill"](pool)
    calls = {}
    for name in case.variants:
        if name.endswith("_prepare"):
            calls[name] = functools.partial(made[name], params)
        else:
            ready = codes[name.split("_")[0]] if name.endswith("_prepared") else None
            calls[name] = functools.partial(made[name], x, params, ready, dy)

    def microbatches(ready, name):
        for _ in range(MICROBATCHES):
            result = made[name](x, params, ready, dy)
        return result

    times = timed(calls, ROUNDS)
    if case.microbatches:
        eight = {
            "bf16_8": lambda: microbatches(None, "bf16"),
            "fp8_8": lambda: microbatches(made["fp8_prepare"](params), "fp8_prepared"),
        }
        times |= timed(eight, 2)
    activation = case.activation if isinstance(case.activation, str) else "limited silu"
    sizes = {"shape": vars(case.shape), "params": case.params, "activation": activation}
    return {**sizes, "times": times}


def terms(shape):
    """What times are sums of: products, rows of width H and of width I, weights, calls."""
    m = shape["tokens"] * shape["experts_per_token"]
    h, i, e = (shape[n] for n in ("model_dim", "expert_dim", "num_experts"))
    return [m * h * i, m * h, m * i, min(e, m) * h * i, 1]


def differences(row):
    """(name, bf16's ms, what FP8 takes less, how often experts are prepared) of one size."""
    ms = {name: times["in_a_row_ms"] for name, times in row["times"].items()}
    bf16 = ms.get("bf16_prepared", ms["bf16"])
    if "fp8_prepared" in ms:
        yield "prepared", bf16, bf16 - ms["fp8_prepared"], 0
    if "fp8" in ms:
        yield "every call", ms["bf16"], ms["bf16"] - ms["fp8"], 1
    if "fp8_8" in ms:
        each = ms["bf16_8"] / MICROBATCHES, (ms["bf16_8"] - ms["fp8_8"]) / MICROBATCHES
        yield "of eight", *each, 1 / MICROBATCHES


def fit(paths):
    """Prints the coefficients that `_fp8_model.py` holds, and what they say of each size.

    Least squares of relative errors, all unknowns at once: the terms of bf16's time and of what FP8
    takes less, and the time that preparing a weight takes.
    """
    rows = [row for path in paths for row in json.loads(Path(path).read_text())["choice"]]
    rows = [row for row in rows if row["activation"] == "silu"]

    def solve(features, times, relative_to):
        features, size = np.array(features, np.float64), np.abs(features).max(0)
        scaled = features / size / np.array(relative_to)[:, None]
        return np.linalg.lstsq(scaled, np.divide(times, relative_to), rcond=None)[0] / size

    prepared = [next(differences(row))[1] for row in rows]
    whole = solve([terms(row["shape"]) for row in rows], prepared, prepared)
    features, cases = [], []
    for row in rows:
        shape, float32 = row["shape"], row["params"] == "float32"
        weights = 3 * shape["num_experts"] * shape["model_dim"] * shape["expert_dim"]
        for name, bf16, less, times in differences(row):
            features.append(
                [*terms(shape), *(-times * weights * w for w in (not float32, float32))]
            )
            cases.append((f"{shape['name']} T{shape['tokens']} {row['params']} {name}", bf16, less))
    names, bf16, less = zip(*cases, strict=True)
    # Times are too coarse to tell what more launches cost: that term is given.
    rest = np.delete(np.array(features), 4, axis=1)
    saved = np.insert(solve(rest, np.add(less, LAUNCHES_MS), bf16), 4, -LAUNCHES_MS)
    bytes_a_ms = 4 / saved[5]
    print("seconds of bf16:", [f"{v / 1e3:.3e}" for v in whole])
    print("seconds saved:  ", [f"{v / 1e3:.3e}" for v in saved[:5]])
    print(f"FP8 prepares {bytes_a_ms / 1e9:.2f} TB/s", end=", ")
    print(f"bf16 {6 / (6 / bytes_a_ms - saved[6]) / 1e9:.2f} TB/s")
    for name, ms, difference, feature in zip(names, bf16, less, features, strict=True):
        told = float(np.dot(feature, saved)) / ms
        print(f"{name:50} bf16 {ms:8.3f} ms, saved {difference / ms:6.1%}, fitted {told:6.1%}")


def main() -> None:
    """Compiles every program, times case by case and writes the result file; or fits such files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--fit", nargs="*")
    parser.add_argument("--threads", type=int, default=12, help="programs compiled at once")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="I N: each Nth case")
    parser.add_argument(
        "--lock", help="a file by which processes compile together, then take turns"
    )
    args = parser.parse_args()
    if args.fit:
        fit(args.fit)
        return
    said = [a for a in sys.argv[1:] if a not in ("--out", args.out, "--lock", args.lock)]
    environment = harness.environment(shlex.join(["python", "bench/fp8_choice.py", *said]))
    todo = cases()[args.part[0] :: args.part[1]]
    with open(args.lock or os.devnull, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        begin = time.perf_counter()
        with ThreadPoolExecutor(args.threads) as workers:
            made = list(workers.map(programs, todo))
        print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
        fcntl.flock(lock, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_EX)
        pool = jax.random.normal(jax.random.key(0), (POOL,), jnp.bfloat16)
        rows = []
        for case, compiled in zip(todo, made, strict=True):
            rows.append(measure(case, compiled, pool))
            times = {n: (t["in_a_row_ms"], t["alone_ms"]) for n, t in rows[-1]["times"].items()}
            print(case.shape.name, case.shape.tokens, case.params, times, flush=True)
            harness.write(args.out, {"environment": environment, "choice": rows})
        print(f"all in {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
