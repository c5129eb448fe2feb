"""The same small MoE language model trained on a GPU in bf16 and in FP8, from the same start.

    python bench/train_fp8.py --out bench/results/train_fp8_h200.json

Tokens follow a random second-order Markov chain, so that there is something to learn and no data to
fetch. Held-out loss is measured on sequences that training does not see.
"""

import argparse
import shlex
import sys

import jax
import jax.numpy as jnp
import optax

import dropless
import harness

VOCABULARY, WIDTH, LAYERS, BATCH, LENGTH = 64, 512, 4, 64, 128
VARIANTS = {
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8"},
    "fp8_wgrad_save_h": {"precision": "fp8", "wgrad_precision": "fp8", "save_h": "fp8"},
}


def config(options):
    return dropless.MoEConfig(16, 4, 256, **options)


def init(seed):
    keys = jax.random.split(jax.random.key(seed), LAYERS + 3)
    layers = [dropless.init(key, WIDTH, config(VARIANTS["bf16"])) for key in keys[3:]]
    mix = jax.random.split(keys[2], LAYERS)
    return {
        "embed": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        "head": jax.random.normal(keys[1], (WIDTH, VOCABULARY)) * WIDTH**-0.5,
        "previous": [jax.random.normal(k, (WIDTH, WIDTH)) * 0.5 * WIDTH**-0.5 for k in mix],
        "moe": layers,
    }


def sample(key, table, count):
    """[count, LENGTH + 1] tokens of the chain."""
    start, draw = jax.random.split(key)
    first = jax.random.randint(start, (2, count), 0, VOCABULARY)

    def step(state, key):
        a, b = state
        c = jax.random.categorical(key, table[a, b])
        return (b, c), c

    _, tokens = jax.lax.scan(step, (first[0], first[1]), jax.random.split(draw, LENGTH + 1))
    return tokens.T


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def loss_of(params, tokens, cfg):
    x = params["embed"][tokens[:, :-1]]
    balance, load = 0.0, []
    for mix, layer in zip(params["previous"], params["moe"], strict=True):
        # Each position sees the one before it.
        before = jnp.pad(norm(x), ((0, 0), (1, 0), (0, 0)))[:, :-1]
        x = x + before @ mix
        y, aux = dropless.moe(norm(x).astype(jnp.bfloat16), layer, cfg)
        x = x + y.astype(jnp.float32)
        balance += aux.load_balance_loss
        load.append(jnp.max(aux.expert_counts) / jnp.mean(aux.expert_counts.astype(jnp.float32)))
    logits = norm(x) @ params["head"]
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return entropy + 0.01 * balance / LAYERS, (entropy, jnp.stack(load).mean())


def train(options, seed, steps):
    cfg = config(options)
    data = jax.random.key(1000 + seed)
    table = 2.0 * jax.random.normal(jax.random.key(7), (VOCABULARY, VOCABULARY, VOCABULARY))
    held_out = sample(jax.random.fold_in(data, 1 << 20), table, 256)
    optimiser = optax.adam(optax.cosine_decay_schedule(2e-3, steps))
    params = init(seed)
    state = optimiser.init(params)

    @jax.jit
    def run(params, state, keys):
        def step(carry, key):
            params, state = carry
            tokens = sample(key, table, BATCH)
            grads, (entropy, load) = jax.grad(loss_of, has_aux=True)(params, tokens, cfg)
            updates, state = optimiser.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), (entropy, load)

        return jax.lax.scan(step, (params, state), keys)

    evaluate = jax.jit(lambda params: loss_of(params, held_out, cfg)[1][0])
    (params, state), (curve, load) = run(params, state, jax.random.split(data, steps))
    return {
        "curve": [float(v) for v in curve[::10]],
        "held_out": float(evaluate(params)),
        "load_max_over_mean": float(load[-20:].mean()),
    }


def main() -> None:
    """Trains every variant from every seed and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", help="result file (JSON)")
    args = parser.parse_args()
    said = [a for a in sys.argv[1:] if a not in ("--out", args.out)]
    environment = harness.environment(shlex.join(["python", "bench/train_fp8.py", *said]))
    runs = []
    for seed in range(args.seeds):
        for name, options in VARIANTS.items():
            runs.append({"variant": name, "seed": seed, **train(options, seed, args.steps)})
            gap = runs[-1]["held_out"] / runs[-1 - list(VARIANTS).index(name)]["held_out"] - 1
            last = runs[-1]
            print(
                f"seed {seed} {name:18} held-out {last['held_out']:.4f} ({gap:+.2%} of bf16) "
                f"load {last['load_max_over_mean']:.2f}",
                flush=True,
            )
            if args.out:
                harness.write(args.out, {"environment": environment, "train": runs})


if __name__ == "__main__":
    main()
