"""SparseMixer's routing: the experts it draws, their weights, and the estimate of the gradient."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dropless
import oracle
from dropless._sparse_mixer import draws

E, T, EPS = 12, 300, 0.3  # wide, so that several logits are near
CONFIG = dropless.MoEConfig(
    E, 2, 6, router=dropless.RouterConfig(sparse_mixer_eps=EPS), precision="f32"
)


def near(z, closed):
    """Experts within reach of the largest open logit (arXiv 2409.12136, section 3.3)."""
    best = max(v for e, v in enumerate(z) if e not in closed)
    return [
        e for e, v in enumerate(z) if e not in closed and best - v <= 2 * EPS * max(abs(v), best)
    ]


def one_token(z, exponential, uniform):
    """Ids, weights and d weights / d z of one token, from the definitions, in float64."""
    closed, ids, weights, jacobian = [], [], [], []
    for choice in range(2):
        reach = near(z, closed)
        shares = np.zeros(E)
        shares[reach] = np.exp(z[reach])
        shares /= shares.sum()
        # Gumbel: the largest of z - log(exponential) is a draw from the softmax of z.
        winner = max(reach, key=lambda e: z[e] - np.log(exponential[choice, e]))
        best = max(reach, key=lambda e: z[e])
        whole = winner == best or uniform[choice] > 0.75
        weights.append(shares[winner] * (1.0 if whole else 0.3333))
        jacobian.append(shares[winner] * (np.eye(E)[winner] - shares))
        ids.append(winner)
        closed.append(winner)
    return ids, weights, np.array(jacobian)


def test_draws_weights_and_the_estimate_of_the_gradient_follow_the_paper():
    rng = np.random.default_rng(0)
    z = (2 * rng.standard_normal((T, E))).astype(np.float32)
    dw = rng.standard_normal((T, 2)).astype(np.float32)
    key = jax.random.key(3)

    def total(z):
        routing = dropless.route(z, CONFIG, sampling_key=key)
        return jnp.sum(routing.weights * dw), routing

    (_, routing), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(z)
    drawn = jax.tree.map(lambda a: np.asarray(a, np.float64), draws(key, T, E))
    want = [
        one_token(row, drawn.exponential[:, t], drawn.uniform[:, t])
        for t, row in enumerate(z.astype(np.float64))
    ]
    ids, weights, jacobians = (np.array(a) for a in zip(*want, strict=True))
    np.testing.assert_array_equal(routing.ids, ids)
    limit = oracle.bound("f32", E, 8)
    oracle.assert_close("weights", routing.weights, weights, limit)
    oracle.assert_close("gradient", gradient, np.einsum("tk,tke->te", dw, jacobians), limit)
    # All of it happened: winners that were not the largest, with a third and the whole of a weight.
    behind = ids[:, 0] != z.argmax(1)
    thirds = behind & (drawn.uniform[0] <= 0.75)
    assert 0.1 < behind.mean() < 0.9 and 0 < thirds.sum() < behind.sum()


def test_first_winners_are_as_frequent_as_their_softmax_says():
    z = np.float32([2.0, 1.9, 1.5, -3.0] + [-4.0] * (E - 4))
    tokens = 20_000
    routing = dropless.route(jnp.tile(z, (tokens, 1)), CONFIG, sampling_key=jax.random.key(1))
    shares = np.exp(z[:3]) / np.exp(z[:3]).sum()
    counts = np.bincount(np.asarray(routing.ids)[:, 0], minlength=E)
    assert not counts[3:].any()
    # Five standard deviations of a binomial distribution.
    sigma = np.sqrt(tokens * shares * (1 - shares))
    assert (np.abs(counts[:3] - tokens * shares) < 5 * sigma).all()


def test_f1_two_experts_that_differ_for_any_logits():
    rows = [[v] * E for v in (np.nan, -np.inf, np.inf, 0.0, 3e38, -3e38)]
    rows += [[np.nan, np.inf, -np.inf, 1.0] * 3, [np.inf, np.inf] + [np.nan] * (E - 2)]
    logits = jnp.asarray(rows, jnp.float32)
    for key in (None, jax.random.key(0)):
        ids = np.asarray(dropless.route(logits, CONFIG, sampling_key=key).ids)
        assert (ids >= 0).all() and (ids < E).all() and (ids[:, 0] != ids[:, 1]).all()


def test_the_layer_draws_where_it_gets_a_key_each_device_its_own():
    x, params, dy = oracle.layer_case(CONFIG, (16, 20))

    @jax.jit
    def run(x, params, key):
        def value(params):
            y, aux = dropless.moe(x, params, CONFIG, jitter_key=key)
            return jnp.sum(y * dy), (y, aux)

        (_, outputs), gradient = jax.value_and_grad(value, has_aux=True)(params)
        return *outputs, gradient

    still = run(x, params, None)
    one, again, two = (run(x, params, jax.random.key(seed)) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    for a, b in ((one, still), (one, two)):
        assert (np.asarray(a[1].expert_counts) != np.asarray(b[1].expert_counts)).any()
    # The layer's draws are those of ``route`` with the key's first fold.
    logits = x @ params["router"]["kernel"]
    routing = dropless.route(logits, CONFIG, sampling_key=jax.random.fold_in(jax.random.key(0), 1))
    np.testing.assert_array_equal(one[1].expert_counts, routing.counts)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        same = jnp.tile(x[:8], (2, 1))
        split = jax.device_put(same, NamedSharding(mesh, P("data")))
        y, aux = jax.jit(lambda x, p, k: dropless.moe(x, p, CONFIG, jitter_key=k))(
            split, jax.device_put(params, NamedSharding(mesh, P())), jax.random.key(0)
        )
    y = np.asarray(y)
    assert int(aux.tokens) == 16 and (y[:8] != y[8:]).any()


def test_a_key_without_sparse_mixer_is_refused():
    cfg = dropless.MoEConfig(E, 2)
    with pytest.raises(ValueError, match="sampling_key must be None without .*sparse_mixer_eps"):
        dropless.route(jnp.zeros((3, E)), cfg, sampling_key=jax.random.key(0))


def test_sparse_mixer_keeps_padding_out_and_its_options_to_itself():
    cfg = CONFIG
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((5, E)), jnp.float32)
    mask = jnp.array([1, 1, 0, 1, 1])
    logits = logits.at[2].set(jnp.nan)

    def total(z):
        return dropless.route(z, cfg, mask=mask).weights.sum()

    gradient = np.asarray(jax.grad(total)(logits))
    assert np.isfinite(gradient).all() and not gradient[2].any() and gradient.any()
    for options, text in (
        ({"score": "sigmoid"}, "excludes score"),
        ({"num_groups": 2}, "excludes num_groups"),
        ({"sparse_mixer_eps": 0.0}, "sparse_mixer_eps must be a finite number > 0"),
    ):
        with pytest.raises(ValueError, match=text):
            dropless.RouterConfig(**{"sparse_mixer_eps": 0.01, **options})
    with pytest.raises(ValueError, match="experts_per_token=2; got 3"):
        dataclasses.replace(cfg, experts_per_token=3)
    with pytest.raises(ValueError, match="expert_ids must be None"):
        dropless.route(logits, cfg, expert_ids=jnp.zeros((5, 2), jnp.int32))
