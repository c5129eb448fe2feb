"""Data parallelism over eight virtual CPU devices: Explicit and Auto axes, own shard_maps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dropless
import oracle

CONFIG = dropless.MoEConfig(5, 2, 24, router=dropless.RouterConfig(bias=True))
KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
LIMIT = oracle.bound("f32", 128, 14)
DATA, MODEL = 4, 2


def make_mesh(kind, sizes=(DATA, MODEL), names=("data", "model")):
    return jax.make_mesh(sizes, names, axis_types=(KINDS[kind],) * len(sizes))


def case():
    return oracle.layer_case(CONFIG, (8, 7, 40))


def objective(x, params, dy, mask=None, cfg=CONFIG, **options):
    y, aux = dropless.moe(x, params, cfg, mask=mask, **options)
    total = jnp.sum(y * dy) + aux.load_balance_loss + 0.1 * aux.z_loss - 0.2 * aux.router_entropy
    return total, (y, aux)


def outputs_and_gradients(function):
    """Jitted; without the objective itself, a sum whose terms cancel: its gradients say more."""
    full = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)

    def split(*arguments):
        (_, outputs), gradients = full(*arguments)
        return outputs, gradients

    return jax.jit(split)


def gradient(**options):
    return outputs_and_gradients(functools.partial(objective, **options))


@functools.cache
def single_device(masked=False):
    x, params, dy = case()
    mask = jnp.arange(56).reshape(8, 7) % 3 > 0 if masked else None
    return jax.tree.map(np.asarray, gradient()(x, params, dy, mask)), mask


def same(got, want, limit=LIMIT):
    for (path, a), (_, b) in zip(oracle.leaves(got), oracle.leaves(want), strict=True):
        if jnp.issubdtype(np.asarray(b).dtype, jnp.integer):
            np.testing.assert_array_equal(a, b, err_msg=path)
        else:
            oracle.assert_close(path, a, b, limit)


def placed(mesh, spec=None):
    spec = P("data") if spec is None else spec
    x, params, dy = case()
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, spec))
    return put(x), jax.device_put(params, NamedSharding(mesh, P())), put(dy)


CALLS = {
    "mesh_of_x": ({}, False),
    "argument": ({"mesh": None}, False),
    "ambient": ({}, True),
    "ambient_and_argument": ({"mesh": None}, True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", CALLS)
def test_j2_data_parallel_without_a_gather(how, kind):
    options, ambient = CALLS[how]
    mesh = make_mesh(kind)
    options = dict.fromkeys(options, mesh)
    arguments = placed(mesh)
    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
        function = gradient(**options)
        got = function(*arguments)
        compiled = function.lower(*arguments).compile()
    same(got, single_device()[0])
    text = compiled.as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    assert "all-reduce" in text  # of the statistics and of the parameters' gradients
    # Every device works on its own tokens: 56 / 4 of them.
    assert re.search(r"f32\[14,40\]", text) and not re.search(r"f32\[56,40\]", text)
    assert got[0][0].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 3)


def test_j3_either_partitioner_of_xla():
    kept = jax.config.jax_use_shardy_partitioner
    try:
        for shardy in (True, False):
            jax.config.update("jax_use_shardy_partitioner", shardy)
            same(gradient()(*placed(make_mesh("auto"))), single_device()[0])
    finally:
        jax.config.update("jax_use_shardy_partitioner", kept)


def test_j4_pmap_on_two_devices():
    x, params, dy = case()
    halves = jax.tree.map(lambda a: a.reshape(2, 4, *a.shape[1:]), (x, dy))

    def total(params, x, dy):
        return objective(x, params, dy)[0]

    got = jax.pmap(jax.grad(total), in_axes=(None, 0, 0))(params, *halves)
    for i in range(2):
        want = jax.jit(jax.grad(total))(params, halves[0][i], halves[1][i])
        same(jax.tree.map(lambda leaf, i=i: leaf[i], got), want)


@pytest.mark.parametrize("kind", KINDS)
def test_h1_mask_and_all_axes(kind):
    want, mask = single_device(masked=True)
    mesh = make_mesh(kind)
    both = ("data", "model")
    x, params, dy = placed(mesh, P(both))
    mask = jax.device_put(mask, NamedSharding(mesh, P(both)))
    with jax.set_mesh(mesh):
        function = gradient(token_axes=both)
        same(function(x, params, dy, mask), want)
        text = function.lower(x, params, dy, mask).compile().as_text()
    assert "all-gather" not in text and re.search(r"f32\[7,40\]", text)


@pytest.mark.parametrize("kind", KINDS)
def test_capacity_is_each_device_own(kind):
    # The classic dropping layer: a device drops what exceeds its own capacity.
    cfg = dataclasses.replace(CONFIG, overflow="drop", expert_capacity_factor=0.7)
    x, params, _ = case()
    mesh = make_mesh(kind)
    _, aux = jax.jit(functools.partial(dropless.moe, cfg=cfg))(*placed(mesh)[:2])
    parts = [dropless.moe(part, params, cfg)[1] for part in np.split(np.asarray(x), DATA)]
    assert int(aux.dropped_tokens) == sum(int(part.dropped_tokens) for part in parts) > 0
    np.testing.assert_array_equal(aux.expert_counts, sum(part.expert_counts for part in parts))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ambient", [False, True])
def test_replicated_x_is_computed_everywhere(kind, ambient):
    mesh = make_mesh(kind)
    arguments = placed(mesh, P())
    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
        same(gradient()(*arguments), single_device()[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_prepared_experts_under_a_mesh(kind, dtype):
    # In FP8 weight gradients 128 rows of an expert share a scale; each device has rows of its own.
    cfg = dataclasses.replace(CONFIG, precision="fp8", wgrad_precision="bf16")
    x, params, dy = case()
    x, dy = x.astype(dtype), dy.astype(dtype)
    want = gradient(cfg=cfg)(x, params, dy)
    mesh = make_mesh(kind)
    _, on_mesh, _ = placed(mesh)
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, P("data")))
    arguments = put(x), on_mesh, put(dy)
    ready = jax.device_put(dropless.prepare_experts(params, cfg), NamedSharding(mesh, P()))
    got = outputs_and_gradients(
        lambda x, p, dy, ready: objective(x, p, dy, cfg=cfg, prepared=ready)
    )(*arguments, ready)
    same(got, want)


def test_the_sequence_axis_may_be_split_under_explicit_axes():
    mesh = make_mesh("explicit", (2, 4), ("data", "sequence"))
    x, params, dy = oracle.layer_case(CONFIG, (2, 8, 40))
    want = gradient()(x, params, dy)
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, P("data", "sequence")))
    function = gradient()
    arguments = put(x), jax.device_put(params, NamedSharding(mesh, P())), put(dy)
    same(function(*arguments), want)
    assert "all-gather" not in function.lower(*arguments).compile().as_text()


# --- gathers are said ----------------------------------------------------------------------------


def test_a_gather_of_x_warns_or_is_an_error():
    mesh = make_mesh("explicit")
    x, params, dy = placed(mesh, P("data", None, "model"))
    with pytest.warns(RuntimeWarning, match="x is sharded over 'model' along its last axis"):
        got = gradient()(x, params, dy)
    same(got, single_device()[0])
    with pytest.raises(ValueError, match=r"last axis.*gathered.*strict=True"):
        dropless.moe(x, params, dataclasses.replace(CONFIG, strict=True))


def test_a_gather_of_weights_warns_or_is_an_error():
    mesh = make_mesh("explicit")
    x, params, dy = placed(mesh)
    gate = jax.device_put(params["experts"]["gate"], NamedSharding(mesh, P(None, "data")))
    params = {**params, "experts": {**params["experts"], "gate": gate}}
    with pytest.warns(RuntimeWarning, match="gate.*is sharded as.*it is gathered"):
        got = gradient()(x, params, dy)
    same(got, single_device()[0])
    with pytest.raises(ValueError, match=r"gate.*strict=True"):
        dropless.moe(x, params, dataclasses.replace(CONFIG, strict=True))


def test_l4_a_batch_that_does_not_divide_warns_or_is_an_error():
    mesh = make_mesh("auto")
    x, params, _ = oracle.layer_case(CONFIG, (6, 5, 40))
    with jax.set_mesh(mesh):
        with pytest.warns(
            RuntimeWarning, match=r"first axis, 6, is not divisible by the 4 devices"
        ):
            y, aux = jax.jit(functools.partial(dropless.moe, cfg=CONFIG))(x, params)
        strict = dataclasses.replace(CONFIG, strict=True)
        with pytest.raises(ValueError, match=r"6, is not divisible"):
            dropless.moe(x, params, strict)
    same((y, aux), dropless.moe(x, params, CONFIG))


def test_arrays_taken_off_a_mesh_run_on_their_own_device():
    # Their types still speak of the mesh; with Explicit axes JAX's own functions refuse them.
    x, params, _ = jax.device_put(placed(make_mesh("auto")), jax.devices()[1])
    expected = dropless.moe(*case()[:2], CONFIG)
    same(dropless.moe(x, params, CONFIG), expected)
    # Under jit nothing but the type is known, so the mesh has to be said.
    one = make_mesh("auto", (1, 1))
    same(jax.jit(functools.partial(dropless.moe, cfg=CONFIG, mesh=one))(x, params), expected)


def test_l4_axes_are_checked():
    mesh = make_mesh("auto", (2, 4), ("data", "expert"))
    x, params, _ = case()
    with pytest.raises(NotImplementedError, match=r'expert_axis="expert" has 4 devices'):
        dropless.moe(x, params, CONFIG, mesh=mesh, expert_axis="expert")
    with pytest.raises(
        ValueError, match=r'expert_axis="experts" must be an axis of the mesh.*data'
    ):
        dropless.moe(x, params, CONFIG, mesh=mesh, expert_axis="experts")
    with pytest.raises(ValueError, match=r'expert_axis="expert" must be an axis.*\(\)'):
        dropless.moe(x, params, CONFIG, expert_axis="expert")
    with pytest.raises(ValueError, match=r"token_axes=\('batch',\) and a mesh with axes"):
        dropless.moe(x, params, CONFIG, mesh=mesh, token_axes="batch")
    with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh.*got str"):
        dropless.moe(x, params, CONFIG, mesh="data")
    for argument in ("token_axes", "axis_name"):
        with pytest.raises(TypeError, match=f"{argument} must be a mesh axis's name.*got 3"):
            dropless.moe(x, params, CONFIG, **{argument: 3})
    one = make_mesh("auto", (8, 1), ("data", "expert"))
    y, _ = dropless.moe(x, params, CONFIG, mesh=one, expert_axis="expert")
    oracle.assert_close("y", y, single_device()[0][0][0], LIMIT)


# --- a user's own shard_map ----------------------------------------------------------------------


def by_hand(mesh, x, params, dy, *, check_vma=True, axis_names=frozenset()):
    def inside(x, params):
        return dropless.moe(x, params, CONFIG, axis_name="data")

    y, aux = jax.shard_map(
        inside, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P()),
        check_vma=check_vma, axis_names=axis_names,
    )(x, params)  # fmt: skip
    total = jnp.sum(y * dy) + aux.load_balance_loss + 0.1 * aux.z_loss - 0.2 * aux.router_entropy
    return total, (y, aux)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("check_vma", "axis_names"),
    [
        (True, ()),
        (False, ()),
        (True, ("data",)),
    ],  # JAX asks for the check where axes stay automatic
    ids=["all", "all_unchecked", "data"],
)
def test_j6_h10_own_shard_map(kind, check_vma, axis_names):
    mesh = make_mesh(kind)
    function = functools.partial(by_hand, mesh, check_vma=check_vma, axis_names=set(axis_names))
    got = outputs_and_gradients(function)(*placed(mesh))
    same(got, single_device()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_j5_j6_j12_first_call_inside_shard_map_inside_scan(kind):
    mesh = make_mesh(kind)
    x, params, _ = case()
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 1.1, leaf * 0.9]), params)

    def through(moe, x, stacked):
        def block(x, params):
            y, aux = moe(x, params)
            return x + y / 4, aux.load_balance_loss

        x, losses = jax.lax.scan(block, x, stacked)
        return x, losses

    def own(x, stacked):
        layer = functools.partial(dropless.moe, cfg=CONFIG, axis_name="data")
        y, losses = jax.shard_map(
            functools.partial(through, layer), mesh=mesh,
            in_specs=(P("data"), P()), out_specs=(P("data"), P()),
        )(x, stacked)  # fmt: skip
        return jnp.sum(y**2) + jnp.sum(losses)

    def ours(x, stacked):
        y, losses = through(functools.partial(dropless.moe, cfg=CONFIG), x, stacked)
        return jnp.sum(y**2) + jnp.sum(losses)

    want = jax.jit(jax.grad(ours, argnums=(0, 1)))(x, stacked)
    arguments = (
        jax.device_put(x, NamedSharding(mesh, P("data"))),
        jax.device_put(stacked, NamedSharding(mesh, P())),
    )
    for function in (own, ours):
        got = jax.jit(jax.grad(function, argnums=(0, 1)))(*arguments)
        same(got, want)


def test_own_shard_map_without_axis_name_keeps_statistics_local():
    mesh = make_mesh("auto", (8,), ("data",))
    x, params, _ = case()

    def inside(x, params):
        y, aux = dropless.moe(x, params, CONFIG)
        return y, aux.expert_counts[None]

    y, counts = jax.jit(
        jax.shard_map(
            inside, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P("data"))
        )
    )(x, params)
    want_y, want = dropless.moe(x, params, CONFIG)
    oracle.assert_close("y", y, want_y, LIMIT)
    assert counts.shape == (8, 5)
    np.testing.assert_array_equal(np.asarray(counts).sum(0), want.expert_counts)
    np.testing.assert_array_equal(np.asarray(counts).sum(1), np.full(8, 14))


@pytest.mark.parametrize("kind", KINDS)
def test_j6_pieces_inside_shard_map(kind):
    # Each device has its own rows and all matrices: nothing is cast by hand.
    mesh = make_mesh(kind, (8,), ("data",))
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((48, 8), (3, 8, 5)))
    sizes = jnp.tile(jnp.array([2, 0, 3]), (8, 1))

    def total(lhs, rhs):
        def inside(lhs, rhs, sizes):
            return jnp.tanh(dropless.ragged_dot(lhs, rhs, sizes[0]))

        out = jax.shard_map(
            inside, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P("data")
        )(lhs, rhs, sharded_sizes)
        return jnp.sum(out**2)

    put = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))  # noqa: E731
    sharded_sizes = put(sizes, P("data"))
    got = jax.jit(jax.grad(total, argnums=(0, 1)))(put(lhs, P("data")), put(rhs, P()))

    def plain(lhs, rhs):
        parts = [dropless.ragged_dot(part, rhs, sizes[0]) for part in jnp.split(lhs, 8)]
        return jnp.sum(jnp.tanh(jnp.concatenate(parts)) ** 2)

    same(got, jax.grad(plain, argnums=(0, 1))(lhs, rhs))
