"""The layer under JAX's strict modes, which some users run everything in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
from dropless import RouterConfig

SHAPE, MODEL_DIM = (3, 5), 16
OPTIONS = {
    "plain": {},
    "everything": {
        "expert_bias": True,
        "shared_expert_dim": 8,
        "shared_expert_gate": True,
        "router": RouterConfig(
            score="sigmoid",
            bias=True,
            selection_bias=True,
            expert_scale=True,
            num_groups=2,
            groups_kept=1,
        ),
    },
    "shared": {"shared_expert_dim": 8},
    "fp8": {"precision": "fp8"},
    "fp8 without up": {"precision": "fp8", "activation": dropless.Activation("relu", gated=False)},
    "h in fp8": {"precision": "bf16", "save_h": "fp8", "wgrad_precision": "bf16"},
    "weighted input": {"router": RouterConfig(weight_on="input")},
    "by sequence": {"router": RouterConfig(score="sqrt_softplus", balance_loss="sequence")},
    "drop": {"overflow": "drop"},
    "sparse mixer": {"router": RouterConfig(sparse_mixer_eps=0.01, jitter=0.01)},
}


def case(options, dtype):
    cfg = dropless.MoEConfig(6, 2, 24, **options)
    params = dropless.init(jax.random.key(1), MODEL_DIM, cfg, param_dtype=dtype)
    x = jax.random.normal(jax.random.key(2), (*SHAPE, MODEL_DIM), dtype)
    mask = np.arange(15).reshape(SHAPE) < 13
    key = jax.random.key(3) if cfg.router.jitter else None

    def loss(x, params):
        y, aux = dropless.moe(x, params, cfg, mask=mask, jitter_key=key)
        return y.astype(jnp.float32).sum() + aux.load_balance_loss + aux.z_loss

    return jax.value_and_grad(loss, (0, 1)), x, params


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_without_promotion_of_ranks_and_dtypes(name, dtype):
    step, x, params = case(OPTIONS[name], dtype)
    want = step(x, params)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = step(x, params)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_pieces_and_layers_without_promotion():
    def all_of_them():
        params = dropless.init(jax.random.key(1), MODEL_DIM, dropless.MoEConfig(6, 2, 24))
        x = jax.random.normal(jax.random.key(2), (15, MODEL_DIM))
        sizes = np.array([1, 0, 2, 5, 0, 4], np.int32)
        rows = dropless.ragged_dot(x, params["experts"]["gate"], sizes)
        return (
            rows,
            jax.grad(lambda x: dropless.ragged_dot(x, params["experts"]["gate"], sizes).sum())(x),
            dropless.grouped_wgrad(x, rows, sizes),
            dropless.update_selection_bias(np.zeros(6, np.float32), sizes),
            dropless.MoELayer(6, rngs=dropless.nnx.nnx.Rngs(0))(x),
            dropless.linen.MoELayer(6).init_with_output(jax.random.key(0), x)[0],
        )

    want = all_of_them()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = all_of_them()
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("name", ["plain", "everything", "fp8", "by sequence"])
def test_nothing_leaks_and_nothing_is_nan(name):
    step, x, params = case(OPTIONS[name], jnp.float32)
    want = step(x, params)
    with jax.checking_leaks(), jax.debug_nans(True):
        got = jax.jit(step)(x, params)
    for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-5)
