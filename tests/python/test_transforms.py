"""JAX's transformations: each gives what the plain function gives."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import dropless
import oracle
from dropless import _call, _library, checkpoint_policies

CONFIG = dropless.MoEConfig(5, 2, 24)


def loss(x, params, dy, cfg=CONFIG):
    y, aux = dropless.moe(x, params, cfg)
    return jnp.sum(y * dy) + aux.load_balance_loss + 0.1 * aux.z_loss


GRADIENT = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=3)


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def same(got, want, limit=None):
    """Equal bits, or close to a bound where sums may be ordered otherwise."""
    for (path, a), (_, b) in zip(oracle.leaves(got), oracle.leaves(want), strict=True):
        if limit is None:
            np.testing.assert_array_equal(a, b, err_msg=path)
        elif np.ndim(b):  # not the objective, a sum whose terms cancel: its gradients say more
            oracle.assert_close(path, a, b, limit)


CLOSE = oracle.bound("f32", 128, 14)


def calls(text, op):
    return len(re.findall(rf"custom_call @{_library.target(op)}\b", text))


def all_calls(text):
    return len(re.findall(r"custom_call @dropless_", text))


def test_jit_equals_eager():
    x, params, dy = oracle.layer_case(CONFIG, (3, 17, 40))
    eager = jax.value_and_grad(loss, argnums=(0, 1))(x, params, dy)
    same(GRADIENT(x, params, dy, CONFIG), eager, CLOSE)
    with jax.disable_jit():
        same(
            dropless.moe(x, params, CONFIG)[0],
            jax.jit(dropless.moe, static_argnums=2)(x, params, CONFIG)[0],
            CLOSE,
        )


def test_jit_for_the_cpu_device():
    x, params, dy = oracle.layer_case(CONFIG, (17, 40))
    last = jax.devices("cpu")[-1]
    moved = jax.device_put((x, params, dy), last)
    got = GRADIENT(*moved, CONFIG)
    assert got[0].devices() == {last}
    same(got, GRADIENT(x, params, dy, CONFIG))


# --- vmap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ["inputs", "weights", "both"])
def test_j4_vmap_equals_a_loop(axes):
    n = 3
    cases = [oracle.layer_case(CONFIG, (11, 40), seed=s) for s in range(n)]
    xs, params, dys = (stack([case[i] for case in cases]) for i in range(3))
    in_axes = {"inputs": (0, None, 0), "weights": (None, 0, None), "both": (0, 0, 0)}[axes]
    arguments = [a if axis == 0 else jax.tree.map(lambda leaf: leaf[0], a)
                 for a, axis in zip((xs, params, dys), in_axes, strict=True)]  # fmt: skip
    gradient = jax.value_and_grad(loss, argnums=(0, 1))
    got = jax.jit(jax.vmap(gradient, in_axes))(*arguments)

    def one(i):
        return GRADIENT(*[jax.tree.map(lambda leaf: leaf[i], a) if axis == 0 else a
                          for a, axis in zip(arguments, in_axes, strict=True)], CONFIG)  # fmt: skip

    same(got, stack([one(i) for i in range(n)]), CLOSE)


def test_j4_gradient_of_vmap():
    cases = [oracle.layer_case(CONFIG, (11, 40), seed=s) for s in range(3)]
    xs, params, dys = (stack([case[i] for case in cases]) for i in range(3))
    total = jax.jit(jax.grad(lambda p: jnp.sum(jax.vmap(loss)(xs, p, dys))))(params)
    each = stack([GRADIENT(*case, CONFIG)[1][1] for case in cases])
    same(total, each, CLOSE)
    shared = jax.jit(jax.grad(lambda p: jnp.sum(jax.vmap(loss, (0, None, 0))(xs, p, dys))))(
        cases[0][1]
    )
    parts = [GRADIENT(case[0], cases[0][1], case[2], CONFIG)[1][1] for case in cases]
    same(shared, jax.tree.map(lambda *g: sum(np.asarray(v, np.float64) for v in g), *parts), CLOSE)


def test_j4_vmap_of_pieces():
    rng = np.random.default_rng(0)
    lhs, rhs = (
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((3, 20, 8), (3, 4, 8, 6))
    )
    sizes = jnp.array([[5, 0, 9, 6], [1, 2, 3, 4], [0, 0, 20, 0]])
    got = jax.vmap(dropless.ragged_dot)(lhs, rhs, sizes)
    want = jnp.stack([dropless.ragged_dot(lhs[i], rhs[i], sizes[i]) for i in range(3)])
    np.testing.assert_array_equal(got, want)
    logits = jnp.asarray(rng.standard_normal((3, 7, 5)), jnp.float32)
    routed = jax.vmap(lambda z: dropless.route(z, CONFIG))(logits)
    same(routed, stack([dropless.route(z, CONFIG) for z in logits]))


# --- scan and remat ------------------------------------------------------------------------------


def layers(depth, width=40):
    _, params, _ = oracle.layer_case(CONFIG, (1, width))
    return stack(
        [jax.tree.map(lambda leaf, i=i: leaf * (1 + 0.01 * i), params) for i in range(depth)]
    )


def scanned(x, stacked, policy=None, remat=False):
    def block(x, params):
        y, aux = dropless.moe(x, params, CONFIG)
        # Linear, so that y is not needed again; small, so that 24 layers stay bounded.
        return x + y / 64, aux.load_balance_loss

    block = jax.checkpoint(block, policy=policy) if remat else block
    x, losses = jax.lax.scan(block, x, stacked)
    return jnp.sum(x**2) + jnp.sum(losses)


def test_scan_equals_a_loop():
    x, _, _ = oracle.layer_case(CONFIG, (17, 40))
    stacked = layers(3)

    def looped(x, stacked):
        total = 0.0
        for i in range(3):
            y, aux = dropless.moe(x, jax.tree.map(lambda leaf, i=i: leaf[i], stacked), CONFIG)
            x, total = x + y / 64, total + aux.load_balance_loss
        return jnp.sum(x**2) + total

    got = jax.jit(jax.value_and_grad(scanned, argnums=(0, 1)))(x, stacked)
    same(got, jax.jit(jax.value_and_grad(looped, argnums=(0, 1)))(x, stacked), CLOSE)


@pytest.mark.parametrize("remat", [False, True])
def test_j1_calls_in_the_program_do_not_depend_on_depth(remat):
    x, _, _ = oracle.layer_case(CONFIG, (17, 40))
    gradient = jax.jit(jax.grad(functools.partial(scanned, remat=remat), argnums=(0, 1)))
    counts = [all_calls(gradient.lower(x, layers(depth)).as_text()) for depth in (2, 24)]
    assert counts[0] == counts[1] > 0
    assert np.isfinite(np.asarray(gradient(x, layers(24))[0])).all()


POLICIES = {
    "nothing": (jax.checkpoint_policies.nothing_saveable, {"route": 2, "expert_up": 2}),
    "routing": (checkpoint_policies.save_routing, {"route": 1, "expert_up": 2}),
    "routing_and_h": (checkpoint_policies.save_routing_and_h, {"route": 1, "expert_up": 1}),
    "all": (checkpoint_policies.save_all, {"route": 1, "expert_up": 1}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_g6_h5_remat_recomputes_what_its_policy_says(name):
    policy, expected = POLICIES[name]
    x, params, dy = oracle.layer_case(CONFIG, (33, 40))
    rematerialised = jax.jit(
        jax.value_and_grad(
            jax.checkpoint(lambda x, p: loss(jnp.sin(x), p, dy), policy=policy), argnums=(0, 1)
        )
    )
    plain = jax.jit(jax.value_and_grad(lambda x, p: loss(jnp.sin(x), p, dy), argnums=(0, 1)))
    same(rematerialised(x, params), plain(x, params))
    text = rematerialised.lower(x, params).as_text()
    assert {op: calls(text, op) for op in expected} == expected
    # The down product and the combine of the forward pass are never needed again.
    assert calls(text, "grouped_gemm") == 1


def test_remat_inside_scan_keeps_what_its_policy_says():
    x, _, _ = oracle.layer_case(CONFIG, (17, 40))
    counts = {}
    values = []
    for name, (policy, _) in POLICIES.items():
        gradient = jax.jit(
            jax.grad(functools.partial(scanned, policy=policy, remat=True), argnums=1)
        )
        counts[name] = calls(gradient.lower(x, layers(3)).as_text(), "expert_up")
        values.append(gradient(x, layers(3)))
    assert counts == {"nothing": 2, "routing": 2, "routing_and_h": 1, "all": 1}
    for value in values[1:]:
        same(value, values[0])


# --- x64, export, caches -------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["f32", "fp8"])
def test_j8_x64_changes_nothing(precision):
    cfg = dataclasses.replace(
        CONFIG, precision=precision, expert_bias=True, overflow="drop",
        router=dropless.RouterConfig(score="sigmoid", bias=True, selection_bias=True),
    )  # fmt: skip
    x, params, dy = oracle.layer_case(cfg, (17, 40))
    mask = jnp.arange(17) % 4 > 0

    def everything(x, params, mask, dy):
        def scalar(x, params):
            y, aux = dropless.moe(x, params, cfg, mask=mask)
            return oracle.objective((y, aux), dy, (1.0, 1.0, 1.0)), (y, aux)

        return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(x, params)

    narrow = jax.jit(everything)(x, params, mask, dy)
    with jax.enable_x64(True):
        wide = jax.jit(everything)(x, params, mask, dy)
        rows = dropless.permute(x, dropless.plan(jnp.zeros((17, 2), jnp.int32), 3))
        assert rows.dtype == jnp.float32
        assert {leaf.dtype.name for leaf in jax.tree.leaves(wide[0][1])} == {"float32", "int32"}
        wide = jax.tree.map(np.asarray, wide)
        with pytest.raises(TypeError, match="x must be float32 or bfloat16; got float64"):
            dropless.moe(np.asarray(x, np.float64), params, cfg)
    same(wide, narrow)


def test_export_round_trip():
    x, params, dy = oracle.layer_case(CONFIG, (17, 40))
    function = jax.jit(lambda x, p, dy: jax.value_and_grad(loss, argnums=(0, 1))(x, p, dy))
    with pytest.raises(ValueError, match="dropless_"):
        export.export(function)(x, params, dy)  # JAX refuses custom calls that nobody vouches for
    exported = export.export(function, disabled_checks=dropless.export_disabled_checks())(
        x, params, dy
    )
    again = export.deserialize(exported.serialize())
    same(again.call(x, params, dy), function(x, params, dy))


def test_export_for_two_platforms():
    x, params, _ = oracle.layer_case(CONFIG, (17, 40))
    function = jax.jit(lambda x, p: dropless.moe(x, p, CONFIG)[0])
    exported = export.export(
        function, platforms=("cpu", "cuda"), disabled_checks=dropless.export_disabled_checks()
    )(x, params)
    assert set(exported.platforms) == {"cpu", "cuda"}
    same(export.deserialize(exported.serialize()).call(x, params), function(x, params))


CACHE_PROGRAM = """
import sys, jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from dropless import _library
if sys.argv[2] != "0":  # a later version of the library, with other target names
    old = {op: _library.target(op) for op in _library.OPS}
    _library.CONTRACT += int(sys.argv[2])
    for op in _library.OPS:
        handler = getattr(_library.libraries.cpu, old[op])
        jax.ffi.register_ffi_target(_library.target(op), jax.ffi.pycapsule(handler), platform="cpu")
