"""The router's menu in the layer: given experts, tables, jitter, losses and the selection bias."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dropless
import oracle

E, K, H, I = 8, 3, 24, 20  # noqa: E741
SHAPE = (4, 10, H)


def config(**router):
    return dropless.MoEConfig(E, K, I, router=dropless.RouterConfig(**router), precision="f32")


def case(cfg, seed=0):
    return oracle.layer_case(cfg, SHAPE, seed=seed)


ROUTERS = {
    "deepseek_v2": {
        "renormalize": False, "num_groups": 4, "groups_kept": 2, "group_mask": "zero",
        "scale": 16.0,
    },
    "deepseek_v3": {
        "score": "sigmoid", "selection_bias": True, "num_groups": 4, "groups_kept": 2,
        "group_score_experts": 2, "group_mask": "zero", "renormalize_eps": 1e-20, "scale": 2.5,
    },
    "deepseek_v4": {"score": "sqrt_softplus", "selection_bias": True, "scale": 1.5},
    "ernie": {"selection_bias": True, "renormalize_eps": 1e-12, "renormalize_clamp": True},
    "gemma": {"expert_scale": True},
    "gpt_oss": {"score_before_topk": False, "renormalize": False, "bias": True},
}  # fmt: skip


@pytest.mark.parametrize("family", ROUTERS)
def test_families_in_the_whole_layer_by_oracle_and_finite_differences(family):
    cfg = config(**ROUTERS[family])
    x, params, dy = case(cfg)
    mask = jnp.arange(40).reshape(4, 10) % 6 != 1
    coefficients = (0.3, 0.02, -0.1)

    def scalar(x, params):
        outputs = dropless.moe(x, params, cfg, mask=mask)
        return oracle.objective(outputs, dy, coefficients), outputs

    (_, (y, aux)), gradients = jax.jit(
        jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True),
        compiler_options=oracle.COMPILE_FAST,
    )(x, params)
    (want_y, want_aux), want = oracle.value_and_gradients(cfg, x, params, mask, dy, coefficients)
    limit = oracle.bound("f32", H * I, 20)
    oracle.assert_close("y", y, want_y, limit)
    np.testing.assert_array_equal(aux.expert_counts, want_aux["expert_counts"])
    for name in oracle.LOSSES:
        assert float(getattr(aux, name)) == pytest.approx(float(want_aux[name]), rel=1e-5)
    for (path, got), (_, expected) in zip(
        oracle.leaves(gradients), oracle.leaves(want), strict=True
    ):
        oracle.assert_close(path, got, expected, limit)
    oracle.assert_slopes(cfg, gradients, x, params, mask, dy, coefficients, limit)


def test_replayed_experts_give_the_same_layer():
    cfg = config(score="sigmoid")
    x, params, dy = case(cfg)
    logits = x.reshape(-1, H) @ params["router"]["kernel"]
    ids = dropless.route(logits, cfg).ids.reshape(4, 10, K)

    def value(params, **given):
        y, aux = dropless.moe(x, params, cfg, **given)
        return jnp.sum(y * dy), aux

    free = jax.value_and_grad(value, has_aux=True)(params)
    replay = jax.value_and_grad(value, has_aux=True)(params, expert_ids=ids)
    jax.tree.map(np.testing.assert_array_equal, replay, free)
    # Other decisions are followed, wherever the logits point.
    moved = (ids + 1) % E
    _, aux = dropless.moe(x, params, cfg, expert_ids=moved)
    np.testing.assert_array_equal(aux.expert_counts, np.bincount(np.ravel(moved), minlength=E))
    with pytest.raises(ValueError, match=r"expert_ids must be integers .* \(4, 10, 3\); got int32"):
        dropless.moe(x, params, cfg, expert_ids=ids[0])


def test_a_table_says_which_experts_serve_a_token():
    cfg = config(expert_table=7, score="sqrt_softplus")
    x, params, dy = case(cfg)
    rng = np.random.default_rng(5)
    table = np.argsort(rng.standard_normal((7, E)), axis=1)[:, :K]
    params["router"]["expert_table"] = jnp.asarray(table, jnp.float32)
    token_ids = jnp.asarray(rng.integers(0, 7, SHAPE[:2]), jnp.int32)

    def value(params, cfg, **given):
        return jnp.sum(dropless.moe(x, params, cfg, **given)[0] * dy)

    got = jax.value_and_grad(value)(params, cfg, token_ids=token_ids)
    assert not np.asarray(got[1]["router"].pop("expert_table")).any()
    plain = {**params, "router": {"kernel": params["router"]["kernel"]}}
    without = dataclasses.replace(cfg, router=dropless.RouterConfig(score="sqrt_softplus"))
    want = jax.value_and_grad(value)(plain, without, expert_ids=jnp.asarray(table)[token_ids])
    jax.tree.map(np.testing.assert_array_equal, got, want)
    # Numbers outside the vocabulary are padding.
    _, aux = dropless.moe(x, params, cfg, token_ids=token_ids.at[1, 2:5].set(7))
    assert int(aux.tokens) == 37
    with pytest.raises(ValueError, match=r"token_ids must be given exactly if"):
        dropless.moe(x, params, cfg)
    mask = dropless.trainable_mask(params)
    assert mask["router"] == {"kernel": True, "expert_table": False}


def test_fresh_tables_use_every_expert_equally():
    cfg = config(expert_table=16)
    table = dropless.init(jax.random.key(0), H, cfg)["router"]["expert_table"]
    assert all(len(set(row)) == K for row in table.tolist())
    assert set(np.bincount(np.ravel(table).astype(int), minlength=E)) == {6}


def test_jitter_is_noise_on_x_for_router_and_experts_and_needs_a_key():
    cfg = config(jitter=0.25)
    x, params, dy = case(cfg)
    still, _ = dropless.moe(x, params, cfg)
    np.testing.assert_array_equal(still, dropless.moe(x, params, config())[0])
    key = jax.random.key(3)
    noise = jax.random.uniform(key, x.shape, jnp.float32, 0.75, 1.25)

    def jittered(x):
        return jnp.sum(dropless.moe(x, params, cfg, jitter_key=key)[0] * dy)

    def by_hand(x):
        return jnp.sum(dropless.moe(x * noise, params, config())[0] * dy)

    got, want = jax.value_and_grad(jittered)(x), jax.value_and_grad(by_hand)(x)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    oracle.assert_close("dx", got[1], want[1], oracle.bound("f32", H, 4))
    other, _ = dropless.moe(x, params, cfg, jitter_key=jax.random.key(4))
    assert (np.asarray(other) != np.asarray(still)).any()


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_sequence_loss_is_the_mean_of_each_sequence_alone(score):
    cfg = config(score=score, balance_loss="sequence")
    each = config(score=score)
    x, params, _ = case(cfg)
    mask = np.arange(40).reshape(4, 10) % 7 != 3
    mask[2] = False  # a sequence of padding counts nowhere

    def sequences(x, params):
        return dropless.moe(x, params, cfg, mask=mask)[1].load_balance_loss

    def one_by_one(x, params):
        parts = [
            dropless.moe(x[i], params, each, mask=mask[i])[1].load_balance_loss for i in (0, 1, 3)
        ]
        return sum(parts) / 3

    got = jax.value_and_grad(sequences, (0, 1))(x, params)
    want = jax.value_and_grad(one_by_one, (0, 1))(x, params)
    assert float(got[0]) == pytest.approx(float(want[0]), rel=1e-5)
    oracle.assert_close("dx", got[1][0], want[1][0], oracle.bound("f32", H * 40, 12))
    kernels = [g[1][1]["router"]["kernel"] for g in (got, want)]
    oracle.assert_close("kernel", *kernels, oracle.bound("f32", H * 40, 12))
    _, empty = dropless.moe(x, params, cfg, mask=np.zeros((4, 10), bool))
    assert float(empty.load_balance_loss) == 0.0


def test_aux_sums_of_microbatches_make_the_loss_of_the_batch():
    cfg = config()
    x, params, _ = case(cfg)
    whole = dropless.moe(x, params, cfg)[1]
    parts = [dropless.moe(part, params, cfg)[1] for part in (x[:1], x[1:])]
    counts, prob_sum, tokens = (
        sum(getattr(p, name) for p in parts) for name in ("expert_counts", "prob_sum", "tokens")
    )
    loss = dropless.load_balance_loss(counts, prob_sum, tokens, K)
    assert float(loss) == pytest.approx(float(whole.load_balance_loss), rel=1e-6)


def test_h7_nnx_layer_updates_its_selection_bias_and_optimisers_do_not():
    router = dropless.RouterConfig(score="sigmoid", selection_bias=True)
    layer = dropless.MoELayer(E, experts_per_token=K, expert_dim=I, model_dim=H, router=router)
    x = case(config())[0]
    optimizer = nnx.Optimizer(layer, optax.adamw(1e-2, weight_decay=0.1), wrt=nnx.Param)
    start = jnp.linspace(-0.1, 0.1, E)
    layer.router["selection_bias"].set_value(start)

    @nnx.jit
    def step(layer, optimizer):
        gradients = nnx.grad(lambda layer: jnp.mean(layer(x) ** 2))(layer)
        optimizer.update(layer, gradients)

    step(layer, optimizer)
    np.testing.assert_array_equal(layer.router["selection_bias"].get_value(), start)
    layer(x)
    counts = np.asarray(layer.aux.expert_counts)
    layer.update_selection_bias(rate=0.5)
    want = start + np.float32(0.5) * np.sign(counts.mean() - counts).astype(np.float32)
    np.testing.assert_array_equal(layer.router["selection_bias"].get_value(), want)
    with pytest.raises(ValueError, match=r"the layer has no selection bias"):
        dropless.MoELayer(E, model_dim=H).update_selection_bias()


def test_h7_linen_layer_updates_its_selection_bias():
    router = dropless.RouterConfig(score="sigmoid", selection_bias=True)

    class Model(linen.Module):
        def setup(self):
            self.moe = dropless.linen.MoELayer(E, K, I, router=router)

        def __call__(self, x):
            return self.moe(x, return_aux=True)

        def balance(self, counts):
            self.moe.update_selection_bias(counts, rate=0.5)

    model, x = Model(), case(config())[0]
    variables = model.init(jax.random.key(0), x)
    _, aux = model.apply(variables, x)
    counts = np.asarray(aux.expert_counts)
    _, state = model.apply(variables, counts, method="balance", mutable=["router_state"])
    want = np.float32(0.5) * np.sign(counts.mean() - counts).astype(np.float32)
    np.testing.assert_array_equal(state["router_state"]["moe"]["selection_bias"], want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 3}, r"num_groups must divide num_experts; got num_groups=3"),
        ({"num_groups": 4, "groups_kept": 5}, r"groups_kept must be at most num_groups; got .*=5"),
        ({"num_groups": 4}, r"kept groups must hold .* groups_kept=1 groups of 2 and .*token=3"),
        (
            {"num_groups": 4, "groups_kept": 2, "group_score_experts": 3},
            r"group_score_experts must be at most the 2 experts of a group; got 3",
        ),
        ({"group_mask": "none"}, r"group_mask must be one of '-inf', 'zero'; got 'none'"),
        ({"score": "tanh"}, r"score must be one of 'softmax', .*'identity'; got 'tanh'"),
        ({"jitter": 1.5}, r"jitter must be from 0 to 1; got 1.5"),
        ({"expert_table": 0}, r"expert_table must be an int >= 1; got 0"),
    ],
)
def test_n2_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_h10_on_a_mesh_that_cuts_batch_and_sequences(kind):
    """Sequence losses, tables and scales are those of one device; noise is drawn by each device."""
    cfg = config(expert_table=7, expert_scale=True, balance_loss="sequence", jitter=0.1)
    x, params, dy = oracle.layer_case(cfg, (8, 6, H))
    rng = np.random.default_rng(6)
    table = np.argsort(rng.standard_normal((7, E)), axis=1)[:, :K]
    params["router"]["expert_table"] = jnp.asarray(table, jnp.float32)
    token_ids = jnp.asarray(rng.integers(0, 8, (8, 6)), jnp.int32)  # 7 is padding
    mask = jnp.arange(48).reshape(8, 6) % 5 != 2

    def scalar(x, params, token_ids, mask, dy, key=None):
        options = {"token_ids": token_ids, "mask": mask, "jitter_key": key}
        y, aux = dropless.moe(x, params, cfg, **options)
        return jnp.sum(y * dy) + 3 * aux.load_balance_loss, (y, aux)

    function = jax.jit(jax.value_and_grad(scalar, (0, 1), has_aux=True))
    arguments = (x, params, token_ids, mask, dy)
    want = function(*arguments)
    # On Auto axes `token_axes` splits the batch alone.
    spec = P("data", "model") if kind == AxisType.Explicit else P("data")
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        place = lambda a: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
        x, token_ids, mask, dy = map(place, (x, token_ids, mask, dy))
        params = jax.device_put(params, NamedSharding(mesh, P()))
        got = function(x, params, token_ids, mask, dy)
        (_, (noisy, aux)), _ = function(x, params, token_ids, mask, dy, jax.random.key(1))
    (_, (y, got_aux)), gradients = jax.tree.map(np.asarray, got)
    (_, (want_y, want_aux)), wanted = want
    limit = oracle.bound("f32", H * 48, 12)
    oracle.assert_close("y", y, want_y, limit)
    for name in ("expert_counts", "tokens", "dropped_tokens"):
        np.testing.assert_array_equal(getattr(got_aux, name), getattr(want_aux, name))
    for name in ("load_balance_loss", "z_loss", "router_entropy"):
        assert float(getattr(got_aux, name)) == pytest.approx(float(getattr(want_aux, name)), 1e-5)
    for (path, a), (_, b) in zip(oracle.leaves(gradients), oracle.leaves(wanted), strict=True):
        oracle.assert_close(path, a, b, limit)
    np.testing.assert_array_equal(aux.expert_counts, want_aux.expert_counts)  # the table's still
    assert np.isfinite(noisy).all() and (np.asarray(noisy) != y).any()


def test_h7_counts_of_several_devices_are_added():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    counts = jnp.asarray(np.random.default_rng(7).integers(0, 50, (4, E)), jnp.int32)
    bias = jnp.linspace(-1, 1, E)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def update(bias, counts):
        return dropless.update_selection_bias(bias, counts[0], axis_name="data")

    want = dropless.update_selection_bias(bias, counts.sum(0))
    np.testing.assert_array_equal(update(bias, counts), want)
