"""Bytes kept between forward and backward: ours and plain autodiff over `jax.lax.ragged_dot`.

    python bench/saved_activations.py --out bench/results/saved_activations.json

Only traced, so any machine will do: residuals of jax.vjp that are no parameters, each counted once.
"""

import argparse
import sys

import jax
import jax.numpy as jnp

import dropless
import harness
import peers
import shapes


def saved_bytes(layer, x, params) -> int:
    """Of the residuals of ``layer(x, params)``, x included where it is kept, params not."""
    closed = jax.make_jaxpr(lambda x, p: jax.vjp(layer, x, p)[1])(x, params)
    inputs = closed.jaxpr.invars[1:]  # the parameters, after x
    kept = {id(v): v for v in closed.jaxpr.outvars if not any(v is p for p in inputs)}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept.values())


def measure(shape, options) -> dict:
    """One shape; ``options`` of the config, in which the parameters are bfloat16."""
    cfg = dropless.MoEConfig(
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        expert_dim=shape.expert_dim,
        **options,
    )
    params = jax.eval_shape(
        lambda key: dropless.init(key, shape.model_dim, cfg, param_dtype=jnp.bfloat16),
        jax.random.key(0),
    )
    # Prepared before, as bfloat16 parameters are for bf16: they would be kept beside x and h.
    ready = jax.eval_shape(lambda p: dropless.prepare_experts(p, cfg), params)
    x = jax.ShapeDtypeStruct((shape.tokens, shape.model_dim), jnp.bfloat16)
    weights = (params, ready)
    ours = saved_bytes(lambda x, w: dropless.moe(x, w[0], cfg, prepared=w[1])[0], x, weights)
    k = shape.experts_per_token
    autodiff = saved_bytes(lambda x, p: peers.ragged_dot_layer(x, p, k, jnp.bfloat16), x, params)
    return {
        "shape": shape.name,
        "options": options,
        "dropless": ours,
        "ragged_dot": autodiff,
        "ratio": ours / autodiff,
    }


OPTIONS = (
    {"precision": "bf16"},
    {"precision": "bf16", "save_h": "fp8"},
    {"precision": "fp8"},
    {"precision": "fp8", "save_h": "fp8"},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    environment = harness.environment("python bench/saved_activations.py")
    rows = [measure(shape, options) for options in OPTIONS for shape in shapes.GPU.values()]
    for row in rows:
        print(row)
    harness.write(args.out, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
