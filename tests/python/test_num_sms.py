"""The limit on multiprocessors reaches every grouped product of a step, and nothing else."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import dropless
import oracle

# Forward and backward, the shared expert's beside the routed experts'.
PRODUCTS = {
    "expert_up": 2,
    "grouped_gemm": 2,
    "expert_down_backward": 2,
    "expert_up_backward": 2,
    "grouped_wgrad": 4,
}


@pytest.mark.parametrize("num_sms", [None, 2, 33])
def test_every_product_of_a_step_is_told(num_sms):
    cfg = dropless.MoEConfig(
        num_experts=12, experts_per_token=3, expert_dim=40, shared_expert_dim=56,
        precision="bf16", num_sms=num_sms,
    )  # fmt: skip
    x, params, dy = oracle.layer_case(cfg, (29, 72), jnp.bfloat16, jnp.float32)

    def step(x, params):
        y, pull = jax.vjp(lambda *a: dropless.moe(*a, cfg)[0], x, params)
        return y, pull(dy.astype(y.dtype))

    text = jax.jit(step).lower(x, params).as_text()
    calls = [line for line in text.splitlines() if "@dropless_" in line]
    told = Counter()
    for line in calls:
        op = re.search(r"@dropless_(\w+)_c\d+", line).group(1)
        limit = re.search(r"\bnum_sms = (\d+) : i32", line)
        assert (limit is not None) == (op in PRODUCTS), line
        if limit is not None:
            assert int(limit.group(1)) == (num_sms or 0), line
            told[op] += 1
    assert told == PRODUCTS and len(calls) > sum(PRODUCTS.values())
