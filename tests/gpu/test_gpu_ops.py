"""Every target that has a CUDA kernel, through XLA, on the CPU and on a GPU of the same process.

One target name serves both platforms. Ids, counts, maps and the quantisers' codes and scales must
have the same bits; sums may differ in their order, so they are compared within fp32 bounds. The
tests are skipped without a GPU. Command buffers are forced on and off from outside
(tools/gpu/run.sh).
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import GPU, needs_gpu

import dropless
from dropless._call import call

pytestmark = needs_gpu

# T, E, K, H, all different, on both sides of the router's switches (16 tokens a chunk, 32 lanes).
SIZES = [(7, 5, 2, 24), (131, 60, 4, 72), (2050, 128, 8, 264)]


def on_both(function, *arguments):
    """The results of a jitted function on the CPU and on the GPU, as numpy arrays."""
    results = []
    for device in (jax.devices("cpu")[0], GPU):
        placed = jax.device_put(arguments, device)
        results.append(jax.tree.map(np.asarray, jax.jit(function)(*placed)))
    return results


def assert_same_bits(got, expected):
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert g.shape == e.shape and g.dtype == e.dtype
        assert g.tobytes() == e.tobytes()


def assert_close(got, expected, terms, roundoff=2.0**-24):
    """Error below 16 units of ``roundoff`` and an fp32 sum of ``terms``, relative to the RMS."""
    got, expected = np.float64(got), np.float64(expected)
    rms = np.sqrt(np.mean(expected**2))
    bound = 16 * roundoff * np.abs(expected) + 4 * np.sqrt(terms) * 2.0**-24 * rms
    assert np.all(np.abs(got - expected) <= bound)


def config(num_experts, k, **router):
    return dropless.MoEConfig(
        num_experts=num_experts,
        experts_per_token=k,
        expert_dim=8,
        router=dropless.RouterConfig(**router),
        precision="f32",
    )


def normal(key, shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(key), shape, jnp.float32).astype(dtype)


SCORES = ("softmax", "sigmoid", "sqrt_softplus", "identity")
ROUTERS = [
    dict(zip(("score", "score_before_topk", "renormalize", "scale"), v, strict=True))
    for v in itertools.product(SCORES, (True, False), (True, False), (1.0, 2.5))
]


def router_logits(key, shape, router, dtype=jnp.float32):
    """Normal, but positive where their sum divides: sums of either sign have few digits."""
    logits = normal(key, shape, dtype)
    if router["score"] == "identity" and router.get("renormalize", True):
        logits = jnp.abs(logits) + jnp.asarray(0.125, dtype)
    return logits


@pytest.mark.parametrize("router", ROUTERS, ids=lambda r: "_".join(str(v) for v in r.values()))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_f7_route_has_equal_ids_and_close_weights(router, dtype):
    for t, e, k, _ in SIZES:
        cfg = config(e, k, **router)
        mask = jnp.arange(t) % 3 != 1
        route = functools.partial(dropless.route, cfg=cfg, mask=mask)
        cpu, gpu = on_both(route, router_logits(0, (t, e), router, dtype))
        for name in ("ids", "counts", "offsets", "slot_of_row", "row_of_slot", "tokens"):
            assert_same_bits(getattr(gpu, name), getattr(cpu, name))
        for name in ("weights", "prob_sum", "lse_square_sum", "entropy_sum"):
            assert_close(getattr(gpu, name), getattr(cpu, name), t + e)


@pytest.mark.parametrize("router", ROUTERS, ids=lambda r: "_".join(str(v) for v in r.values()))
def test_e2_route_gradient(router):
    for t, e, k, _ in SIZES:
        cfg = config(e, k, **router)

        def gradient(logits, d_weights, d_prob, d_sums, cfg=cfg):
            def loss(logits):
                r = dropless.route(logits, cfg)
                total = jnp.sum(r.weights * d_weights) + jnp.sum(r.prob_sum * d_prob)
                return total + r.lse_square_sum * d_sums[0] + r.entropy_sum * d_sums[1]

            return jax.grad(loss)(logits)

        cpu, gpu = on_both(
            gradient,
            router_logits(1, (t, e), router),
            normal(2, (t, k)),
            normal(3, (e,)),
            normal(4, (2,)),
        )
        rms = np.sqrt(np.mean(np.float64(cpu) ** 2))
        # A softmax's gradient is a difference of sums over E terms.
        assert np.max(np.abs(gpu - cpu)) <= (32 + 8 * np.sqrt(e)) * 2.0**-24 * 8 * rms


def test_f5_biased_selection_has_equal_ids():
    grouped = {"num_groups": 4, "groups_kept": 2, "group_score_experts": 2, "group_mask": "zero"}
    for score, before, groups in itertools.product(SCORES, (True, False), ({}, grouped)):
        for t, e, k, _ in SIZES[1:] if groups else SIZES:
            cfg = config(e, k, score=score, score_before_topk=before, selection_bias=True, **groups)

            def ids(logits, bias, cfg=cfg):
                return dropless.route(logits, cfg, selection_bias=bias).ids

            cpu, gpu = on_both(ids, normal(5, (t, e)), normal(6, (e,)))
            assert_same_bits(gpu, cpu)


def test_given_experts_and_the_gradient_of_their_scale():
    for t, e, k, _ in SIZES:
        cfg = config(e, k, score="sigmoid", renormalize_eps=0.5, expert_scale=True)
        # Free, given, out of range, repeated and empty slots.
        ids = jnp.asarray(np.random.default_rng(23).integers(-2, e + 2, (t, k)), jnp.int32)

        def gradient(logits, scale, ids, d_weights, cfg=cfg):
            def loss(logits, scale):
                r = dropless.route(logits, cfg, expert_ids=ids, expert_scale=scale)
                return jnp.sum(r.weights * d_weights), r

            return jax.value_and_grad(loss, (0, 1), has_aux=True)(logits, scale)

        cpu, gpu = on_both(gradient, normal(24, (t, e)), normal(25, (e,)), ids, normal(26, (t, k)))
        (_, cpu_routing), cpu_gradients = cpu
        (_, gpu_routing), gpu_gradients = gpu
        for name in ("ids", "counts", "offsets", "slot_of_row", "row_of_slot", "tokens"):
            assert_same_bits(getattr(gpu_routing, name), getattr(cpu_routing, name))
        assert_close(gpu_routing.weights, cpu_routing.weights, k)
        for g, c in zip(gpu_gradients, cpu_gradients, strict=True):
            assert_close(g, c, t + e)


def test_f1_ids_of_logits_that_are_not_finite():
    special = np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0])
    logits = np.random.default_rng(7).choice(special, (300, 19))
    cpu, gpu = on_both(lambda x: dropless.route(x, config(19, 6)), jnp.asarray(logits))
    assert_same_bits(gpu.ids, cpu.ids)
    assert_same_bits(gpu.slot_of_row, cpu.slot_of_row)
    assert gpu.nonfinite_logits == cpu.nonfinite_logits == np.sum(~np.isfinite(logits))


def test_g1_plan_has_the_same_bits():
    rng = np.random.default_rng(8)
    for (t, e, k, _), capacity in itertools.product(SIZES, (0, 3)):
        ids = jnp.asarray(rng.integers(-2, e + 2, (t, k)), jnp.int32)
        cpu, gpu = on_both(lambda i, e=e, c=capacity: dropless.plan(i, e, capacity=c), ids)
        assert_same_bits(gpu, cpu)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_e6_permute_and_unpermute_with_gradients(dtype):
    roundoff = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-24
    for t, e, k, h in SIZES:
        ids = jnp.asarray(np.random.default_rng(9).integers(0, e, (t, k)), jnp.int32)

        def both(x, ids, weights, d_rows, d_y, e=e):
            plan = dropless.plan(ids, e)
            rows, permute_vjp = jax.vjp(lambda x: dropless.permute(x, plan), x)
            y, unpermute_vjp = jax.vjp(
                lambda rows, w: dropless.unpermute(rows, plan, w), d_rows, weights
            )
            return rows, permute_vjp(d_rows)[0], y, *unpermute_vjp(d_y)

        cpu, gpu = on_both(
            both,
            normal(10, (t, h), dtype),
            ids,
            normal(11, (t, k)),
            normal(12, (t * k, h), dtype),
            normal(13, (t, h), dtype),
        )
        assert_same_bits(gpu[0], cpu[0])
        for g, c in zip(gpu[1:], cpu[1:], strict=True):
            assert_close(g, c, max(k, h), roundoff)


def test_g3_group_sum():
    for t, e, k, h in SIZES:
        ids = jnp.asarray(np.random.default_rng(14).integers(0, e, (t, k)), jnp.int32)

        def sums(x, ids, weights, e=e, k=k, h=h):
            plan = dropless.plan(ids, e)
            return call(
                "group_sum",
                [((e, 2, h), jnp.float32)],
                [x, plan.slot_of_row, weights, plan.offsets],
                gather=1,
                experts_per_token=k,
            )[0]

        cpu, gpu = on_both(sums, normal(15, (t, 2, h), jnp.bfloat16), ids, normal(16, (t, k)))
        assert_close(gpu, cpu, t)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("h", "i"), [(72, 136), (1, 7), (64, 200), (1416, 40), (23, 1408)])
def test_a7_ragged_dot_and_its_gradients_at_any_width(h, i, dtype):
    roundoff = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-24
    sizes = jnp.asarray([130, 0, 1, 127, 29], jnp.int32)

    def both(lhs, rhs, dy):
        out, vjp = jax.vjp(lambda lhs, rhs: dropless.ragged_dot(lhs, rhs, sizes), lhs, rhs)
        return out, *vjp(dy)

    rows = 300  # 13 of no group
    cpu, gpu = on_both(
        both,
        normal(22, (rows, h), dtype),
        normal(23, (5, h, i), dtype),
        normal(24, (rows, i), dtype),
    )
    for g, c, terms in zip(gpu, cpu, (h, i, 130), strict=True):
        assert_close(g, c, terms, roundoff)
    assert not np.any(gpu[0][287:]) and not np.any(gpu[1][287:]) and not np.any(gpu[2][1])


@pytest.mark.parametrize("rounding", [0, 1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_i2_quantisers_have_the_same_bits(rounding, dtype):
    def rows(x):
        r, c = x.shape
        results = [((r, c), jnp.float8_e4m3fn), ((r, -(-c // 128)), jnp.float32)]
        return call("quantize_rows", results, [x], scale_rounding=rounding)

    def weight(w):
        e, i, o = w.shape
        ib, ob = -(-i // 128), -(-o // 128)
        f8, f32 = jnp.float8_e4m3fn, jnp.float32
        results = [((e, i, o), f8), ((e, o, i), f8), ((e, ib, ob), f32), ((e, ob, ib), f32)]
        return call("quantize_weight", results, [w], scale_rounding=rounding)

    for width in (1, 127, 128, 200, 2880):
        cpu, gpu = on_both(rows, normal(17, (33, width), dtype))
        assert_same_bits(gpu, cpu)
    for i, o in ((5, 3), (128, 256), (130, 72), (257, 129)):
        cpu, gpu = on_both(weight, normal(18, (2, i, o), dtype))
        assert_same_bits(gpu, cpu)


def test_j9_j11_a_hundred_steps_of_one_program():
    """A chain of calls long enough to be captured as one command buffer, with changing routings."""
    t, e, k, h = SIZES[2]
    cfg = config(e, k)

    @jax.jit
    def step(x, logits):
        for _ in range(4):
            routing = dropless.route(logits, cfg)
            rows = dropless.permute(x, routing)
            x = dropless.unpermute(rows, routing, routing.weights) * 1.01
            logits = logits + 0.1 * jnp.roll(logits, 1, axis=1)
        return x, logits

    def run(device):
        x, logits = jax.device_put((normal(19, (t, h)), normal(20, (t, e))), device)
        for _ in range(100):
            x, logits = step(x, jnp.tanh(logits))
        return np.asarray(x), np.asarray(logits)

    first = run(GPU)
    assert_same_bits(run(GPU), first)
    x = first[0]
    assert np.all(np.isfinite(x)) and np.any(x != 0)


def test_m_cpu_and_gpu_share_one_program_text():
    """`jit(device=cpu)` in a GPU process runs the CPU's handler of the same target."""
    t, e, k, _ = SIZES[1]
    logits = normal(21, (t, e))
    route = jax.jit(lambda x: dropless.route(x, config(e, k)).ids)
    texts = []
    for device in (jax.devices("cpu")[0], GPU):
        texts.append(route.lower(jax.device_put(logits, device)).as_text())
    targets = [sorted({w for w in text.split() if "dropless_" in w}) for text in texts]
    assert targets[0] == targets[1] and any("dropless_route_c" in w for w in targets[0])
