"""What went wrong elsewhere with balance losses, activations and checkpoints of model families."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dropless
import oracle

H, I, E, K = 12, 10, 8, 2  # noqa: E741


def biased(**options):
    router = dropless.RouterConfig(score="sigmoid", selection_bias=True, **options)
    return dropless.MoEConfig(E, K, I, router=router, precision="f32")


@pytest.mark.parametrize("sequence", [False, True])
def test_h5_losses_and_their_gradients_are_the_same_under_checkpoint_and_scan(sequence):
    cfg = biased(balance_loss="sequence" if sequence else "batch")
    x, params, _ = oracle.layer_case(cfg, (3, 7, H))

    def losses(x, kernel, wrap):
        def block(kernel, x):
            return dropless.moe(x, params | {"router": params["router"] | {"kernel": kernel}}, cfg)

        if wrap == "scan":
            _, aux = jax.lax.scan(lambda c, p: (c, block(p, x)[1]), 0, kernel[None])
            aux = jax.tree.map(lambda a: a[0], aux)
        else:
            _, aux = (jax.checkpoint(block) if wrap == "checkpoint" else block)(kernel, x)
        total = aux.load_balance_loss + 0.1 * aux.z_loss - 0.2 * aux.router_entropy
        return total, (aux.load_balance_loss, aux.z_loss, aux.expert_counts)

    def run(wrap):
        function = jax.value_and_grad(lambda x, k: losses(x, k, wrap), (0, 1), has_aux=True)
        return jax.jit(function)(x, params["router"]["kernel"])

    plain = run("plain")
    for wrap in ("checkpoint", "scan"):
        got = run(wrap)
        np.testing.assert_array_equal(got[0][1][2], plain[0][1][2])
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_h1_three_quarters_padding_leave_the_bias_step_as_it_is():
    cfg = biased()
    x, params, _ = oracle.layer_case(cfg, (40, H))
    mask = np.arange(40) % 4 == 1
    _, padded = dropless.moe(x, params, cfg, mask=mask)
    _, alone = dropless.moe(x[mask], params, cfg)
    bias = params["router"]["selection_bias"]
    steps = [dropless.update_selection_bias(bias, a.expert_counts) for a in (padded, alone)]
    np.testing.assert_array_equal(*steps)
    assert (np.asarray(steps[0]) != np.asarray(bias)).any()


def test_h7_both_layers_update_by_the_counts_of_all_data_shards():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(1)
    counts = jnp.asarray(rng.integers(0, 50, (4, E)), jnp.int32)
    bias = jnp.asarray(rng.standard_normal(E), jnp.float32)
    want = dropless.update_selection_bias(bias, counts.sum(0), rate=0.25)
    # On one shard's counts alone the step is another, on every shard.
    assert all(
        (np.asarray(dropless.update_selection_bias(bias, c, rate=0.25)) != want).any()
        for c in counts
    )
    router = biased().router
    layer = dropless.MoELayer(E, experts_per_token=K, expert_dim=I, model_dim=H, router=router)
    layer.router["selection_bias"].set_value(bias)
    graph, state = nnx.split(layer)

    def nnx_update(state, counts):
        layer = nnx.merge(graph, state)
        layer.update_selection_bias(counts[0], rate=0.25, axis_name="data")
        return layer.router["selection_bias"].get_value()

    linen_layer = dropless.linen.MoELayer(E, K, I, router=router)
    variables = linen_layer.init(jax.random.key(0), jnp.zeros((2, H)))
    variables = variables | {"router_state": {"selection_bias": bias}}

    def linen_update(variables, counts):
        _, changed = linen_layer.apply(
            variables, counts[0], rate=0.25, axis_name="data",
            method="update_selection_bias", mutable=["router_state"],
        )  # fmt: skip
        return changed["router_state"]["selection_bias"]

    for update, held in (nnx_update, state), (linen_update, variables):
        on_mesh = jax.shard_map(update, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        np.testing.assert_array_equal(jax.jit(on_mesh)(held, counts), want)


VARIANTS = {
    "gpt_oss": dropless.Activation(
        "silu", slope=1.702, gate_limit=7.0, up_limit=7.0, up_offset=1.0
    ),
    "deepseek_v4": dropless.Activation("silu", gate_limit=10.0, up_limit=10.0),
    "gelu_clamped": dropless.Activation("gelu_tanh", gate_limit=1.5, up_limit=0.5, up_offset=-0.25),
    "relu_squared": dropless.Activation("relu_squared", gated=False, gate_limit=2.0),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_n5_clamped_activations_at_beside_and_beyond_their_limits(variant):
    """Pre-activations are the weights themselves, so that limits are met exactly."""
    activation = VARIANTS[variant]
    limits = [n for n in (activation.gate_limit, activation.up_limit) if n is not None]
    edges = [s * np.nextafter(np.float32(n), np.float32(d)) for n in limits for s in (1, -1)
             for d in (0, 1e9)] + [s * n for n in limits for s in (1, -1)]  # fmt: skip
    values = np.float32([*edges, 0.0, 0.3, -0.7, 1.1, 20.0, -20.0])
    width = len(values)
    cfg = dropless.MoEConfig(1, 1, width**2, activation=activation, precision="f32")
    gate, up = (a.reshape(1, 1, -1) for a in np.meshgrid(values, values))
    rng = np.random.default_rng(2)
    down = rng.uniform(0.5, 2, (1, width**2, 1)).astype(np.float32)
    experts = {"gate": gate, "up": up, "down": down}
    if not activation.gated:
        del experts["up"]
    params = {
        "router": {"kernel": jnp.zeros((1, 1))},
        "experts": jax.tree.map(jnp.asarray, experts),
    }

    def layer(experts):
        return dropless.moe(jnp.ones((1, 1)), params | {"experts": experts}, cfg)[0][0, 0]

    got = jax.jit(jax.grad(layer))(params["experts"])
    y = layer(params["experts"])

    def formula(gate, up, down):
        g = gate if activation.gate_limit is None else jnp.where(
            gate > activation.gate_limit, activation.gate_limit, gate)  # fmt: skip
        a = oracle.activation(activation.kind, g, activation.slope)
        if activation.gated:
            limit = activation.up_limit
            u = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
            a = a * (u + activation.up_offset)
        return jnp.sum(a * down[..., 0])

    with jax.enable_x64(True):
        wide = oracle.to64((gate, up, down))
        want_y, want = jax.value_and_grad(formula, (0, 1, 2))(*wide)
        want_y, want = jax.tree.map(np.asarray, (want_y, want))
    limit = oracle.bound("f32", width**2, 8)
    oracle.assert_close("y", y, want_y, limit)
    for name, wanted in zip(("gate", "up", "down"), want, strict=True):
        if name in experts:
            oracle.assert_close(name, got[name], wanted, limit)
    beyond = gate > activation.gate_limit
    assert beyond.any() and not np.asarray(got["gate"])[beyond].any()
    if activation.gated:
        beyond = np.abs(up) > activation.up_limit
        assert beyond.any() and not np.asarray(got["up"])[beyond].any()


CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": H,
    "moe_intermediate_size": I,
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "n_shared_experts": 1,
}


def block_tensors(layout, dtype=np.float32):
    cfg, _ = dropless.models.block_config(CONFIG)
    _, params, _ = oracle.layer_case(cfg, (1, H))
    params = jax.tree.map(lambda a: np.asarray(a, dtype), params)
    bias = np.random.default_rng(3).standard_normal(E).astype(np.float32)
    params["router"]["selection_bias"] = bias
    return cfg, params, dropless.models.to_hf(cfg, params, CONFIG, layout=layout)


@pytest.mark.parametrize("layout", ["fused", "per_expert"])
def test_o3_experts_that_are_split_over_devices_are_written_whole(layout):
    """Saved from four devices, read on one and on two: every expert is there, in its place."""
    cfg, params, want = block_tensors(layout)
    for devices in (4, 2, 1):
        mesh = jax.make_mesh((devices,), ("expert",), axis_types=(AxisType.Auto,))
        split = {
            group: jax.device_put(
                leaves, NamedSharding(mesh, P("expert") if group == "experts" else P())
            )
            for group, leaves in params.items()
        }
        written = dropless.models.to_hf(cfg, split, CONFIG, layout=layout)
        assert written.keys() == want.keys()
        for name, tensor in want.items():
            assert np.asarray(written[name]).tobytes() == tensor.tobytes(), name
        _, read = dropless.models.from_hf(CONFIG, written)
        jax.tree.map(np.testing.assert_array_equal, read, params)


@pytest.mark.parametrize("layout", ["fused", "per_expert"])
def test_o5_the_selection_bias_survives_in_float32_beside_bfloat16_weights(layout):
    cfg, params, tensors = block_tensors(layout, ml_dtypes.bfloat16)
    stored = tensors["gate.e_score_correction_bias"]
    assert stored.dtype == np.float32 and stored.all()
    np.testing.assert_array_equal(stored, params["router"]["selection_bias"])
    _, read = dropless.models.from_hf(CONFIG, tensors)
    assert read["router"]["selection_bias"].tobytes() == stored.tobytes()
    assert read["router"]["kernel"].dtype == ml_dtypes.bfloat16
    # And it decides: with it the layer chooses other experts than without.
    x = jnp.asarray(np.random.default_rng(4).standard_normal((20, H)), jnp.float32)
    cfg = dataclasses.replace(cfg, precision="f32")
    flat = read | {"router": read["router"] | {"selection_bias": np.zeros(E, np.float32)}}
    counts = [
        dropless.moe(x, jax.tree.map(jnp.asarray, p), cfg)[1].expert_counts for p in (read, flat)
    ]
    assert (np.asarray(counts[0]) != np.asarray(counts[1])).any()
