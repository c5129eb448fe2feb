"""The whole layer in FP8 on Hopper: against the float64 oracle and the CPU's emulation.

The tests are skipped without a Hopper GPU. Command buffers are forced on and off from outside
(tools/gpu/run.sh).
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu_layer import COEFFICIENTS, GPU, gradients

import dropless

sys.path.append(str(Path(__file__).parent.parent / "python"))
import oracle

pytestmark = pytest.mark.skipif(
    GPU is None or GPU.compute_capability != "9.0", reason="no Hopper GPU"
)
CPU = jax.devices("cpu")[0]
FP8_WGRAD = {"wgrad_precision": "fp8"}
GPT_OSS = dropless.Activation("silu", slope=1.702, gate_limit=1.5, up_limit=1.25, up_offset=1.0)
NOT_GATED = dropless.Activation("relu_squared", gated=False)

# E, K, I; options; T, H.
CASES = {
    "mixtral": ((8, 2, 144), {}, (197, 272)),
    "mixtral_wgrad": ((8, 2, 144), FP8_WGRAD, (197, 272)),
    "many_small_experts": ((60, 7, 128), {"scale_rounding": "pow2"}, (512, 256)),
    "many_wgrad_pow2": ((60, 7, 80), {**FP8_WGRAD, "scale_rounding": "pow2"}, (512, 208)),
    "save_h": ((12, 3, 400), {"save_h": "fp8"}, (259, 144)),
    "save_h_all_pow2": (
        (12, 3, 144),
        {"save_h": "fp8", **FP8_WGRAD, "scale_rounding": "pow2"},
        (259, 400),
    ),
    "biases_gelu": ((12, 4, 96), {"expert_bias": True, "activation": "gelu"}, (301, 128)),
    "gelu_tanh": ((24, 6, 48), {"activation": "gelu_tanh"}, (259, 80)),
    "odd_widths": ((10, 3, 67), {"expert_bias": True}, (203, 129)),
    "even_widths_all": ((9, 2, 130), {"save_h": "fp8", **FP8_WGRAD}, (149, 74)),
    "narrow": ((4, 2, 7), {}, (260, 9)),
    "one_expert": ((1, 1, 128), {}, (130, 64)),
    "gpt_oss": ((8, 4, 144), {"activation": GPT_OSS, "expert_bias": True}, (197, 176)),
    # Powers of two: the codes of h are exact in bfloat16. Otherwise one more rounding than the
    # emulation's moves h over a limit here and there.
    "gpt_oss_odd_save_h_pow2": (
        (8, 4, 70),
        {"activation": GPT_OSS, "save_h": "fp8", "scale_rounding": "pow2"},
        (197, 90),
    ),
    "relu": ((8, 2, 144), {"activation": "relu"}, (197, 176)),
    "not_gated": ((8, 2, 144), {"activation": NOT_GATED, **FP8_WGRAD}, (197, 176)),
    "bf16_save_h": ((8, 2, 144), {"precision": "bf16", "save_h": "fp8"}, (197, 176)),
}
ROUTINGS = ("free", "one_expert_takes_all", "half_idle")


def case(name, routing="free"):
    sizes, options, shape = CASES[name]
    cfg = dropless.MoEConfig(
        *sizes,
        router=dropless.RouterConfig(bias=routing != "free"),
        strict=True,
        **{"precision": "fp8", **options},
    )
    with jax.default_device(CPU):
        x, params, dy = oracle.layer_case(cfg, shape, jnp.bfloat16, jnp.float32)
        if routing != "free":
            far = np.zeros(cfg.num_experts)
            if routing == "half_idle":
                far[::2] = -1e4
            else:
                far[1] = 40  # the others' scores are still float32 numbers
            params["router"]["bias"] = jnp.asarray(far, jnp.float32)
    return cfg, x, params, dy


def check(cfg, x, params, dy):
    """y, dx and every parameter's gradient against float64, and against the CPU's emulation.

    Where an activation has a kink, an error of h changes a gradient by all of it: only the
    emulation, which has nearly the same h, is close then.
    """
    smooth = cfg.glu.kind != "relu" and cfg.glu.gate_limit is None
    with jax.default_device(CPU):
        (y_want, aux_want), (dx_want, dparams_want) = oracle.value_and_gradients(
            cfg, x, params, None, dy, COEFFICIENTS
        )
    step, results = gradients(cfg), []
    for device in (GPU, CPU):
        (_, (y, aux)), (dx, dparams) = step(*jax.device_put((x, params, dy), device))
        np.testing.assert_array_equal(aux.expert_counts, aux_want["expert_counts"])
        results.append([("y", y), ("dx", dx), *oracle.leaves(dparams)])
    wanted = [y_want, dx_want, *(leaf for _, leaf in oracle.leaves(dparams_want))]
    length = max(*x.shape, cfg.expert_dim)
    for (path, got), (_, emulated), want in zip(*results, wanted, strict=True):
        roundings = (7, oracle.FP8_FORWARD) if path == "y" else (14, oracle.FP8_BACKWARD)
        bound = oracle.bound("fp8", length, roundings[0], fp8=roundings[1])
        if smooth or path == "y":
            oracle.assert_close(path, got, want, bound, groups=np.ndim(got) == 3)
        # Both have the same codes until a sum's last bits flip one, by a whole step, sqrt(12) times
        # the rounding error: a quarter of the error above is one code in 192.
        difference = oracle.rms(np.float64(got) - np.float64(emulated))
        limit = bound / 4 * max(oracle.rms(emulated), 1e-30)
        assert difference <= limit, f"{path}: {difference:.2e} from the emulation, {limit:.2e}"


@pytest.mark.parametrize("name", CASES)
def test_layer_matches_float64_and_the_emulation(name):
    check(*case(name))


@pytest.mark.parametrize("routing", ROUTINGS[1:])
@pytest.mark.parametrize("name", ["mixtral_wgrad", "save_h_all_pow2", "gpt_oss"])
def test_c_adversarial_routings(name, routing):
    cfg, x, params, dy = case(name, routing)
    check(cfg, x, params, dy)
    if routing == "half_idle":
        _, (_, dparams) = gradients(cfg)(*jax.device_put((x, params, dy), GPU))
        for gradient in dparams["experts"].values():
            assert not np.asarray(gradient)[::2].any()


def test_no_tokens():
    cfg, x, params, _ = case("mixtral")
    y, _ = dropless.moe(jax.device_put(x[:0], GPU), jax.device_put(params, GPU), cfg)
    assert y.shape == (0, 272)


@pytest.mark.parametrize("name", ["mixtral_wgrad", "save_h", "gpt_oss"])
def test_g2_the_same_bits_every_time(name):
    cfg, x, params, dy = case(name)
    step = gradients(cfg)
    arguments = jax.device_put((x, params, dy), GPU)
    first = jax.tree.map(np.asarray, step(*arguments))
    for _ in range(100):
        for a, b in zip(jax.tree.leaves(step(*arguments)), jax.tree.leaves(first), strict=True):
            assert np.asarray(a).tobytes() == b.tobytes()


@pytest.mark.parametrize("name", ["mixtral", "odd_widths", "gpt_oss"])
def test_prepared_experts_give_the_same_bits(name):
    cfg, x, params, dy = case(name)
    x, params, dy = jax.device_put((x, params, dy), GPU)
    ready = jax.jit(lambda p: dropless.prepare_experts(p, cfg))(params)

    def loss(x, params, ready):
        y = dropless.moe(x, params, cfg, prepared=ready)[0]
        return jnp.sum(y.astype(jnp.float32) * dy), y

    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    for a, b in zip(
        jax.tree.leaves(step(x, params, None)), jax.tree.leaves(step(x, params, ready)), strict=True
    ):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_scan_over_layers_is_the_unrolled_loop():
    cfg, x, params, _ = case("mixtral")
    x, params = jax.device_put((x, params), GPU)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 0.5, leaf * -0.25]), params)

    def body(x, layer):
        return x + dropless.moe(x, layer, cfg)[0], None

    scanned = jax.jit(lambda x: jax.lax.scan(body, x, stacked)[0])(x)
    for i in range(3):
        x, _ = jax.jit(body)(x, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
    # One bfloat16 step of the sum, and the codes that it flips in the layers after it.
    oracle.assert_close("scan", scanned, x, oracle.bound("fp8", 1, 1) / 4)
