"""Whole layer, forward and backward with every gradient, against its peers in one run.

    python bench/bench_layer.py --device cpu --out bench/results/layer_cpu.json

Columns are medians of interleaved rounds. D is the faster of two dense bf16 (or f32) measurements
of the same FLOPs: six GEMMs alone, and a dense SwiGLU FFN's forward and backward.
"""

import argparse
import itertools
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp

import harness
import peers
import shapes

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.bfloat16}


def zipf_bias(num_experts: int) -> jax.Array:
    """[E] router bias under which expert e is chosen about in proportion to (e + 1)^-0.6."""
    return -shapes.ZIPF * jnp.log(jnp.arange(1, num_experts + 1, dtype=jnp.float32))


def grad_call(layer, x, params, cotangent, *fixed):
    """A call without arguments: y and all gradients of `layer(x, params, *fixed)` in one jit."""

    # Whatever is large is an argument: as a constant it would be compiled into the program.
    def loss(x, params, *fixed):
        y = layer(x, params, *fixed)
        return jnp.sum(y.astype(jnp.float32) * cotangent)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return lambda: step(x, params, *fixed)


def layer_call(cfg, x, params, cotangent):
    """The layer from its parameters, as a call."""
    import dropless

    return grad_call(lambda x, p: dropless.moe(x, p, cfg)[0], x, params, cotangent)


def prepared_call(cfg, x, params, cotangent):
    """The layer whose experts were prepared before, as a call."""
    import dropless

    ready = jax.jit(lambda p: dropless.prepare_experts(p, cfg))(params)
    return grad_call(
        lambda x, p, ready: dropless.moe(x, p, cfg, prepared=ready)[0],
        *(x, params, cotangent, ready),
    )


def other_calls(cfg, x, params, cotangent, also, prepared):
    """name -> call of the layer under the conditions that ``also`` names."""
    import dropless

    calls = {}
    if "zipf" in also:
        router = params["router"] | {"bias": zipf_bias(cfg.num_experts)}
        skewed = replace(cfg, router=dropless.RouterConfig(bias=True))
        calls["dropless_zipf"] = layer_call(skewed, x, params | {"router": router}, cotangent)
    if "float32_params" in also:
        wide = jax.tree.map(lambda w: w.astype(jnp.float32), params["experts"])
        params = params | {"experts": wide}
        calls["dropless_float32_params"] = layer_call(cfg, x, params, cotangent)
        if prepared:
            calls["dropless_float32_params_prepared"] = prepared_call(cfg, x, params, cotangent)
    return calls


def variants(shape, precision, param_dtype, skewed, with_ragged_dot, prepared, beside=(), also=()):
    """name -> call for one shape and precision.

    `beside`: precisions timed beside it; `also`: conditions of the layer timed beside it.
    """
    import dropless

    dtype = DTYPES[precision]
    cfg = dropless.MoEConfig(
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        expert_dim=shape.expert_dim,
        precision=precision,
        router=dropless.RouterConfig(bias=skewed),
    )
    keys = jax.random.split(jax.random.key(0), 5)
    params = dropless.init(keys[0], shape.model_dim, cfg)
    params["experts"] = jax.tree.map(lambda w: w.astype(param_dtype), params["experts"])
    if skewed:
        params["router"]["bias"] = zipf_bias(shape.num_experts)
    x = jax.random.normal(keys[1], (shape.tokens, shape.model_dim)).astype(dtype)
    cotangent = jax.random.normal(keys[2], x.shape)
    width = shape.experts_per_token * shape.expert_dim
    dense = peers.dense_params(keys[3], shape.model_dim, width, dtype)

    calls = {
        "dropless": layer_call(cfg, x, params, cotangent),
        "dense_ffn": grad_call(lambda x, p: peers.dense_ffn(x, p, dtype), x, dense, cotangent),
        "six_gemms": peers.six_gemms(shape.tokens, shape.model_dim, width, dtype, keys[4]),
    }
    for other in beside:
        calls[f"dropless_{other}"] = layer_call(replace(cfg, precision=other), x, params, cotangent)
    if prepared:
        for name, p in {"": precision, **{f"_{other}": other for other in beside}}.items():
            calls[f"dropless{name}_prepared"] = prepared_call(
                replace(cfg, precision=p), x, params, cotangent
            )
    calls |= other_calls(cfg, x, params, cotangent, also, prepared)
    if with_ragged_dot and not skewed:
        calls["ragged_dot"] = grad_call(
            lambda x, p: peers.ragged_dot_layer(x, p, cfg.experts_per_token, dtype),
            x,
            params,
            cotangent,
        )
    return calls


def failure(call) -> str | None:
    """Why a peer cannot run at this size, if so: it may ask for more memory than there is."""
    try:
        jax.block_until_ready(call())
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0][:200]
    return None


