"""One jitted step that calls every target with a CUDA kernel, run again and again.

    python tests/gpu/every_target.py

Prints a JSON object: the targets in the program, a digest of each result over all steps, and how
often XLA executed a command buffer in the traced steps. test_gpu_command_buffers.py runs it with
command buffers forced on and off: XLA reads its flags once a process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dropless

STEPS = 24
# Every fourth step's results stay alive: the next step's arrays get other addresses, and a captured
# graph must be updated instead of replayed as it is.
KEPT = 4
T, H, K = 259, 264, 3

BF16 = dropless.MoEConfig(
    num_experts=12,
    experts_per_token=K,
    expert_dim=136,
    expert_bias=True,
    precision="bf16",
    router=dropless.RouterConfig(bias=True),
)
LAYERS = {
    "bf16": BF16,
    "f32": dataclasses.replace(BF16, precision="f32"),
    "fp8": dataclasses.replace(BF16, precision="fp8", expert_bias=False),
}


def pieces(x, logits, experts, dy):
    """Gradients through plan, permute, ragged_dot, unpermute: what the layer fuses."""

    def loss(x, logits, experts):
        routing = dropless.route(logits, BF16)
        plan = dropless.plan(routing.ids, BF16.num_experts)
        out = dropless.ragged_dot(dropless.permute(x, plan), experts, plan.counts)
        y = dropless.unpermute(out, plan, routing.weights)
        return jnp.sum(y.astype(jnp.float32) * dy[:, : y.shape[1]])

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, logits, experts)


@jax.jit
def step(x, params, dy):
    """Next x, and every result."""
    results = {}
    for name, cfg in LAYERS.items():

        def loss(x, params, cfg=cfg):
            y, aux = dropless.moe(x, params, cfg)
            return jnp.sum(y.astype(jnp.float32) * dy) + 0.01 * aux.load_balance_loss, (y, aux)

        given = params if cfg.expert_bias else without_biases(params)
        results[name] = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, given)
    y = results["bf16"][0][1][0]
    logits = x.astype(jnp.float32)[:, : BF16.num_experts]
    results["pieces"] = pieces(x, logits, params["experts"]["gate"].astype(x.dtype), dy)
    # Unit scale, another token in every row, another routing at every step.
    x = jnp.roll(x, 1, axis=0) + 0.5 * y / (1e-6 + jnp.std(y.astype(jnp.float32))).astype(y.dtype)
    x = x / jnp.std(x.astype(jnp.float32)).astype(x.dtype)
    return x, results


def without_biases(params):
    experts = {name: leaf for name, leaf in params["experts"].items() if "bias" not in name}
    return {**params, "experts": experts}


def digest(results, states):
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        name = jax.tree_util.keystr(path)
        states.setdefault(name, hashlib.sha256()).update(np.asarray(leaf).tobytes())


def executions(folder) -> int:
    """How often a command buffer ran, from the host's part of a trace."""
    (file,) = Path(folder).rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    names = [e.name for plane in planes for line in plane.lines for e in line.events]
    return sum(name.startswith("command_buffer::execute") for name in names)


def main() -> None:
    params = dropless.init(jax.random.key(0), H, BF16)
    x, dy = (jax.random.normal(jax.random.key(i), (T, H)) for i in (1, 2))
    x = x.astype(jnp.bfloat16)
    text = step.lower(x, params, dy).as_text()
    states, counts, kept = {}, set(), []
    for i in range(STEPS):
        x, results = step(x, params, dy)
        digest(results, states)
        counts.add(np.asarray(results["bf16"][0][1][1].expert_counts).tobytes())
        if i % KEPT == 0:
            kept.append(results)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(3):
                jax.block_until_ready(step(x, params, dy))
        executed = executions(folder)
    print(
        json.dumps(
            {
                "digests": {name: state.hexdigest() for name, state in states.items()},
                "routings": len(counts),
                "targets": sorted(set(re.findall(r"@dropless_(\w+)_c\d+", text))),
                "finite": all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(kept)),
                "executions": executed,
            }
        )
    )


if __name__ == "__main__":
    main()
