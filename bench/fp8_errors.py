"""FP8's error: every product alone, and y and every gradient of the layer, against float32.

    python bench/fp8_errors.py --out bench/results/gpu_fp8_errors_h200.json

Unit-scale random data. Errors are relative Frobenius norms, |got - want| / |want|. Products are
given the float32 data, the layer runs beside precision="f32" with the same parameters and routing.
"""

import argparse
import functools
import itertools
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import dropless
import harness
from dropless import _experts_fp8 as fp8
from dropless._call import call
from dropless._params import prepare_weight

OPTIONS = {
    "bf16": {"precision": "bf16"},
    "fp8": {},
    "fp8, pow2": {"scale_rounding": "pow2"},
    "fp8, save_h": {"save_h": "fp8"},
    "fp8, wgrad": {"wgrad_precision": "fp8"},
    "fp8, wgrad, save_h": {"wgrad_precision": "fp8", "save_h": "fp8"},
    "fp8, wgrad, save_h, pow2": {
        "wgrad_precision": "fp8",
        "save_h": "fp8",
        "scale_rounding": "pow2",
    },
}


@jax.jit
def _relative(got, want):
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(jnp.square(got - want)) / jnp.sum(jnp.square(want)))


def relative(got, want):
    return float(_relative(got, want))


@functools.partial(jax.jit, static_argnums=0)
def product(pow2, rows, w, offsets):
    """rows [M, C] of each expert times w [E, C, N], by FP8."""
    weight = prepare_weight(w, "fp8", "pow2" if pow2 else "fp32")
    return call(
        "grouped_gemm",
        [((rows.shape[0], w.shape[2]), jnp.float32)],
        [*fp8.quantize_rows(rows, pow2), weight.q_t, weight.scale_t, None, offsets],
        rhs_transposed=1,
    )[0]


@functools.partial(jax.jit, static_argnums=0)
def two_products(pow2, rows, gate, up, offsets):
    """rows [M, 2, C] times gate and up [E, N, C], added: the gradient of x."""
    gate, up = (prepare_weight(w, "fp8", "pow2" if pow2 else "fp32") for w in (gate, up))
    return call(
        "expert_up_backward",
        [((rows.shape[0], gate.q.shape[1]), jnp.bfloat16)],
        [*fp8.quantize_rows(rows, pow2), gate.q, up.q, gate.scale, up.scale, offsets],
    )[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def weight_gradient(of_fp8, pow2, x, dy, offsets):
    """x [M, C] and dy [M, N] to [E, C, N]; operands in FP8 or in bfloat16."""
    (m, c), n, e = x.shape, dy.shape[1], offsets.shape[0] - 1
    return call(
        "grouped_wgrad",
        [((e, c, n), jnp.float32), None],
        [
            *(x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)[:, None, :]),
            *(jnp.arange(m, dtype=jnp.int32), offsets, None, None),
        ],
        workspace=(m, c, 1, n, e, 0, int(of_fp8), 2),
        gather=0,
        experts_per_token=1,
        fp8=of_fp8,
        scale_rounding=pow2,
    )[0]


def products(sizes, depth, width):
    """Errors of each kind of product; depth: of the contraction, rows for weight gradients."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(sizes)]), jnp.int32)
    m, e = int(offsets[-1]), len(sizes)
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32)  # noqa: E731
    rows, w, other = normal(m, depth), normal(e, depth, width), normal(e, depth, width)
    pair, dy = normal(m, 2, depth), normal(m, width)
    dot = functools.partial(jnp.matmul, precision="highest")
    groups = [slice(int(a), int(b)) for a, b in itertools.pairwise(offsets)]
    plain = jnp.concatenate([dot(rows[g], w[i]) for i, g in enumerate(groups)])
    added = [dot(pair[g, 0], w[i]) + dot(pair[g, 1], other[i]) for i, g in enumerate(groups)]
    outer = jnp.stack([dot(rows[g].T, dy[g]) for g in groups])
    added, turned = jnp.concatenate(added), (w.swapaxes(1, 2), other.swapaxes(1, 2))
    found = []
    for rounding, pow2 in (("fp32", False), ("pow2", True)):
        errors = {
            "grouped_gemm": relative(product(pow2, rows, w, offsets), plain),
            "expert_up_backward": relative(two_products(pow2, pair, *turned, offsets), added),
            "grouped_wgrad": relative(weight_gradient(True, pow2, rows, dy, offsets), outer),
        }
        if not pow2:
            got = weight_gradient(False, False, rows, dy, offsets)
            errors["grouped_wgrad of bfloat16"] = relative(got, outer)
        found.append({"scale_rounding": rounding, "relative_error": errors})
    return {"rows": list(map(int, sizes)), "depth": depth, "width": width, "found": found}


def layer(tokens, model_dim, expert_dim, experts, chosen):
    """Errors of y and of every gradient with each option."""

    def config(options):
        return dropless.MoEConfig(experts, chosen, expert_dim, **{"precision": "fp8", **options})

    keys = jax.random.split(jax.random.key(1), 3)
    params = dropless.init(keys[0], model_dim, config({}))
    # What bfloat16 holds, so that every precision routes alike.
    x = jax.random.normal(keys[1], (tokens, model_dim)).astype(jnp.bfloat16)
    dy = jax.random.normal(keys[2], x.shape).astype(jnp.bfloat16).astype(jnp.float32)

    def run(options, x):
        def loss(x, params):
            y = dropless.moe(x, params, config(options))[0]
            return jnp.sum(y.astype(jnp.float32) * dy), y

        (_, y), (dx, grads) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
            x, params
        )
        named = jax.tree_util.tree_leaves_with_path(grads)
        return {"y": y, "x": dx, **{jax.tree_util.keystr(p): g for p, g in named}}

    want = run({"precision": "f32"}, x.astype(jnp.float32))

    def errors(options):
        got = run(options, x)
        return {key: relative(got[key], want[key]) for key in want}

    with ThreadPoolExecutor(len(OPTIONS)) as workers:  # most of the time goes to compiling
        measured = list(workers.map(errors, OPTIONS.values()))
    named = zip(OPTIONS, measured, strict=True)
    found = [{"options": name, "relative_error": each} for name, each in named]
    sizes = {"tokens": tokens, "model_dim": model_dim, "expert_dim": expert_dim}
    return {**sizes, "experts": experts, "chosen": chosen, "found": found}


def main() -> None:
    """Measures all errors and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    said = [a for a in sys.argv[1:] if a not in ("--out", args.out)]
    environment = harness.environment(shlex.join(["python", "bench/fp8_errors.py", *said]))
    if args.small:
        grid = [((300, 0, 161), 528, 208)], [(512, 528, 272, 6, 2)]
    else:
        grid = [((900, 1100, 1500, 596), 4096, 1536)], [(4096, 2048, 1024, 16, 4)]
    payload = {"environment": environment}
    for part, measure, cases in (("layers", layer, grid[1]), ("products", products, grid[0])):
        payload[part] = [measure(*case) for case in cases]
        for case in payload[part]:
            for found in case["found"]:
                print(found, flush=True)
        harness.write(args.out, payload)


if __name__ == "__main__":
    main()
