"""Configurations: what they accept, that they hash, what they compute; importing costs little."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import dropless
from dropless._precision import LayerSizes, choose_precision


def test_configs_are_frozen_and_hash_by_value():
    one, two = (dropless.MoEConfig(8, router=dropless.RouterConfig(scale=2.5)) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert hash(one) != hash(dataclasses.replace(one, precision="bf16"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.num_experts = 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_experts": 0}, r"num_experts must be an int >= 1; got 0"),
        ({"num_experts": 2.0}, r"num_experts must be an int >= 1; got 2.0"),
        ({"experts_per_token": 0}, r"experts_per_token must be an int >= 1; got 0"),
        ({"experts_per_token": 9}, r"got experts_per_token=9 and num_experts=8"),
        ({"expert_dim": 0}, r"expert_dim must be an int >= 1; got 0"),
        ({"router": "softmax"}, r"router must be a dropless.RouterConfig; got 'softmax'"),
        (
            {"activation": "tanh"},
            r"activation must be one of 'silu', 'gelu', 'gelu_tanh', 'relu', .*; got 'tanh'",
        ),
        (
            {"activation": np.array(["silu", "gelu"])},
            r"activation must be one of 'silu', .*; got array",
        ),
        ({"expert_bias": 1}, r"expert_bias must be True or False; got 1"),
        ({"shared_expert_dim": 0}, r"shared_expert_dim must be an int >= 1; got 0"),
        (
            {"shared_expert_gate": True},
            r"shared_expert_gate=True needs shared_expert_dim; got None",
        ),
        ({"precision": "fp16"}, r"precision must be one of .*; got 'fp16'"),
        ({"expert_capacity_factor": 0.0}, r"expert_capacity_factor must be a finite number > 0"),
        ({"expert_capacity_factor": 1e300}, r"expert_capacity_factor .* in float32; got 1e\+300"),
        ({"expert_capacity_factor": float("nan")}, r"expert_capacity_factor must be .*; got nan"),
        ({"overflow": "wrap"}, r"overflow must be one of 'rounds', 'drop'; got 'wrap'"),
        ({"wgrad_precision": "f32"}, r"wgrad_precision must be one of 'bf16', 'fp8'"),
        ({"save_h": "f32"}, r"save_h must be one of 'bf16', 'fp8'"),
        ({"save_h": "fp8", "precision": "f32"}, r'save_h="fp8" needs precision="bf16", .*"f32"'),
        ({"scale_rounding": "up"}, r"scale_rounding must be one of 'fp32', 'pow2'"),
        ({"fallback": "f32"}, r"fallback must be one of None, 'bf16'"),
        ({"strict": "yes"}, r"strict must be True or False"),
        ({"num_sms": 0}, r"num_sms must be .*; got 0"),
        ({"num_sms": 1}, r"num_sms must be .*; got 1"),
        ({"num_sms": "all"}, r"num_sms must be .*; got 'all'"),
    ],
)
def test_n2_layer_options_are_checked(options, text):
    with pytest.raises(ValueError, match=text):
        dropless.MoEConfig(**{"num_experts": 8, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"score": "tanh"}, r"RouterConfig.score must be one of 'softmax', .*; got 'tanh'"),
        ({"renormalize": 0}, r"RouterConfig.renormalize must be True or False; got 0"),
        ({"renormalize_eps": -1.0}, r"RouterConfig.renormalize_eps must be .* >= 0 .*; got -1.0"),
        ({"scale": 0}, r"RouterConfig.scale must be a finite number > 0 in float32; got 0"),
        ({"scale": 1e-60}, r"RouterConfig.scale must be .* > 0 in float32; got 1e-60"),
        ({"scale": 1e39}, r"RouterConfig.scale must be .* in float32; got 1e\+39"),
    ],
)
def test_n2_router_options_are_checked(options, text):
    with pytest.raises(ValueError, match=text):
        dropless.RouterConfig(**options)


@pytest.mark.parametrize(
    ("h", "k", "i"), [(768, 2, 1024), (512, 2, 704), (1024, 8, 384), (40, 1, 128)]
)
def test_default_width_costs_what_a_dense_network_costs(h, k, i):
    # 8/3 * 512 / 2 = 682.67, rounded up to 704, and so on.
    cfg = dropless.MoEConfig(8, k)
    assert cfg.resolved_expert_dim(h) == i
    assert i % 64 == 0 and 0 <= i * k - 8 / 3 * h < 64 * k
    assert dropless.MoEConfig(8, k, 100).resolved_expert_dim(h) == 100


@pytest.mark.parametrize(("factor", "capacity"), [(1.0, 25), (1.25, 32), (0.001, 1), (1e30, 100)])
def test_capacity_of_a_dropping_layer(factor, capacity):
    cfg = dropless.MoEConfig(8, 2, expert_capacity_factor=factor, overflow="drop")
    assert cfg.capacity(100) == capacity
    assert dataclasses.replace(cfg, overflow="rounds").capacity(100) == 0


def gpu(capability, kind="NVIDIA A100-SXM4"):
    return SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


def resolved(cfg, device, tokens=8192, model_dim=4096, expert_dim=14336, param_bytes=2, **options):
    sizes = LayerSizes(tokens, model_dim, expert_dim, param_bytes, **options)
    return choose_precision(cfg, jnp.dtype(jnp.bfloat16), device, sizes)


def test_m5_fp8_on_a_gpu_without_it_is_an_error_or_a_warned_fallback():
    cfg = dropless.MoEConfig(8, precision="fp8")
    with pytest.raises(
        ValueError, match=r'got NVIDIA A100-SXM4 of capability 8.0.*fallback="bf16"'
    ):
        resolved(cfg, gpu("8.0"))
    fallback = dataclasses.replace(cfg, fallback="bf16")
    with pytest.warns(RuntimeWarning, match="running bf16 instead"):
        chosen = resolved(fallback, gpu("8.0"))
    assert chosen.precision == "bf16" and "fallback" in chosen.reason
    with pytest.raises(ValueError, match="A100"):
        resolved(dataclasses.replace(fallback, strict=True), gpu("8.0"))
    for newer in ("10.0", "12.0"):  # sm_90a runs there no more than on Ampere
        with pytest.raises(ValueError, match=f"needs an NVIDIA Hopper GPU.*capability {newer}"):
            resolved(cfg, gpu(newer))
    # Where FP8 is, or is emulated, fallback changes nothing.
    for device in (gpu("9.0"), SimpleNamespace(platform="cpu", device_kind="cpu")):
        assert resolved(fallback, device).precision == "fp8"


def test_fp8_on_hopper_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cfg = dropless.MoEConfig(8, precision="fp8")
        assert resolved(cfg, gpu("9.0")).precision == "fp8"


def test_import_is_light_and_initialises_no_backend():
    # The time of `import dropless` beyond jax, whether it loads Flax, and whether jax can still be
    # told how many CPU devices to make, which it refuses once a backend exists.
    code = (
        "import time, jax, sys; start = time.perf_counter(); import dropless\n"
        "seconds = time.perf_counter() - start\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "print(seconds, 'flax' in sys.modules, len(jax.devices('cpu')))\n"
        "assert dropless.MoELayer is dropless.nnx.MoELayer\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seconds, flax, devices = done.stdout.split()
    assert float(seconds) < 1.5 and flax == "False" and devices == "3"


def test_unknown_attributes_are_errors_and_known_ones_are_listed():
    with pytest.raises(AttributeError, match="has no attribute 'mixture'"):
        _ = dropless.mixture
    assert {"MoELayer", "moe", "explain", "info"} <= set(dir(dropless))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kind": "swish"}, r"activation must be one of 'silu', .*; got 'swish'"),
        ({"gated": 1}, r"Activation.gated must be True or False; got 1"),
        ({"slope": 0.0}, r"Activation.slope must be a finite number > 0"),
        ({"kind": "gelu", "slope": 2.0}, r'slope is of "silu" only; got slope=2.0 and kind=.gelu'),
        ({"gate_limit": 0.0}, r"Activation.gate_limit must be a finite number > 0"),
        ({"up_limit": float("inf")}, r"Activation.up_limit must be a finite number > 0"),
        ({"up_offset": float("nan")}, r"Activation.up_offset must be a finite number"),
        ({"gated": False, "up_offset": 1.0}, r"up_limit and up_offset need gated=True"),
    ],
)
def test_n2_activation_options_are_checked(options, text):
    with pytest.raises(ValueError, match=text):
        dropless.Activation(**options)


def test_an_activation_of_defaults_is_its_kind():
    one = dropless.MoEConfig(8, activation=dropless.Activation("gelu"))
    assert one == dropless.MoEConfig(8, activation="gelu") and one.activation == "gelu"
    negative = dropless.Activation(up_offset=-0.5)
    assert dropless.MoEConfig(8, activation=negative).activation == negative


def test_numpy_scalars_are_settings_as_python_numbers_are():
    plain = dropless.MoEConfig(
        num_experts=8,
        experts_per_token=2,
        expert_dim=64,
        expert_bias=True,
        activation=dropless.Activation("silu", up_limit=7.0),
        router=dropless.RouterConfig(scale=2.5, num_groups=4, groups_kept=2),
    )
    given = dropless.MoEConfig(
        num_experts=np.int64(8),
        experts_per_token=np.uint8(2),
        expert_dim=np.int32(64),
        expert_bias=np.bool_(True),
        activation=dropless.Activation("silu", up_limit=np.float32(7.0)),
        router=dropless.RouterConfig(
            scale=np.float32(2.5), num_groups=np.int16(4), groups_kept=np.int64(2)
        ),
    )
    assert given == plain and repr(given) == repr(plain)
    with pytest.raises(ValueError, match="num_experts must be an int >= 1; got 8.0"):
        dropless.MoEConfig(num_experts=np.float32(8), experts_per_token=2)