def compile_ours(grid, threads: int) -> None:
    """Calls every variant of ours once, `threads` of them at a time, before anything is timed.

    Only ours: XLA chooses the peers' GEMM kernels by timing them, which wants a quiet device.
    """
    ours = [
        call for *_, calls in grid for name, call in calls.items() if name.startswith("dropless")
    ]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda call: jax.block_until_ready(call()), ours))


def row(shape, precision, times, **extra):
    """One result: times, TFLOP/s and the ratios users care about."""
    ours = times["dropless"]["median_ms"]
    dense = min(times["dense_ffn"]["median_ms"], times["six_gemms"]["median_ms"])
    out = {
        "shape": vars(shape),
        "precision": precision,
        **extra,
        "times": times,
        "tflops": shape.flops / ours / 1e9,
        "dense_over_ours": dense / ours,
        "dense_over": {
            name: dense / time["median_ms"]
            for name, time in times.items()
            if name.startswith("dropless_")
        },
        "dense_ffn_over_ours": times["dense_ffn"]["median_ms"] / ours,
    }
    if "ragged_dot" in times:
        out["ragged_dot_over_ours"] = times["ragged_dot"]["median_ms"] / ours
    return out


COLUMNS = "{:24} {:9} {:8} {:>9} {:>8} {:>7} {:>8} {:>10}"


def show(rows) -> None:
    """Prints the table a person reads first."""
    heads = (
        "shape",
        "operands",
        "routing",
        "ours ms",
        "TFLOP/s",
        "D/ours",
        "FFN/ours",
        "ragged/ours",
    )
    print(COLUMNS.format(*heads))
    for r in rows:
        ragged = r.get("ragged_dot_over_ours")
        print(
            COLUMNS.format(
                r["shape"]["name"],
                r["precision"],
                r["routing"],
                f"{r['times']['dropless']['median_ms']:.2f}",
                f"{r['tflops']:.3g}",
                f"{r['dense_over_ours']:.3f}",
                f"{r['dense_ffn_over_ours']:.3f}",
                "-" if ragged is None else f"{ragged:.1f}",
            ),
            flush=True,
        )


def points(args, table):
    """(shape, precision, the row's labels, name -> call) for each point of the grid, in turn."""
    for name, precision, routing in itertools.product(
        args.shapes or table, args.precisions, args.routing
    ):
        dtype = DTYPES[precision] if args.param_dtype == "same" else jnp.dtype(args.param_dtype)
        ragged_dot = name in table if args.ragged_dot is None else name in args.ragged_dot
        calls = variants(
            *(table[name], precision, dtype, routing == "zipf", ragged_dot, args.prepared),
            beside=args.beside,
            also=args.also,
        )
        labels = {"routing": routing, "params": str(jnp.dtype(dtype))}
        yield table[name], precision, labels, calls


def main() -> None:
    """Runs the grid and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), required=True)
    parser.add_argument("--shapes", nargs="*", help="names from shapes.py (all)")
    parser.add_argument("--precisions", nargs="*", default=["f32", "bf16"])
    parser.add_argument("--param-dtype", default="same", choices=("same", "float32", "bfloat16"))
    parser.add_argument("--routing", nargs="*", default=["uniform"], choices=("uniform", "zipf"))
    parser.add_argument(
        "--ragged-dot",
        nargs="*",
        help="shapes to time the ragged_dot layer on; all by default, none if empty",
    )
    parser.add_argument(
        "--beside", nargs="*", default=[], help="precisions of our layer timed in the same rounds"
    )
    parser.add_argument(
        "--also",
        nargs="*",
        default=[],
        choices=("zipf", "float32_params"),
        help="the layer with skewed routing, with float32 parameters, in the same rounds",
    )
    parser.add_argument("--prepared", action="store_true", help="also time experts prepared once")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0, help="per shape and precision")
    parser.add_argument(
        "--compile-threads",
        type=int,
        default=0,
        help="build all shapes first and compile our variants this many at a time: less waiting "
        "where every shape's arrays fit in memory together",
    )
    parser.add_argument("--out", help="result file (JSON)")
    args = parser.parse_args()

    table = shapes.CPU if args.device == "cpu" else shapes.GPU
    said = [a for a in sys.argv[1:] if a not in ("--out", args.out)]
    environment = harness.environment(shlex.join(["python", "bench/bench_layer.py", *said]))
    rows = []
    grid = points(args, table)
    if args.compile_threads:
        grid = list(grid)
        compile_ours(grid, args.compile_threads)
    for shape, precision, extra, calls in grid:
        if "ragged_dot" in calls and (error := failure(calls["ragged_dot"])):
            extra["ragged_dot_error"] = error
            del calls["ragged_dot"]
        times = harness.interleave(calls, rounds=args.rounds, seconds=args.seconds, warmup=1)
        calls.clear()  # its arrays, before the next shape's
        rows.append(row(shape, precision, times, **extra))
        show(rows[-1:])
        if args.out:  # after every row: what was measured is kept if a later shape fails
            harness.write(args.out, {"environment": environment, "layer": rows})
    show(rows)


if __name__ == "__main__":
    main()
