"""`explain` against what the layer does, and against arithmetic by hand."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import dropless
from dropless import _library

T, H, I, E, K = 37, 48, 136, 6, 3  # noqa: E741
CFG = dropless.MoEConfig(num_experts=E, experts_per_token=K, expert_dim=I, precision="bf16")


def residual_bytes(cfg, dtype, param_dtype=jnp.float32):
    """Bytes of the arrays that jax.vjp keeps, each buffer once, parameters left out."""
    params = dropless.init(jax.random.key(0), H, cfg, param_dtype=param_dtype)
    x = jax.random.normal(jax.random.key(1), (T, H), dtype)
    _, vjp = jax.vjp(lambda x, params: dropless.moe(x, params, cfg)[0], x, params)
    not_saved = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    kept = {leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in jax.tree.leaves(vjp)}
    return sum(size for pointer, size in kept.items() if pointer not in not_saved)


@pytest.mark.parametrize(
    ("precision", "options", "dtype"),
    [
        ("f32", {}, jnp.float32),
        ("bf16", {}, jnp.bfloat16),
        ("bf16", {}, jnp.float32),
        ("bf16", {"save_h": "fp8"}, jnp.bfloat16),
        ("fp8", {}, jnp.bfloat16),
        ("fp8", {"save_h": "fp8", "wgrad_precision": "fp8"}, jnp.bfloat16),
    ],
)
def test_saved_bytes_are_those_of_the_vjp(precision, options, dtype):
    cfg = dataclasses.replace(CFG, precision=precision, **options)
    told = dropless.explain(cfg, T, H, dtype=dtype)
    assert told.saved_bytes == residual_bytes(cfg, dtype)
    # The formula: x as given, h at two bytes (float32: four, FP8: one and its scales), the routing.
    x, h, routing = T * H * jnp.dtype(dtype).itemsize, 2 * T * K * I, 4 * T * E + 16 * T * K
    h = h + 4 * 2 * T * K * 2 if "save_h" in options else h * (4 if precision == "f32" else 2)
    assert told.saved_bytes == x + h + routing + 4 * (E + 1)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("f32", jnp.float32), ("bf16", jnp.float32), ("bf16", jnp.bfloat16), ("fp8", jnp.bfloat16)],
)
def test_workspaces_are_those_of_the_program(precision, dtype):
    cfg = dataclasses.replace(CFG, precision=precision, wgrad_precision="fp8", expert_bias=True)
    told = dropless.explain(cfg, T, H, dtype=dtype)
    params = dropless.init(jax.random.key(0), H, cfg)

    def loss(x, params):
        return dropless.moe(x, params, cfg)[0].astype(jnp.float32).sum()

    program = jax.jit(jax.grad(loss, (0, 1))).lower(jnp.zeros((T, H), dtype), params).as_text()
    calls = [line for line in program.splitlines() if "custom_call @dropless_" in line]
    made = sorted(
        (re.search(r"@dropless_(\w+)_c\d+\(", line)[1], int(size))
        for line in calls
        for size in re.findall(r"tensor<(\d+)xui8>", line.split("->")[-1])
    )
    assert made == sorted((array.name, array.bytes) for array in told.workspaces)

    def padded(size):
        return -(-size // 256) * 256

    # In FP8 the weight gradients have codes and fp32 scales of x and dh, or of pa and dy, in
    # M/128 + E blocks of 128 rows; else a copy of x in the rows' order, and of dy, padded to 256
    # bytes. The other products copy rows and scales of x and dy in FP8, else they gather rows as
    # they load them; dp is one fp32 sum a row and 128 columns.
    sizes = dict(made)
    rows = padded(T * K * H) + padded(T * K * -(-H // 128) * 4) if precision == "fp8" else 0
    assert sizes["expert_up"] == rows
    columns = -(-cfg.expert_dim // 128)
    assert sizes["expert_down_backward"] == rows + padded(T * K * columns * 4)
    if precision == "fp8":
        blocks, columns = T * K // 128 + E, (128 + 2 * 256, 256 + 128)
        wanted = {blocks * width * (128 + 4) for width in columns}
    else:
        wanted = {padded(T * K * H * {"f32": 4, "bf16": 2}[precision])}
    assert {size for name, size in made if name == "grouped_wgrad"} == wanted
    assert told.workspace_bytes == sum(size for _, size in made)
    assert told.largest_workspace_bytes == max(size for _, size in made)


def test_flops_of_a_pass():
    told = dropless.explain(CFG, T, H, "H200")
    assert told.rows == T * K
    router, expert = 2 * T * H * E, 2 * T * K * H * I
    assert [gemm.flops for gemm in told.forward] == [router, 2 * expert, expert]
    assert sum(gemm.flops for gemm in told.backward) == 2 * sum(g.flops for g in told.forward)
    assert told.flops == 18 * T * K * H * I + 6 * T * H * E


def test_floor_is_the_slower_of_computing_and_moving():
    cfg, model_dim = dropless.models.presets["mixtral-8x7b"]
    cfg = dataclasses.replace(cfg, precision="bf16")
    large = dropless.explain(cfg, 8192, model_dim, "NVIDIA H200").forward[2]
    # 989.5 TFLOP/s in bf16: 16384 rows against 4096 x 14336.
    assert large.floor_seconds == pytest.approx(2 * 16384 * 4096 * 14336 / 989.5e12)
    small = dropless.explain(cfg, 1, model_dim, "NVIDIA H200").forward[2]
    # 4.8 TB/s: one token reads two experts' matrices, in bf16, and moves two rows.
    moved = 2 * (2 * 4096 * 14336 + 2 * 14336 + 2 * 4096)
    assert small.bytes == moved
    assert small.floor_seconds == pytest.approx(moved / 4.8e12)


def test_floor_of_the_router_counts_its_bf16_terms():
    tokens = 100_000
    flops = 2 * tokens * 4096 * 128
    cfg = dropless.models.presets["qwen3-235b-a22b"].config
    told = dropless.explain(cfg, tokens, 4096, "NVIDIA H200")
    assert told.forward[0].flops == flops and told.backward[-1].flops == 2 * flops
    assert told.forward[0].floor_seconds == pytest.approx(3 * flops / 989.5e12)
    assert told.backward[-1].floor_seconds == pytest.approx(9 * flops / 989.5e12)
    told = dropless.explain(cfg, tokens, 4096, "NVIDIA H200", dtype=jnp.float32)
    assert told.forward[0].floor_seconds == pytest.approx(flops / 67e12)


def test_weights_of_idle_experts_are_not_read():
    cfg = dataclasses.replace(CFG, num_experts=1000)
    few, many = (dropless.explain(cfg, t, H, "H200").forward[2].bytes for t in (1, 2))
    assert many - few == K * 2 * (H * I + I + H)


def test_n1_kernels_on_a_cpu_are_those_in_use():
    for precision in "f32", "bf16", "fp8":
        told = dropless.explain(dataclasses.replace(CFG, precision=precision), T, H, "cpu")
        name, tile = _library.cpu_kernel_tile(bf16=precision != "f32")
        products = [gemm for gemm in told.gemms if "router" not in gemm.name]
        assert len(products) == 6
        for gemm in products:
            assert gemm.kernel.endswith(f" on {name}") and gemm.tile == tile and gemm.reason
        assert ("emulated" in products[0].reason) == (precision == "fp8")
    assert _library.cpu_kernel_tile(bf16=True)[0] == _library.cpu_kernel()


@pytest.mark.parametrize(
    ("device", "precision", "kernel"),
    [
        ("H200", "bf16", "grouped_gemm_sm90"),
        ("H200", "fp8", "grouped_gemm_fp8_sm90"),
        ("NVIDIA H100 PCIe", "bf16", "grouped_gemm_sm90"),
        ("A100-SXM4-80GB", "bf16", "grouped_gemm_sm80"),
    ],
)
def test_n1_kernels_of_a_gpu_by_name(device, precision, kernel):
    told = dropless.explain(dataclasses.replace(CFG, precision=precision), T, H, device)
    assert told.forward[2].kernel == kernel
    assert device in told.device
    assert told.floor_seconds > 0


def test_n1_every_gpu_kernel_has_a_name_and_the_reason_is_the_true_one(monkeypatch):
    def told(device, precision="bf16", model_dim=H, expert_dim=CFG.expert_dim):
        cfg = dataclasses.replace(CFG, precision=precision, expert_dim=expert_dim)
        gemms = dropless.explain(cfg, T, model_dim, device).gemms
        return [gemm for gemm in gemms if "router" not in gemm.name]

    for gemm in told("H200", "f32"):
        assert gemm.kernel.endswith("_f32") and gemm.tile == (128, 128, 32)
        assert "TF32" in gemm.reason
    for widths in ({"model_dim": 1001}, {"expert_dim": 1001}):
        for gemm in told("H200", **widths):
            assert gemm.kernel.endswith("_sm80") and "1001" in gemm.reason
    assert all("not Hopper" in gemm.reason for gemm in told("A100-SXM4-80GB"))
    limited = dropless.Activation("silu", slope=1.702, gate_limit=7.0, up_limit=7.0, up_offset=1.0)
    for activation in (limited, dropless.Activation("relu_squared", gated=False)):
        cfg = dataclasses.replace(CFG, activation=activation)
        gemms = dropless.explain(cfg, T, H, "H200").gemms
        assert not [gemm.kernel for gemm in gemms if gemm.kernel.endswith("_sm80")]
    monkeypatch.setenv("DROPLESS_GPU_PATH", "sm80")
    for gemm in told("H200"):
        assert gemm.kernel.endswith("_sm80") and "DROPLESS_GPU_PATH" in gemm.reason
        assert gemm.tile == (128, 256, 64)
    assert all(gemm.kernel.endswith("_f32") for gemm in told("H200", "f32"))
    monkeypatch.setenv("DROPLESS_GPU_PATH", "auto")
    assert all(gemm.kernel.endswith("_sm90") for gemm in told("H200"))
    monkeypatch.setenv("DROPLESS_GPU_PATH", "sm70")
    with pytest.raises(ValueError, match="DROPLESS_GPU_PATH.*sm70"):
        told("H200")


def test_fp8_with_a_bf16_weight_gradient():
    cfg = dataclasses.replace(CFG, precision="fp8", wgrad_precision="bf16")
    kernels = [gemm.kernel for gemm in dropless.explain(cfg, T, H, "H200").backward]
    assert kernels[:4] == [
        "expert_down_backward_fp8_sm90",
        "expert_up_backward_fp8_sm90",
        "grouped_wgrad_sm90",
        "grouped_wgrad_sm90",
    ]
    cfg = dataclasses.replace(cfg, wgrad_precision="fp8")
    assert dropless.explain(cfg, T, H, "H200").backward[2].kernel == "grouped_wgrad_fp8_sm90"


def test_precision_is_the_layers_own_choice_and_says_why():
    auto = dataclasses.replace(CFG, precision="auto")
    for dtype, chosen in (jnp.float32, "f32"), (jnp.bfloat16, "bf16"):
        told = dropless.explain(auto, T, H, "cpu", dtype=dtype)
        assert told.precision == chosen
        assert "auto" in told.precision_reason and jnp.dtype(dtype).name in told.precision_reason
    assert dropless.explain(auto, T, H, "cpu").precision == "f32"
    assert dropless.explain(CFG, T, H, "cpu").precision_reason == "asked for"


def test_m5_fp8_where_there_is_none():
    cfg = dataclasses.replace(CFG, precision="fp8")
    with pytest.raises(ValueError, match="A100.*8.0.*bf16"):
        dropless.explain(cfg, T, H, "A100-SXM4-80GB")
    cfg = dataclasses.replace(cfg, fallback="bf16")
    with pytest.warns(RuntimeWarning, match="A100"):
        told = dropless.explain(cfg, T, H, "A100-SXM4-80GB")
    assert told.precision == "bf16"
    assert "A100" in told.precision_reason and "fallback" in told.precision_reason


def test_prints_a_table():
    text = str(dropless.explain(CFG, T, H, "H200"))
    for word in "NVIDIA H200", "precision bf16", "expert_up_sm90", "floor ms", "saved for backward":
        assert word in text
    assert "unknown" not in text
    unknown = str(dropless.explain(CFG, T, H, "cpu"))
    assert "unknown" in unknown and "nan" not in unknown.lower()
    assert "workspaces:" in text and "workspaces, which a CPU does not touch:" in unknown


def test_device_in_use_is_the_default():
    assert dropless.explain(CFG, T, H).device == jax.devices()[0].device_kind
    assert dropless.explain(CFG, T, H, jax.devices("cpu")[0]).device == "cpu"


def test_naming_a_device_initialises_no_backend():
    # jax_num_cpu_devices can only be set before a backend exists.
    program = (
        "import dropless, jax\n"
        "cfg = dropless.MoEConfig(num_experts=4)\n"
        "print(dropless.explain(cfg, 8, 64, 'H200').precision)\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "print(jax.local_device_count('cpu'))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert run.stdout.split() == ["bf16", "3"], run.stderr


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, H), ValueError, "tokens.*0"),
        ((T, -1), ValueError, "model_dim.*-1"),
        ((T, 2.5), ValueError, "model_dim.*2.5"),
        ((2**30, H), ValueError, "tokens.*2\\*\\*31"),
        ((T, H, "H2000"), ValueError, "device.*NVIDIA H200.*H2000"),
        ((T, H, 3), TypeError, "device.*got 3"),
        ((T, H, "A100"), ValueError, "A100.*fits.*SXM4-40GB.*PCIe"),
    ],
)
def test_n2_bad_input_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        dropless.explain(CFG, *arguments)
    with pytest.raises(TypeError, match="cfg must be a dropless.MoEConfig; got dict"):
        dropless.explain({}, T, H)
    with pytest.raises(TypeError, match="float16.*bfloat16"):
        dropless.explain(CFG, T, H, "cpu", dtype=jnp.float16)


def test_shared_and_ungated_experts_are_counted():
    cfg = dropless.MoEConfig(
        num_experts=7,
        experts_per_token=3,
        expert_dim=23,
        shared_expert_dim=31,
        activation=dropless.Activation("relu", gated=False),
        precision="f32",
    )
    t, h, m = 11, 40, 33
    e = dropless.explain(cfg, t, h, device="cpu")
    router = 2 * t * h * 7
    assert e.flops == 3 * router + 3 * 2 * (2 * m * h * 23 + 2 * t * h * 31)
    shapes = {array.name: array.shape for array in e.saved}
    assert shapes["h"] == (m, 1, 23) and shapes["shared expert: h"] == (t, 1, 31)
