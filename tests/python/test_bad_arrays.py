"""What is given as an array and is none: an error that names the argument and what came."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
from dropless import linen

pytestmark = pytest.mark.any_jax

H = 8
CONFIG = dropless.MoEConfig(5, 2, 12)
TABLE = dropless.MoEConfig(5, 2, 12, router=dropless.RouterConfig(expert_table=7))
JITTER = dropless.MoEConfig(5, 2, 12, router=dropless.RouterConfig(jitter=0.1))
VECTORS = dropless.RouterConfig(selection_bias=True, expert_scale=True)
MIXED = dropless.MoEConfig(5, 2, 12, router=dropless.RouterConfig(sparse_mixer_eps=0.1))
STATEFUL = dropless.MoEConfig(5, 2, 12, router=VECTORS)

PARAMS = dropless.init(jax.random.key(0), H, CONFIG)
X, MASK, LOGITS, FIVE = np.ones((6, H), np.float32), np.ones(6, bool), np.ones((6, 5)), np.ones(5)
COUNTS = np.ones(5, np.int32)
PLAN = dropless.plan(np.zeros((6, 2), np.int32), 5)
LHS, RHS, SIZES, DY = np.ones((7, 8)), np.ones((2, 8, 5)), np.array([3, 4]), np.ones((7, 5))
NNX = dropless.MoELayer(5, expert_dim=12, model_dim=H, router=VECTORS)
LINEN = linen.MoELayer(5, expert_dim=12)
VARIABLES = LINEN.init(jax.random.key(0), X)


def moe(x=X, params=PARAMS, cfg=CONFIG, **options):
    return dropless.moe(x, params, cfg, **options)


def expert_leaf(name, value):
    return {**PARAMS, "experts": {**PARAMS["experts"], name: value}}


def route(logits=LOGITS, cfg=STATEFUL, selection_bias=FIVE, expert_scale=FIVE, **options):
    vectors = {"selection_bias": selection_bias, "expert_scale": expert_scale}
    return dropless.route(logits, cfg, **vectors, **options)


# Function and argument: a call with the value in its place.
CALLS = {
    "moe x": lambda v: moe(v),
    "moe params": lambda v: moe(params=v),
    "moe router": lambda v: moe(params={**PARAMS, "router": v}),
    "moe kernel": lambda v: moe(params={**PARAMS, "router": {"kernel": v}}),
    "moe gate": lambda v: moe(params=expert_leaf("gate", v)),
    "moe mask": lambda v: moe(mask=v),
    "moe expert_ids": lambda v: moe(expert_ids=v),
    "moe token_ids": lambda v: moe(
        params=dropless.init(jax.random.key(0), H, TABLE), cfg=TABLE, token_ids=v
    ),
    "moe jitter_key": lambda v: moe(cfg=JITTER, jitter_key=v),
    "moe prepared": lambda v: moe(prepared=v),
    "moe mesh": lambda v: moe(mesh=v),
    "moe expert_axis": lambda v: moe(expert_axis=v),
    "moe axis_name": lambda v: moe(axis_name=v),
    "init key": lambda v: dropless.init(v, H, CONFIG),
    "init model_dim": lambda v: dropless.init(jax.random.key(0), v, CONFIG),
    "init param_dtype": lambda v: dropless.init(jax.random.key(0), H, CONFIG, param_dtype=v),
    "prepare_experts params": lambda v: dropless.prepare_experts(v, CONFIG),
    "route logits": lambda v: route(v),
    "route selection_bias": lambda v: route(selection_bias=v),
    "route expert_scale": lambda v: route(expert_scale=v),
    "route mask": lambda v: route(mask=v),
    "route expert_ids": lambda v: route(expert_ids=v),
    "route sampling_key": lambda v: dropless.route(LOGITS, MIXED, sampling_key=v),
    "plan ids": lambda v: dropless.plan(v, 5),
    "plan num_experts": lambda v: dropless.plan(np.zeros((6, 2), np.int32), v),
    "ragged_dot lhs": lambda v: dropless.ragged_dot(v, RHS, SIZES),
    "ragged_dot rhs": lambda v: dropless.ragged_dot(LHS, v, SIZES),
    "ragged_dot group_sizes": lambda v: dropless.ragged_dot(LHS, RHS, v),
    "ragged_dot group_offset": lambda v: dropless.ragged_dot(LHS, RHS, SIZES, group_offset=v),
    "grouped_wgrad x": lambda v: dropless.grouped_wgrad(v, DY, SIZES),
    "grouped_wgrad dy": lambda v: dropless.grouped_wgrad(LHS, v, SIZES),
    "grouped_wgrad group_sizes": lambda v: dropless.grouped_wgrad(LHS, DY, v),
    "grouped_wgrad into": lambda v: dropless.grouped_wgrad(LHS, DY, SIZES, v),
    "permute x": lambda v: dropless.permute(v, PLAN),
    "permute plan": lambda v: dropless.permute(X, v),
    "unpermute rows": lambda v: dropless.unpermute(v, PLAN),
    "unpermute plan": lambda v: dropless.unpermute(np.ones((12, H)), v),
    "unpermute weights": lambda v: dropless.unpermute(np.ones((12, H)), PLAN, v),
    "load_balance_loss expert_counts": lambda v: dropless.load_balance_loss(v, FIVE, 3, 2),
    "load_balance_loss prob_sum": lambda v: dropless.load_balance_loss(COUNTS, v, 3, 2),
    "load_balance_loss tokens": lambda v: dropless.load_balance_loss(COUNTS, FIVE, v, 2),
    "load_balance_loss experts_per_token": lambda v: dropless.load_balance_loss(COUNTS, FIVE, 3, v),
    "update_selection_bias selection_bias": lambda v: dropless.update_selection_bias(v, COUNTS),
    "update_selection_bias expert_counts": lambda v: dropless.update_selection_bias(FIVE, v),
    "update_selection_bias rate": lambda v: dropless.update_selection_bias(FIVE, COUNTS, rate=v),
    "nnx x": lambda v: NNX(v),
    "lazy nnx x": lambda v: dropless.MoELayer(5, expert_dim=12)(v),
    "nnx mask": lambda v: NNX(X, mask=v),
    "nnx kernel_init": lambda v: dropless.MoELayer(5, kernel_init=v),
    "nnx param_dtype": lambda v: dropless.MoELayer(5, param_dtype=v),
    "nnx expert_counts": lambda v: NNX.update_selection_bias(v),
    "linen x": lambda v: LINEN.apply(VARIABLES, v),
    "linen mask": lambda v: LINEN.apply(VARIABLES, X, mask=v),
    "linen init x": lambda v: LINEN.init(jax.random.key(0), v),
    "explain model_dim": lambda v: dropless.explain(CONFIG, 8, v),
    "explain tokens": lambda v: dropless.explain(CONFIG, v, H),
    "explain device": lambda v: dropless.explain(CONFIG, 8, H, device=v),
}

VALUES = {
    "None": None,
    "a string": "text",
    "strings": ["a", "b"],
    "an array of strings": np.array(["a", "b"]),
    "an array of objects": np.array([None, object()]),
    "a ragged list": [[1], [2, 3]],
    "an object": object(),
    "a shape": jax.ShapeDtypeStruct((6, H), jnp.float32),
    "a number beyond 64 bits": 10**30,
    "a dict": {1: 2},
    "complex numbers": np.ones((6, H), np.complex64),
    "float8": jnp.ones((6, H), jnp.float8_e4m3fn),
    "a batch of keys": jax.random.split(jax.random.key(0), 3),
}

# None is a value of these.
OPTIONAL = (
    *("mask", "expert_ids", "jitter_key", "sampling_key", "prepared", "mesh", "expert_axis"),
    *("axis_name", "group_offset", "into", "weights", "kernel_init", "device"),
)


# A dict that lacks what it should hold is told what.
LACKING = {"moe params", "moe router"}


def refused(name, value):
    argument = name.split()[-1]
    if value is None:
        return not (argument in OPTIONAL or name == "nnx expert_counts")
    # A ShapeDtypeStruct names a dtype as well as an array's dtype does.
    return not (isinstance(value, jax.ShapeDtypeStruct) and argument == "param_dtype")


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", CALLS)
def test_n2_what_is_no_array_is_named(name, kind):
    value = VALUES[kind]
    if not refused(name, value):
        CALLS[name](value)
        return
    argument = name.split()[-1]
    with pytest.raises((TypeError, ValueError)) as error:
        CALLS[name](value)
    said = str(error.value)
    assert re.search(rf"\b{argument}\b", said), said
    if isinstance(value, dict) and name in LACKING:
        assert "expected only" in said
        return
    assert ("must" in said or "expected" in said) and "got" in said, said
    assert type(error.value) in (TypeError, ValueError)
    assert "JAX" not in said and "jitted" not in said, said


def test_numbers_that_jax_takes_as_arrays_are_taken():
    wide = np.asarray(X, np.float64)
    want = moe(X)[0]
    for x in (wide, wide.tolist(), jnp.asarray(wide)):
        np.testing.assert_array_equal(moe(x)[0], want)
        np.testing.assert_array_equal(jax.jit(moe)(np.asarray(x))[0], jax.jit(moe)(X)[0])


def test_j8_float64_is_refused_by_name_with_x64():
    with jax.enable_x64(True):
        for name, shape in (
            ("moe x", (6, H)),
            ("route logits", (6, 5)),
            ("ragged_dot lhs", (7, 8)),
            ("permute x", (6, H)),
            ("unpermute rows", (12, H)),
            ("moe kernel", (H, 5)),
            ("nnx x", (6, H)),
            ("linen x", (6, H)),
        ):
            with pytest.raises(TypeError, match=r"must be float32 or bfloat16; got float64"):
                CALLS[name](np.ones(shape))


@pytest.mark.parametrize("experts", [2**24 + 1, 2**31, 2**40])
def test_n2_more_experts_than_can_be_numbered(experts):
    text = f"num_experts must be at most {2**24}; got {experts}"
    with pytest.raises(ValueError, match=text):
        dropless.plan(np.zeros((6, 2), np.int32), experts)
    with pytest.raises(ValueError, match=text):
        dropless.MoEConfig(experts)
    with pytest.raises(ValueError, match=text):
        dropless.MoELayer(experts)


def test_as_many_experts_as_can_be_numbered_are_planned():
    ids = np.array([[2**24 - 1, 0], [7, 2**24 - 1]], np.int32)
    plan = dropless.plan(ids, 2**24)
    np.testing.assert_array_equal(plan.row_of_slot, [[2, 0], [1, 3]])
    assert int(plan.counts[-1]) == 2 and int(plan.counts.sum()) == 4


@pytest.mark.parametrize("name", ["expert_dim", "shared_expert_dim", "experts_per_token"])
def test_n2_widths_beyond_32_bits(name):
    with pytest.raises(ValueError, match=f"{name} must be at most {2**31 - 1}; got {2**31}"):
        dropless.MoEConfig(8, **{name: 2**31})


def test_n2_an_axis_name_that_nothing_binds():
    text = "axis_name must name axes of the shard_map .*; got 'text', which is bound by none"
    with pytest.raises(ValueError, match=text):
        moe(axis_name="text")
    with pytest.raises(ValueError, match=text):
        dropless.update_selection_bias(np.ones(5, np.float32), COUNTS, axis_name="text")
