"""``precision="auto"``: its choice on Hopper against the times that were measured there."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import dropless
from dropless._devices import NamedDevice, device_of
from dropless._precision import LayerSizes, choose_precision

RESULTS = Path(__file__).parents[2] / "bench" / "results"
MEASURED = json.loads((RESULTS / "gpu_fp8_choice_h200.json").read_text())["choice"]
NAMED = [r for r in MEASURED if r["shape"]["name"] != "other" and r["activation"] == "silu"]
H200 = device_of("H200")
BF16 = jnp.dtype(jnp.bfloat16)
S1 = LayerSizes(tokens=8192, model_dim=4096, expert_dim=14336, param_bytes=2)
MIXTRAL = dropless.MoEConfig(8, 2, 14336)


def config(shape, **options):
    return dropless.MoEConfig(
        num_experts=shape["num_experts"],
        experts_per_token=shape["experts_per_token"],
        expert_dim=shape["expert_dim"],
        **options,
    )


def name_of(row):
    return f"{row['shape']['name']}-T{row['shape']['tokens']}-{row['params']}"


@pytest.mark.parametrize("row", NAMED, ids=name_of)
def test_auto_is_never_more_than_2_percent_slower_than_the_better(row):
    shape, ms = row["shape"], {n: t["in_a_row_ms"] for n, t in row["times"].items()}
    pairs = {True: {"bf16": ms.get("bf16_prepared", ms["bf16"]), "fp8": ms["fp8_prepared"]}}
    if "fp8" in ms:
        pairs[False] = {"bf16": ms["bf16"], "fp8": ms["fp8"]}
    for prepared, times in pairs.items():
        sizes = LayerSizes(
            tokens=shape["tokens"],
            model_dim=shape["model_dim"],
            expert_dim=shape["expert_dim"],
            param_bytes=jnp.dtype(row["params"]).itemsize,
            prepared=prepared,
        )
        chosen = choose_precision(config(shape), BF16, H200, sizes)
        loss = times[chosen.precision] / min(times.values()) - 1
        assert loss <= 0.02, f"{chosen} loses {loss:.1%} of {times}, prepared: {prepared}"


@pytest.mark.parametrize("row", NAMED, ids=name_of)
def test_expected_times_are_near_those_measured(row):
    shape, ms = row["shape"], {n: t["in_a_row_ms"] for n, t in row["times"].items()}
    told = dropless.explain(
        config(shape), shape["tokens"], shape["model_dim"], "H200", param_dtype=row["params"]
    )
    bf16 = ms.get("bf16_prepared", ms["bf16"])
    assert told.fp8.bf16_seconds == pytest.approx(bf16 / 1e3, rel=0.1)
    assert told.fp8.fp8_seconds == pytest.approx(ms["fp8_prepared"] / 1e3, rel=0.15)
    assert f"{told.fp8.every_call_ratio:.2f} times" in told.precision_reason


def test_few_rows_an_expert_pay_only_with_experts_prepared_once():
    cfg = dropless.MoEConfig(128, 1, 1024)
    told = dropless.explain(cfg, 128, 2048, "H200", param_dtype=jnp.bfloat16)
    assert told.precision == "bf16"
    assert told.fp8.every_call_ratio < 1 < told.fp8.prepared_ratio
    saved = told.fp8.bf16_seconds - told.fp8.fp8_seconds
    calls = told.fp8.calls_to_pay
    assert (calls - 1) * saved <= told.fp8.fp8_prepare_seconds < calls * saved
    assert f"{calls} calls or more share prepared experts" in str(told)
    assert told.fp8.bf16_prepare_seconds == 0
    # float32 parameters are read and cast for bf16 too.
    told = dropless.explain(cfg, 128, 2048, "H200", param_dtype=jnp.float32)
    assert 0 < told.fp8.bf16_prepare_seconds < told.fp8.fp8_prepare_seconds


def test_narrow_layers_stay_in_bf16():
    told = dropless.explain(dropless.MoEConfig(16, 4, 256), 8192, 512, "H200")
    assert told.precision == "bf16" and told.fp8.calls_to_pay is None
    assert "does not pay" in str(told)


def test_a_shared_expert_is_counted():
    alone = dropless.explain(MIXTRAL, 8192, 4096, "H200").fp8
    cfg = dataclasses.replace(MIXTRAL, shared_expert_dim=2048)
    both = dropless.explain(cfg, 8192, 4096, "H200").fp8
    assert both.bf16_seconds > alone.bf16_seconds
    assert both.fp8_prepare_seconds > alone.fp8_prepare_seconds


def test_other_hopper_gpus_are_scaled_and_unknown_ones_taken_for_an_h200():
    h200, h100, unknown = (
        choose_precision(MIXTRAL, BF16, device, S1)
        for device in (H200, device_of("H100 80GB"), NamedDevice("gpu", "NVIDIA GH200", "9.0"))
    )
    assert h200 == unknown and h200.precision == "fp8"
    assert h100.precision == "fp8" and h100.reason != h200.reason


@pytest.mark.parametrize(
    ("cfg", "sizes", "reason"),
    [
        ({"activation": "relu"}, {}, "fused kernels in bf16 and none in FP8"),
        ({}, {"model_dim": 4104}, "H = 4104 is no multiple of 16"),
        ({}, {"expert_dim": 14340}, "I = 14340 is no multiple of 16"),
        ({}, {"tokens": 0}, "no tokens"),
    ],
)
def test_what_was_not_measured_stays_in_bf16(cfg, sizes, reason):
    chosen = choose_precision(
        dataclasses.replace(MIXTRAL, **cfg), BF16, H200, dataclasses.replace(S1, **sizes)
    )
    assert chosen.precision == "bf16" and reason in chosen.reason


def test_kernels_for_every_gpu_have_no_fp8(monkeypatch):
    monkeypatch.setenv("DROPLESS_GPU_PATH", "sm80")
    chosen = choose_precision(MIXTRAL, BF16, H200, S1)
    assert chosen.precision == "bf16" and "DROPLESS_GPU_PATH" in chosen.reason


def test_other_gpus_run_bf16():
    for name in ("A100-SXM4-80GB", NamedDevice("gpu", "NVIDIA B200", "10.0")):
        chosen = choose_precision(MIXTRAL, BF16, device_of(name), S1)
        assert chosen.precision == "bf16" and "has no FP8 kernels" in chosen.reason


def test_the_choice_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr("dropless._config._said", set())
    with caplog.at_level(logging.INFO, logger="dropless"):
        for _ in range(2):
            choose_precision(MIXTRAL, BF16, H200, S1)
    (record,) = caplog.records
    assert "chose fp8 on NVIDIA H200" in record.message and "times as fast" in record.message


def test_prepared_experts_follow_the_tokens_of_their_calls(monkeypatch):
    """On a device that says it is an H200; nothing runs there."""
    cfg = dropless.MoEConfig(128, 8, 512)
    params = jax.eval_shape(lambda key: dropless.init(key, 1024, cfg), jax.random.key(0))
    monkeypatch.setattr("dropless._params.device_in_use", lambda _: H200)

    def prepared(**options):
        return jax.eval_shape(lambda p: dropless.prepare_experts(p, cfg, **options), params)

    # Few tokens read weights above all, which FP8 halves; many write rows above all.
    assert prepared(tokens=64).precision == "fp8"
    assert prepared().precision == "bf16"
    with pytest.raises(ValueError, match="tokens.*0"):
        prepared(tokens=0)


def test_the_choice_sees_the_tokens_of_one_device(monkeypatch):
    seen = []

    def choose(cfg, dtype, device, sizes):
        seen.append(sizes)
        return choose_precision(cfg, dtype, device, sizes)

    monkeypatch.setattr("dropless._moe.choose_precision", choose)
    cfg = dropless.MoEConfig(4, 2, 24)
    params = dropless.init(jax.random.key(0), 16, cfg, param_dtype=jnp.bfloat16)
    x = jnp.ones((8, 3, 16))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    dropless.moe(x, params, cfg)
    dropless.moe(x, params, cfg, mesh=mesh)
    assert seen == [LayerSizes(24, 16, 24, 2), LayerSizes(6, 16, 24, 2)]
