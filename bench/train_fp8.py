"""The same small MoE language model trained on a GPU in bf16 and in FP8, from the same start.

    python bench/train_fp8.py --seed 0 --out train_0.json
    python bench/train_fp8.py --merge train_0.json train_1.json train_2.json \
        --out bench/results/gpu_fp8_train_h200.json --picture docs/fp8_training.png

Tokens follow a random second-order Markov chain, so that there is something to learn and no data to
fetch. Loss, chosen experts and load are measured on sequences that training does not see. Two
trainings drift apart whatever their precision; ``bf16_moved``, bfloat16 from a start moved by half
a bfloat16 step, tells how far by chance alone.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dropless
import harness

VOCABULARY, WIDTH, LAYERS, BATCH, LENGTH, HELD_OUT = 64, 512, 4, 64, 128, 512
EXPERTS, CHOSEN = 16, 4
VARIANTS = {
    "bf16": {"precision": "bf16"},
    "bf16_moved": {"precision": "bf16"},
    "fp8": {"precision": "fp8"},
    "fp8_wgrad_save_h": {"precision": "fp8", "wgrad_precision": "fp8", "save_h": "fp8"},
}
COLOURS = {"bf16": "C0", "bf16_moved": "C7", "fp8": "C1", "fp8_wgrad_save_h": "C2"}


def config(options):
    return dropless.MoEConfig(EXPERTS, CHOSEN, 256, **options)


def init(seed, moved):
    keys = jax.random.split(jax.random.key(seed), LAYERS + 3)
    layers = [dropless.init(key, WIDTH, config(VARIANTS["bf16"])) for key in keys[3:]]
    mix = jax.random.split(keys[2], LAYERS)
    params = {
        "embed": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        "head": jax.random.normal(keys[1], (WIDTH, VOCABULARY)) * WIDTH**-0.5,
        "previous": [jax.random.normal(k, (WIDTH, WIDTH)) * 0.5 * WIDTH**-0.5 for k in mix],
        "moe": layers,
    }
    if not moved:
        return params
    leaves, tree = jax.tree.flatten(params)
    signs = [
        jax.random.rademacher(k, leaf.shape, jnp.float32)
        for k, leaf in zip(jax.random.split(keys[0], len(leaves)), leaves, strict=True)
    ]
    moved = [leaf * (1 + 2.0**-9 * s) for leaf, s in zip(leaves, signs, strict=True)]
    return jax.tree.unflatten(tree, moved)


def sample(key, table, count):
    """[count, LENGTH + 1] tokens of the chain."""
    start, draw = jax.random.split(key)
    first = jax.random.randint(start, (2, count), 0, VOCABULARY)

    def step(state, key):
        a, b = state
        c = jax.random.categorical(key, table[a, b])
        return (b, c), c.astype(jnp.int32)

    _, tokens = jax.lax.scan(step, (first[0], first[1]), jax.random.split(draw, LENGTH + 1))
    return tokens.T


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def forward(params, tokens, cfg, with_ids=False):
    """Cross-entropy, balance loss, [LAYERS, E] counts and, if asked, ids [LAYERS, T, K]."""
    x = params["embed"][tokens[:, :-1]]
    balance, counts, ids = 0.0, [], []
    for mix, layer in zip(params["previous"], params["moe"], strict=True):
        # Each position sees the one before it.
        before = jnp.pad(norm(x), ((0, 0), (1, 0), (0, 0)))[:, :-1]
        x = x + before @ mix
        rows = norm(x).astype(jnp.bfloat16)
        y, aux = dropless.moe(rows, layer, cfg)
        if with_ids:
            logits = jnp.matmul(
                rows.reshape(-1, WIDTH).astype(jnp.float32),
                layer["router"]["kernel"],
                precision="highest",
            )
            ids.append(dropless.route(logits, cfg).ids.astype(jnp.uint8))
        x = x + y.astype(jnp.float32)
        balance += aux.load_balance_loss / LAYERS
        counts.append(aux.expert_counts)
    logits = norm(x) @ params["head"]
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return entropy, balance, jnp.stack(counts), (jnp.stack(ids) if with_ids else None)


def load_of(counts):
    """What [LAYERS, E] counts say of balance, averaged over layers."""
    share = np.asarray(counts, np.float64)
    share = share / share.mean(1, keepdims=True)
    return {
        "max_over_mean": round(float(share.max(1).mean()), 4),
        "min_over_mean": round(float(share.min(1).mean()), 4),
        "deviation_over_mean": round(float(share.std(1).mean()), 4),
    }


def agreement(a, b):
    """Share of chosen experts, ids [LAYERS, T, K], that both chose: one figure a layer."""
    same = (a[..., :, None] == b[..., None, :]).any(-1)
    return [round(float(v), 4) for v in same.mean((1, 2))]


def train(name, seed, steps, every, data, held_out):
    """Trains one variant; its report, its held-out ids after every part, and its parameters."""
    cfg = config(VARIANTS[name])
    optimiser = optax.adam(optax.cosine_decay_schedule(2e-3, steps))
    params = init(seed, moved=name == "bf16_moved")
    state = optimiser.init(params)

    def loss(params, tokens):
        entropy, balance, counts, _ = forward(params, tokens, cfg)
        return entropy + 0.01 * balance, (entropy, counts)

    def step(carry, tokens):
        params, state = carry
        grads, (entropy, counts) = jax.grad(loss, has_aux=True)(params, tokens)
        updates, state = optimiser.update(grads, state, params)
        load = jnp.mean(jnp.max(counts, 1) / jnp.mean(counts.astype(jnp.float32), 1))
        return (optax.apply_updates(params, updates), state), (entropy, load)

    run = jax.jit(lambda carry, tokens: jax.lax.scan(step, carry, tokens), donate_argnums=0)
    run = run.lower((params, state), data[:every]).compile()
    evaluate = jax.jit(lambda params: forward(params, held_out, cfg, with_ids=True))
    curve, load, held, ids = [], [], [], []
    carry = (params, state)
    for begin in range(0, steps, every):
        carry, (entropy, most) = run(carry, data[begin : begin + every])
        tested = evaluate(carry[0])
        curve += np.asarray(entropy).reshape(-1, 10).mean(1).round(4).tolist()
        load += np.asarray(most).reshape(-1, 10).mean(1).round(4).tolist()
        held.append(float(tested[0]))
        ids.append(np.asarray(tested[3]))
    memory = run.memory_analysis()
    report = {
        "variant": name,
        "seed": seed,
        "held_out": held[-1],
        "held_out_curve": [round(v, 4) for v in held],
        "loss_curve": curve,  # means of 10 steps
        "load_curve": load,  # the most loaded expert's rows over the mean, means of 10 steps
        "load": load_of(tested[2]),
        "step_memory": {
            "arguments": memory.argument_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "peak": getattr(memory, "peak_memory_in_bytes", None),
        },
    }
    return report, ids, carry[0]


def train_all(seed, steps, every):
    """Every variant from one seed, each with its agreement with bf16."""
    key = jax.random.key(1000 + seed)
    table = 2.0 * jax.random.normal(jax.random.key(7), (VOCABULARY, VOCABULARY, VOCABULARY))
    make = jax.jit(sample, static_argnums=2)
    data = make(key, table, steps * BATCH).reshape(steps, BATCH, LENGTH + 1)
    held_out = make(jax.random.fold_in(key, 1 << 20), table, HELD_OUT)
    runs, first = [], None
    for name in VARIANTS:
        report, ids, params = train(name, seed, steps, every, data, held_out)
        if first is None:
            first = report, ids
            # The same trained model run in FP8.
            read = jax.jit(lambda p: forward(p, held_out, config(VARIANTS["fp8"]), with_ids=True))
            tested = read(params)
            report["same_parameters_in_fp8"] = {
                "held_out": float(tested[0]),
                "agreement_by_layer": agreement(ids[-1], np.asarray(tested[3])),
                "load": load_of(tested[2]),
            }
        else:
            report["held_out_over_bf16"] = report["held_out"] / first[0]["held_out"] - 1
            pairs = zip(ids, first[1], strict=True)
            report["agreement_by_layer_curve"] = [agreement(a, b) for a, b in pairs]
        runs.append(report)
        gap = report.get("held_out_over_bf16", 0.0)
        same = report.get("agreement_by_layer_curve", [[1.0]])[-1]
        print(
            f"seed {seed} {name:16} held-out {report['held_out']:.4f} ({gap:+.3%} of bf16), "
            f"experts shared with bf16 {same}, load {report['load']}, {report['step_memory']}",
            flush=True,
        )
    return runs


def picture(runs, steps, path):
    """Loss, its gap to bf16, load and agreement over the steps, every seed a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 6), dpi=80, layout="constrained")
    bf16 = {run["seed"]: run for run in runs if run["variant"] == "bf16"}
    for run in runs:
        name, base = run["variant"], bf16[run["seed"]]
        style = {"color": COLOURS[name], "lw": 1, "label": name if run["seed"] == 0 else None}
        each = steps / len(run["loss_curve"])
        x = (np.arange(len(run["loss_curve"])) + 0.5) * each
        part = steps / len(run["held_out_curve"])
        at = (np.arange(len(run["held_out_curve"])) + 1) * part
        axes[0, 0].plot(x, run["loss_curve"], **style)
        axes[1, 0].plot(x, run["load_curve"], **style)
        if name != "bf16":
            gap = np.divide(run["held_out_curve"], base["held_out_curve"]) - 1
            axes[0, 1].plot(at, 100 * gap, **style)
            axes[1, 1].plot(at, np.mean(run["agreement_by_layer_curve"], 1), **style)
    titles = (
        *("training loss, nats a token", "held-out loss against bf16, %"),
        *("rows of the busiest expert over the mean", "chosen experts shared with bf16"),
    )
    for axis, title in zip(axes.flat, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
    axes[0, 1].set_ylim(-0.6, 0.6)
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Trains every variant from one seed, or merges such files and draws them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--every", type=int, default=100, help="steps between held-out figures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--merge", nargs="*", help="files of single seeds")
    parser.add_argument("--picture", help="PNG, with --merge")
    parser.add_argument("--out", required=True, help="result file (JSON)")
    args = parser.parse_args()
    if args.merge:
        parts = [json.loads(Path(path).read_text()) for path in args.merge]
        payload = {**parts[0], "train": [run for part in parts for run in part["train"]]}
        commands = [part["environment"]["command"] for part in parts]
        payload["environment"] = {**payload["environment"], "command": "; ".join(commands)}
        Path(args.out).write_text(json.dumps(payload) + "\n")
        if args.picture:
            picture(payload["train"], payload["steps"], args.picture)
        return
    said = [a for a in sys.argv[1:] if a not in ("--out", args.out)]
    environment = harness.environment(shlex.join(["python", "bench/train_fp8.py", *said]))
    runs = train_all(args.seed, args.steps, args.every)
    payload = {"environment": environment, "steps": args.steps, "train": runs}
    Path(args.out).write_text(json.dumps(payload) + "\n")


if __name__ == "__main__":
    main()
