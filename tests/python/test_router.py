"""The router as one step: both forms of its products, and what of the program is not a kernel."""

import dataclasses
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
import oracle
from dropless import _router_gemm

CFG = dropless.MoEConfig(num_experts=12, experts_per_token=3, expert_dim=40, precision="bf16")
ROUTERS = {
    "plain": {},
    "bias": {"bias": True},
    "selection_bias": {"selection_bias": True, "score": "sigmoid", "renormalize_eps": 1e-20},
    "sequence_loss": {"balance_loss": "sequence"},
    "expert_scale": {"expert_scale": True},
}


@pytest.fixture
def on_gpu(monkeypatch):
    """Traces what a GPU runs; the operations exist on a CPU, too."""

    def use(split):
        def choose(split_version, direct_version, *args):
            return (split_version if split else direct_version)(*args)

        monkeypatch.setattr(_router_gemm, "on_gpu", choose)

    return use


def gradients(cfg, mask, coefficients, x, params, dy):
    def scalar(x, params):
        outputs = dropless.moe(x, params, cfg, mask=mask)
        return oracle.objective(outputs, dy, coefficients), outputs

    return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(x, params)


@pytest.mark.parametrize("coefficients", [(0, 0, 0), (0.03, 0.02, 0.05)], ids=["y", "losses"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_both_forms_of_the_products_give_the_same(on_gpu, name, masked, coefficients):
    cfg = dataclasses.replace(CFG, router=dropless.RouterConfig(**ROUTERS[name]))
    x, params, dy = oracle.layer_case(cfg, (2, 29, 72), jnp.bfloat16, jnp.float32)
    mask = jnp.arange(58).reshape(2, 29) % 5 != 3 if masked else None
    if masked:  # padding may hold anything
        x = jnp.where(mask[..., None], x, jnp.nan)
    results = []
    for split in (True, False):
        on_gpu(split)
        run = jax.jit(lambda *a: gradients(cfg, mask, coefficients, *a))
        results.append(run(x, params, dy))
    ((_, (y, aux)), (dx, dparams)), ((_, (y_want, aux_want)), (dx_want, dparams_want)) = results
    np.testing.assert_array_equal(aux.expert_counts, aux_want.expert_counts)
    # Logits of two orders of summation: the routing weights differ by a few roundings of float32,
    # and what is bfloat16 by one of its own.
    bound = oracle.bound("bf16", x.shape[-1], 2)
    oracle.assert_close("y", y, y_want, bound)
    oracle.assert_close("dx", dx, dx_want, bound)
    wanted = dict(oracle.leaves(dparams_want))
    for path, gradient in oracle.leaves(dparams):
        if np.any(np.asarray(wanted[path])):
            oracle.assert_close(path, gradient, wanted[path], bound)
        else:
            assert not np.any(np.asarray(gradient)), path


def test_gradient_of_x_alone_and_of_the_losses_alone(on_gpu):
    x, params, dy = oracle.layer_case(CFG, (29, 72), jnp.bfloat16, jnp.float32)
    of_all = {}
    for split in (True, False):
        on_gpu(split)
        _, (of_all[split], _) = gradients(CFG, None, (0, 0, 0), x, params, dy)
        alone = jax.grad(lambda x: jnp.sum(dropless.moe(x, params, CFG)[0] * dy))(x)
        np.testing.assert_array_equal(alone, of_all[split])
        losses = jax.grad(lambda x: dropless.moe(x, params, CFG)[1].load_balance_loss)(x)
        assert np.any(np.asarray(losses)) and np.isfinite(np.asarray(losses, np.float32)).all()
    oracle.assert_close("dx", of_all[True], of_all[False], oracle.bound("bf16", 72, 2))


# What a GPU runs for a step with all gradients, the operations' own launches aside.
OPERATIONS = {
    "router_terms": 1, "route_of_terms": 1, "expert_up": 1, "grouped_gemm": 1, "combine": 2,
    "expert_down_backward": 1, "route_backward_to_terms": 1, "expert_up_backward": 1,
    "grouped_wgrad": 2,
}  # fmt: skip


def test_program_of_a_step_holds_the_operations_and_three_products(on_gpu):
    on_gpu(True)
    x, params, dy = oracle.layer_case(CFG, (64, 72), jnp.bfloat16, jnp.bfloat16)
    params["router"] = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params["router"])

    def step(x, params, dy):
        y, pull = jax.vjp(lambda *a: dropless.moe(*a, CFG)[0], x, params)
        return y, pull(dy)

    text = jax.jit(step).lower(x, params, dy.astype(jnp.bfloat16)).compile().as_text()
    targets = Counter(re.findall(r'custom_call_target="dropless_(\w+)_c\d+"', text))
    assert targets == OPERATIONS
    # Beside them: the products, the sum of the kernel's gradient from its terms, and the sum of
    # both gradients of x. Operands not given are empty arrays.
    lowered = jax.jit(step).lower(x, params, dy.astype(jnp.bfloat16)).as_text()
    lines = [line for line in lowered.splitlines() if "-> tensor<0x" not in line]
    body = Counter(re.findall(r"stablehlo\.(\w+)", "\n".join(lines)))
    shapes_alone = "reshape", "transpose", "constant", "broadcast_in_dim"  # dy[:, None]
    assert {name: body.pop(name) for name in shapes_alone}["broadcast_in_dim"] == 1
    # Forward and backward ask for the kernel's terms each; compiled, it is one call, as above.
    calls = sum(OPERATIONS.values()) + 1
    assert body == {"custom_call": calls, "dot_general": 3, "add": 2 + 1, "slice": 3}
