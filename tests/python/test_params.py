"""Parameters: shapes, initial values, what optimisers may touch, what the GEMMs read of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dropless
import oracle

CONFIG = dropless.MoEConfig(
    6, 2, 136, expert_bias=True, router=dropless.RouterConfig(bias=True, selection_bias=True)
)


def test_shapes_and_dtypes():
    params = dropless.init(jax.random.key(0), 200, CONFIG, param_dtype=jnp.bfloat16)
    found = {path: (leaf.shape, leaf.dtype.name) for path, leaf in oracle.leaves(params)}
    assert found == {
        "['router']['kernel']": ((200, 6), "bfloat16"),
        "['router']['bias']": ((6,), "bfloat16"),
        "['router']['selection_bias']": ((6,), "float32"),
        "['experts']['gate']": ((6, 200, 136), "bfloat16"),
        "['experts']['up']": ((6, 200, 136), "bfloat16"),
        "['experts']['down']": ((6, 136, 200), "bfloat16"),
        "['experts']['gate_bias']": ((6, 136), "bfloat16"),
        "['experts']['up_bias']": ((6, 136), "bfloat16"),
        "['experts']['down_bias']": ((6, 200), "bfloat16"),
    }
    plain = dropless.init(jax.random.key(0), 200, dropless.MoEConfig(6, 2))
    assert set(plain["router"]) == {"kernel"} and set(plain["experts"]) == {"gate", "up", "down"}
    assert plain["experts"]["gate"].shape == (6, 200, 320)  # 8/3 * 200 / 2 = 267, rounded up


def test_every_expert_starts_like_a_dense_layer():
    params = dropless.init(jax.random.key(1), 300, dropless.MoEConfig(5, 2, 500))["experts"]
    for name, fan_in in (("gate", 300), ("up", 300), ("down", 500)):
        each = np.asarray(params[name]).std(axis=(1, 2))
        # 150,000 samples give the standard deviation to 0.2 %; experts may not be copies.
        np.testing.assert_allclose(each, fan_in**-0.5, rtol=0.01)
        assert not np.array_equal(params[name][0], params[name][1])
    assert not np.array_equal(params["gate"], params["up"])


def test_kernel_init_sees_one_matrix_at_a_time():
    seen = []

    def kernel_init(key, shape, dtype):
        seen.append((shape, dtype))
        return jax.random.normal(key, shape, dtype)

    dropless.init(jax.random.key(0), 8, dropless.MoEConfig(3, 1, 5), kernel_init=kernel_init)
    assert {shape for shape, _ in seen} == {(8, 3), (8, 5), (5, 8)}


@pytest.mark.parametrize(
    ("model_dim", "dtype", "kind", "text"),
    [
        (0, jnp.float32, ValueError, r"model_dim must be an int >= 1; got 0"),
        (8.0, jnp.float32, ValueError, r"model_dim must be an int >= 1; got 8.0"),
        (8, jnp.float16, TypeError, r"param_dtype .* got float16.*Use bfloat16"),
        (8, jnp.int8, TypeError, r"param_dtype must be float32 or bfloat16; got int8"),
        (8, None, TypeError, r"param_dtype must be float32 or bfloat16; got None"),
        (8, "float", TypeError, r"param_dtype must be .*; got float64"),
        (8, "f33", TypeError, r"param_dtype must be .*; got 'f33'"),
    ],
)
def test_n2_bad_arguments_of_init_are_named(model_dim, dtype, kind, text):
    with pytest.raises(kind, match=text):
        dropless.init(jax.random.key(0), model_dim, CONFIG, param_dtype=dtype)


@pytest.mark.parametrize(
    ("kernel_init", "kind", "text"),
    [
        ("he", TypeError, r" must be a function or None; got 'he'"),
        (lambda key, shape, dtype: jnp.ones(3, dtype), ValueError, r"got float32\[3\]"),
        (lambda key, shape, dtype: jnp.ones(shape, jnp.float16), ValueError, r"got float16\[40, "),
    ],
)
def test_n2_what_an_initialiser_returns_is_checked(kernel_init, kind, text):
    with pytest.raises(kind, match=r"kernel_init.*" + text):
        dropless.init(jax.random.key(0), 40, CONFIG, kernel_init=kernel_init)


def test_h7_no_optimiser_touches_selection_bias():
    x, params, dy = oracle.layer_case(CONFIG, (30, 40))
    mask = dropless.trainable_mask(params)
    assert [path for path, kept in oracle.leaves(mask) if not kept] == [
        "['router']['selection_bias']"
    ]
    labels = jax.tree.map(lambda m: "train" if m else "keep", mask)
    optimizer = optax.multi_transform(
        {"train": optax.adamw(0.1, weight_decay=0.5), "keep": optax.set_to_zero()}, labels
    )
    gradients = jax.jit(jax.grad(lambda p: jnp.sum(dropless.moe(x, p, CONFIG)[0] * dy)))(params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(
        after["router"]["selection_bias"], params["router"]["selection_bias"]
    )
    assert not np.array_equal(after["router"]["kernel"], params["router"]["kernel"])


def test_trainable_mask_of_a_whole_model():
    params = {"layers": [{"moe": dropless.init(jax.random.key(0), 8, CONFIG)}], "head": jnp.ones(3)}
    mask = dropless.trainable_mask(params)
    assert mask["head"] is True and mask["layers"][0]["moe"]["router"]["selection_bias"] is False


# --- prepared weights ----------------------------------------------------------------------------


def prepared(precision, h=200, dtype=jnp.float32, **options):
    cfg = dataclasses.replace(CONFIG, precision=precision, **options)
    _, params, _ = oracle.layer_case(cfg, (1, h), jnp.float32, dtype)
    return params, dropless.prepare_experts(params, cfg)


def test_prepared_casts():
    params, ready = prepared("bf16")
    for name in ("gate", "up", "down"):
        weight = getattr(ready, name)
        np.testing.assert_array_equal(weight.q, params["experts"][name].astype(jnp.bfloat16))
        assert weight.q_t is None and weight.scale is None
    params, ready = prepared("auto")
    np.testing.assert_array_equal(ready.gate.q, params["experts"]["gate"])
    assert ready.precision == "f32"


def blocks_of(array):
    """The largest magnitude of each 128x128 block of [E, in, out]."""
    e, rows, columns = array.shape
    padded = np.zeros((e, -(-rows // 128) * 128, -(-columns // 128) * 128))
    padded[:, :rows, :columns] = np.abs(array)
    return padded.reshape(e, padded.shape[1] // 128, 128, -1, 128).max(axis=(2, 4))


@pytest.mark.parametrize("rounding", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_prepared_fp8_is_the_recipe(rounding, dtype):
    params, ready = prepared("fp8", dtype=dtype, scale_rounding=rounding)
    for name in ("gate", "up", "down"):
        w, made = np.asarray(params["experts"][name], np.float32), getattr(ready, name)
        scale = (blocks_of(w) / 448).astype(np.float32)
        if rounding == "pow2":
            scale = np.exp2(np.ceil(np.log2(scale)))
        np.testing.assert_array_equal(made.scale, scale)
        np.testing.assert_array_equal(made.scale_t, np.swapaxes(scale, 1, 2))
        np.testing.assert_array_equal(made.q_t, np.swapaxes(np.asarray(made.q), 1, 2))
        spread = np.repeat(np.repeat(scale, 128, 1), 128, 2)[:, : w.shape[1], : w.shape[2]]
        inverse = np.float32(1) / spread
        want = jnp.clip(w * inverse, -448, 448).astype(jnp.float8_e4m3fn)
        np.testing.assert_array_equal(np.asarray(made.q), np.asarray(want))


@pytest.mark.parametrize("amax", [0.0, 1.4e-45, 1e-38, 2.0**-126, 1e-30, 1.0, 3e38])
def test_i1_i2_i3_zero_tiny_and_huge_blocks(amax):
    cfg = dataclasses.replace(CONFIG, precision="fp8", expert_dim=130)
    _, params, _ = oracle.layer_case(cfg, (1, 130))
    rng = np.random.default_rng(0)
    block = rng.uniform(-1, 1, (130, 130)).astype(np.float32)
    block[0, 0] = 1.0
    w = jnp.zeros((6, 130, 130)).at[2].set(block * np.float32(amax))
    params = {**params, "experts": {**params["experts"], "gate": w}}
    ready = dropless.prepare_experts(params, cfg).gate
    q, scale = np.asarray(ready.q, np.float32), np.asarray(ready.scale)
    assert np.isfinite(scale).all() and (scale > 0).all() and np.isfinite(q).all()
    assert not q[[0, 1, 3, 4, 5]].any() and (scale[[0, 1, 3, 4, 5]] == 1).all()
    back = q[2] * np.repeat(np.repeat(scale[2], 128, 0), 128, 1)[:130, :130].astype(np.float64)
    # Relative to the block's largest value, with the smallest scale there is, 2^-126.
    step = max(amax / 448, 2.0**-126)
    assert np.abs(back - np.asarray(w[2], np.float64)).max() <= 16 * step
    if amax >= 1e-30:
        assert q[2].max() == 448 or np.abs(q[2]).max() == 448


def test_i7_an_outlier_spoils_only_its_own_block():
    cfg = dataclasses.replace(CONFIG, precision="fp8", expert_dim=256)
    params = dropless.init(jax.random.key(0), 256, cfg)
    base = jax.random.normal(jax.random.key(1), (6, 256, 256))
    spoiled = base.at[0, 3, 5].set(1e4)

    def quantised(w):
        changed = {**params, "experts": {**params["experts"], "gate": w}}
        return np.asarray(dropless.prepare_experts(changed, cfg).gate.q, np.float32)

    same = quantised(base) == quantised(spoiled)
    assert not same[0, :128, :128].all()
    same[0, :128, :128] = True
    assert same.all()


def test_nan_and_infinity_touch_no_other_value():
    cfg = dataclasses.replace(CONFIG, precision="fp8", expert_dim=128)
    params = dropless.init(jax.random.key(0), 128, cfg)
    w = jax.random.normal(jax.random.key(1), (6, 128, 128))
    bad = w.at[1, 2, 3].set(jnp.nan).at[1, 4, 5].set(jnp.inf)
    zeroed = w.at[1, 2, 3].set(0).at[1, 4, 5].set(0)

    def gate(w):
        changed = {**params, "experts": {**params["experts"], "gate": w}}
        return dropless.prepare_experts(changed, cfg).gate

    q, want = (np.asarray(gate(v).q, np.float32) for v in (bad, zeroed))
    assert np.isnan(q[1, 2, 3]) and np.isnan(q[1, 4, 5]) and np.isnan(q).sum() == 2
    np.testing.assert_array_equal(np.where(np.isnan(q), 0, q), want)
    np.testing.assert_array_equal(gate(bad).scale, gate(zeroed).scale)


def test_no_gradient_flows_to_prepared_experts():
    cfg = dataclasses.replace(CONFIG, precision="bf16")
    x, params, dy = oracle.layer_case(cfg, (9, 40))

    def through(params):
        ready = dropless.prepare_experts(params, cfg)
        return jnp.sum(dropless.moe(x, params, cfg, prepared=ready)[0] * dy)

    gradients = jax.jit(jax.grad(through))(params)
    plain = jax.jit(jax.grad(lambda p: jnp.sum(dropless.moe(x, p, cfg)[0] * dy)))(params)
    jax.tree.map(np.testing.assert_array_equal, gradients, plain)


def test_prepare_experts_checks_its_parameters():
    params = dropless.init(jax.random.key(0), 40, CONFIG)
    with pytest.raises(ValueError, match=r'"kernel"\] must be an array \[H, E\]'):
        dropless.prepare_experts({}, CONFIG)
    small = {"kernel": jnp.zeros((40, 5)), "bias": jnp.zeros(5), "selection_bias": jnp.zeros(5)}
    fewer = dataclasses.replace(CONFIG, num_experts=5)
    with pytest.raises(ValueError, match=r'"gate"\] must have shape \(5, 40, 136\)'):
        dropless.prepare_experts({**params, "router": small}, fewer)
    with pytest.raises(ValueError, match=r'"kernel"\] must be an array \[H, E\]'):
        dropless.prepare_experts({"router": [1]}, CONFIG)
    with pytest.raises(TypeError, match="cfg must be a dropless.MoEConfig; got NoneType"):
        dropless.prepare_experts(params, None)


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("q_t", None, r"prepared.up.q_t must be float8_e4m3fn\[.*got NoneType"),
        ("scale", jnp.ones((1, 1, 1)), r"prepared.up.scale must be float32.*float32\[1, 1, 1\]"),
        ("q", jnp.ones((1, 1, 1)), r"prepared.up.q must be float8_e4m3fn"),
    ],
)
def test_n2_damaged_prepared_experts_are_named(part, value, text):
    cfg = dropless.MoEConfig(3, 2, 136, precision="fp8")
    params = dropless.init(jax.random.key(0), 40, cfg)
    ready = dropless.prepare_experts(params, cfg)
    bad = dataclasses.replace(ready, up=dataclasses.replace(ready.up, **{part: value}))
    with pytest.raises(ValueError, match=text):
        dropless.moe(jnp.ones((4, 40)), params, cfg, prepared=bad)
