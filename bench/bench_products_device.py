"""Products and moves of rows on a GPU, each alone through its public function, by device time.

    python bench/bench_products_device.py --out bench/results/gpu_products_h200.json

products: ragged_dot and grouped_wgrad on the shapes of docs/gpu_gemm.md, groups of random size,
          TFLOP/s of what a user's call launches.
rows:     permute, unpermute and its gradient, bytes a second over those of a copy.
dense:    one product of 8192 x 8192 x 8192 and a copy of 4 GiB: the ceilings of this run.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dropless
import harness
import shapes
from device_trace import device_time

REPEATS = 15


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key, shape, dtype=jnp.bfloat16):
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def group_sizes(rows: int, groups: int) -> jax.Array:
    return jnp.asarray(np.diff(shapes.ragged_ends(rows, groups), prepend=0), jnp.int32)


def call(function, *arguments):
    """A call without arguments. What is large is an argument of the program, no constant in it."""
    return functools.partial(jax.jit(function), *arguments)


def our_kernels(trace: dict) -> float:
    """Microseconds a call of the kernels that are Dropless's own."""
    return sum(us for name, us in trace["us"].items() if "dropless" in name)


def products(name: str) -> list[dict]:
    rows, groups, columns, contraction = shapes.PRODUCTS[name]
    keys = jax.random.split(jax.random.key(0), 3)
    x = normal(keys[0], (rows, contraction))
    dy = normal(keys[1], (rows, columns))
    w = normal(keys[2], (groups, contraction, columns))
    sizes = group_sizes(rows, groups)
    wgrad = dropless.grouped_wgrad
    wgrad_f32 = functools.partial(wgrad, preferred_element_type=jnp.float32)

    def to_rows(x, w, dy, sizes):
        return jax.vjp(lambda x: dropless.ragged_dot(x, w, sizes), x)[1](dy)[0]

    calls = {
        "forward": call(dropless.ragged_dot, x, w, sizes),
        "gradient_to_rows": call(to_rows, x, w, dy, sizes),
        "gradient_to_weights_bf16": call(wgrad, x, dy, sizes),
        "gradient_to_weights_f32": call(wgrad_f32, x, dy, sizes),
    }
    results = []
    for op, run in calls.items():
        us = our_kernels(device_time(run, repeats=REPEATS))
        tflops = 2 * rows * columns * contraction / us * 1e-6
        results.append({"op": op, "shape": name, "us": us, "tflops": tflops})
    return results


def moves(shape, copy_rate: float) -> list[dict]:
    t, h, k = shape.tokens, shape.model_dim, shape.experts_per_token
    keys = jax.random.split(jax.random.key(1), 5)
    x, dy = (normal(key, (t, h)) for key in keys[:2])
    rows = normal(keys[2], (t * k, h))
    logits = normal(keys[3], (t, shape.num_experts), jnp.float32)
    cfg = dropless.MoEConfig(shape.num_experts, k, 64)
    routing = jax.jit(lambda logits: dropless.route(logits, cfg))(logits)
    weights = routing.weights

    def to_rows_and_weights(rows, routing, weights, dy):
        unpermute = lambda rows, weights: dropless.unpermute(rows, routing, weights)  # noqa: E731
        return jax.vjp(unpermute, rows, weights)[1](dy)

    calls = {
        "permute": call(dropless.permute, x, routing),
        "unpermute": call(dropless.unpermute, rows, routing, weights),
        "unpermute_gradient": call(to_rows_and_weights, rows, routing, weights, dy),
    }
    # Every operand is read once and every result written once; maps and weights are left out.
    moved = {
        "permute": x.nbytes + rows.nbytes,
        "unpermute": rows.nbytes + x.nbytes,
        "unpermute_gradient": dy.nbytes + 2 * rows.nbytes,
    }
    results = []
    for op, run in calls.items():
        us = our_kernels(device_time(run, repeats=REPEATS))
        rate = moved[op] / us * 1e6
        results.append(
            {
                "op": op,
                "shape": shape.name,
                "us": us,
                "bytes_per_second": rate,
                "of_copy": rate / copy_rate,
            }
        )
    return results


def ceilings() -> dict:
    a, b = (normal(key, (8192, 8192)) for key in jax.random.split(jax.random.key(2)))
    dense_us = device_time(call(jnp.matmul, a, b), repeats=REPEATS)["busy_us"]
    source = normal(jax.random.key(3), (2**15, 2**16))
    copied = device_time(call(jnp.copy, source), repeats=REPEATS)
    return {
        "dense_tflops": 2 * 8192**3 / dense_us * 1e-6,
        "copy_bytes_per_second": 2 * source.nbytes / copied["busy_us"] * 1e6,
        "copy_is": sorted(copied["names"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--peers", help="what tools/gpu/peers_grouped.py printed in the same run")
    parser.add_argument("--products", nargs="*", default=list(shapes.PRODUCTS))
    args = parser.parse_args()
    payload = {
        "environment": harness.environment("python bench/bench_products_device.py"),
        "dense": ceilings(),
        "products": [],
        "rows": [],
    }
    print(payload["dense"], flush=True)
    for name in args.products:
        payload["products"] += products(name)
        print(*payload["products"][-4:], sep="\n", flush=True)
        harness.write(args.out, payload)
    for shape in shapes.GPU.values():
        payload["rows"] += moves(shape, payload["dense"]["copy_bytes_per_second"])
        print(*payload["rows"][-3:], sep="\n", flush=True)
    if args.peers:
        lines = Path(args.peers).read_text().splitlines()
        payload["torch"] = [json.loads(line) for line in lines if line.startswith("{")]
    harness.write(args.out, payload)


if __name__ == "__main__":
    main()
