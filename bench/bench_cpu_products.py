"""The grouped product alone on a CPU: against one dense XLA GEMM, and over the number of experts.

    PYTHONPATH=python python bench/bench_cpu_products.py --out bench/results/products_cpu.json

Every row of the result multiplies the same M rows [M, H] x [E, H, I]; the peer is one dense product
[M, H] x [H, I] in the same process, the same rounds and as many threads (`taskset -c` decides how
many; both sides use XLA's pool). Times are medians of interleaved rounds, results fresh arrays on
both sides.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys

import jax
import jax.numpy as jnp
import numpy as np

import dropless
import harness
import shapes

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


def group_sizes(rows: int, experts: int, skewed: bool) -> np.ndarray:
    """[E] rows of each expert: equal, or falling like (e + 1)^-0.6."""
    share = np.arange(1, experts + 1) ** (-shapes.ZIPF if skewed else 0.0)
    ends = np.rint(rows * np.cumsum(share) / share.sum()).astype(np.int32)
    return np.diff(ends, prepend=0).astype(np.int32)


def calls(precision: str, rows: int, width: int, hidden: int, experts: list[int]) -> dict:
    """name -> call; "dense" and one of ours for each number of experts and routing."""
    dtype = DTYPES[precision]
    keys = jax.random.split(jax.random.key(0), 2)
    lhs = jax.random.normal(keys[0], (rows, width)).astype(dtype)
    rhs = (jax.random.normal(keys[1], (max(experts), width, hidden)) * width**-0.5).astype(dtype)
    dense = jax.jit(lambda a, b: a @ b)
    grouped = jax.jit(dropless.ragged_dot)
    out = {"dense": functools.partial(dense, lhs, rhs[0])}
    for count in experts:
        weights = rhs[:count]
        for skewed in (False, True) if count > 1 else (False,):
            sizes = jnp.asarray(group_sizes(rows, count, skewed))
            name = f"e{count}{'-skewed' if skewed else ''}"
            out[name] = functools.partial(grouped, lhs, weights, sizes)
    return out


def main() -> None:
    """Runs the grid and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precisions", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, nargs="*", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0, help="per precision")
    parser.add_argument("--out", help="result file (JSON)")
    args = parser.parse_args()
    said = [a for a in sys.argv[1:] if a not in ("--out", args.out)]
    command = shlex.join(["python", "bench/bench_cpu_products.py", *said])
    payload = {
        "environment": harness.environment(command),
        "threads": len(os.sched_getaffinity(0)),
        "shape": {"M": args.rows, "H": args.width, "I": args.hidden},
        "products": [],
    }
    flops = 2 * args.rows * args.width * args.hidden
    for precision in args.precisions:
        times = harness.interleave(
            calls(precision, args.rows, args.width, args.hidden, args.experts),
            rounds=args.rounds,
            seconds=args.seconds,
            warmup=1,
        )
        dense = times["dense"]["median_ms"]
        ours = {name: t["median_ms"] for name, t in times.items() if name != "dense"}
        payload["products"].append(
            {
                "precision": precision,
                "times": times,
                "gflops": {name: flops / t["median_ms"] / 1e6 for name, t in times.items()},
                "dense_over_ours": {name: dense / ms for name, ms in ours.items()},
            }
        )
        for name, ratio in payload["products"][-1]["dense_over_ours"].items():
            gflops = payload["products"][-1]["gflops"]
            print(f"{precision} {name:14} {ratio:.3f} of dense's {gflops['dense']:.0f} GFLOP/s")
        if args.out:
            harness.write(args.out, payload)


if __name__ == "__main__":
    main()