import dropless
cfg = dropless.MoEConfig(5, 2, 24)
params = dropless.init(jax.random.key(0), 40, cfg)
x = jnp.ones((3, 40)) * jnp.arange(40)
step = jax.jit(lambda x, p: dropless.moe(x, p, cfg)[0])
print(float(step(x, params).sum()), step.lower(x, params).as_text().count(f"_c{_library.CONTRACT}"))
"""


def test_a_warm_compile_cache_of_another_contract_is_not_used(tmp_path):
    def run(shift):
        done = subprocess.run(
            [sys.executable, "-c", CACHE_PROGRAM, str(tmp_path), shift],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        value, targets = done.stdout.split()
        assert int(targets) > 0
        return value, {
            path.name
            for path in tmp_path.iterdir()
            if "lambda" in path.name and "atime" not in path.name
        }

    first, cold = run("0")
    again, warm = run("0")
    other, moved = run("1")
    assert first == again == other
    assert cold == warm and len(cold) == 1  # the second run compiled nothing new
    assert len(moved) == 2 and cold < moved  # the other contract has an entry of its own


def test_attributes_have_the_types_that_the_targets_expect():
    x, params, _ = oracle.layer_case(CONFIG, (17, 40))
    text = jax.jit(lambda x, p: dropless.moe(x, p, CONFIG)[0]).lower(x, params).as_text()
    up = next(line for line in text.splitlines() if _library.target("expert_up") in line)
    assert "experts_per_token = 2 : i64" in up and "activation = 0 : i32" in up
    routing = next(line for line in text.splitlines() if _library.target("route") in line)
    assert "scale = 1.000000e+00 : f32" in routing and "capacity = 0 : i64" in routing
    assert "has_side_effect = true" not in text


def test_unify_axes_is_the_identity_outside_a_mesh():
    tree = (jnp.ones(3), None, {"a": jnp.zeros(2)})
    assert _call.unify_axes(tree) is tree
