"""What the compiled layer needs: forward and backward with every gradient, in bf16 and in FP8.

    python bench/layer_memory.py --out bench/results/gpu_layer_memory_h200.json

Only compiled, never run: XLA's own account of a program's memory. Experts are prepared before, and
counted among the arguments; "every call" programs prepare them themselves.
"""

import argparse
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

import dropless
import harness
import shapes

VARIANTS = {
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8"},
    "fp8_save_h": {"precision": "fp8", "save_h": "fp8"},
    "fp8_wgrad_save_h": {"precision": "fp8", "wgrad_precision": "fp8", "save_h": "fp8"},
}


def measure(shape, dtype, name, every_call):
    cfg = dropless.MoEConfig(
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        expert_dim=shape.expert_dim,
        **VARIANTS[name],
    )
    params = jax.eval_shape(
        lambda key: dropless.init(key, shape.model_dim, cfg, param_dtype=dtype), jax.random.key(0)
    )
    ready = (
        None if every_call else jax.eval_shape(lambda p: dropless.prepare_experts(p, cfg), params)
    )
    x = jax.ShapeDtypeStruct((shape.tokens, shape.model_dim), jnp.bfloat16)

    def step(x, params, ready, dy):
        y, vjp = jax.vjp(lambda x, p: dropless.moe(x, p, cfg, prepared=ready)[0], x, params)
        return y, *vjp(dy)

    # jit leaves out arguments that nothing reads, such as parameters beside prepared ones.
    memory = jax.jit(step, keep_unused=True).lower(x, params, ready, x).compile().memory_analysis()
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }
    return {
        "shape": shape.name,
        "params": jnp.dtype(dtype).name,
        "variant": name,
        "prepares": "every call" if every_call else "before",
        **parts,
        "all": sum(parts.values()),
        "peak": getattr(memory, "peak_memory_in_bytes", None),
    }


def main() -> None:
    """Compiles every program and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--threads", type=int, default=4, help="programs compiled at once")
    args = parser.parse_args()
    environment = harness.environment("python bench/layer_memory.py")
    cases = [
        (shape, dtype, name, every_call)
        for shape, dtype, name, every_call in itertools.product(
            shapes.GPU.values(), (jnp.bfloat16, jnp.float32), VARIANTS, (False, True)
        )
        if not every_call or name in ("bf16", "fp8")
    ]
    with ThreadPoolExecutor(args.threads) as pool:
        rows = list(pool.map(lambda case: measure(*case), cases))
    for row in rows:
        print({k: round(v / 1e6) if isinstance(v, int) else v for k, v in row.items()})
    harness.write(args.out, {"environment": environment, "memory": rows})


if __name__ == "__main__":
    main()
