"""Layers that run at the same time in one process share XLA's threads and nothing else."""

from __future__ import annotations

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np

import dropless
import oracle

# Big enough for several items an operation, so that both layers' items mix on the threads.
SHAPE = (700, 136)
PRECISIONS = {
    "f32": {"precision": "f32"},
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8", "wgrad_precision": "fp8"},
}


def step_of(name, seed):
    """A call of a compiled forward and backward pass, and its result when it runs alone."""
    cfg = dropless.MoEConfig(5, 2, 200, expert_bias=True, **PRECISIONS[name])
    x, params, dy = oracle.layer_case(cfg, SHAPE, seed=seed)

    def loss(x, params):
        y, aux = dropless.moe(x, params, cfg)
        return jnp.sum(y * dy) + aux.load_balance_loss, y

    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    return (lambda: jax.tree.map(np.asarray, step(x, params))), jax.tree.map(
        np.asarray, step(x, params)
    )


def test_layers_in_several_threads_give_the_bits_of_one_after_the_other():
    cases = [step_of(name, seed) for seed, name in enumerate(PRECISIONS)]

    def repeat(case):
        call, want = case
        for _ in range(10):
            jax.tree.map(np.testing.assert_array_equal, call(), want)

    pool = concurrent.futures.ThreadPoolExecutor(2 * len(cases))
    try:
        futures = [pool.submit(repeat, case) for case in cases * 2]
        for future in futures:
            future.result(timeout=120)  # a deadlock fails the test
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
