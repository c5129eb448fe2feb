"""FP8 experts in steps, as on GPUs whose fused kernels do not cover them, against the fused ops."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
import fp8_columns
import oracle
from dropless import _experts_fp8
from dropless._experts import Spec, experts

ACTIVATIONS = {
    "gpt_oss": dropless.Activation(
        "silu", slope=1.702, gate_limit=1.0, up_limit=0.9, up_offset=1.0
    ),
    "relu_squared": dropless.Activation("relu_squared", gated=False),
    "relu": "relu",
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
}


def results(spec, x, params, routing, dy):
    def function(x, p, w):
        return experts(spec, x, p, w, None, routing)

    @jax.jit
    def run(x, p, w):
        y, vjp = jax.vjp(function, x, p, w)
        return {"y": y, **dict(zip(("dx", "d_p", "d_w"), vjp(dy), strict=True))}

    return run(x, routing.weights, params["experts"])


@pytest.mark.parametrize(
    ("name", "width", "expert_dim"),
    [("silu", 272, 144), *((name, 67, 129) for name in ACTIVATIONS)],
)
def test_steps_are_the_fused_operations(name, width, expert_dim, monkeypatch):
    monkeypatch.setattr(_experts_fp8, "has_fused_kernels", lambda _: False)
    cfg = dropless.MoEConfig(
        5, 2, expert_dim, activation=ACTIVATIONS[name], precision="fp8", expert_bias=True
    )
    x, params, dy = oracle.layer_case(cfg, (61, width), jnp.bfloat16)
    routing = dropless.route(
        x.astype(jnp.float32) @ params["router"]["kernel"], cfg, mask=jnp.arange(61) % 7 != 3
    )
    fused, steps = Spec.of(cfg, "fp8"), Spec.of(cfg, "fp8", "gpu")
    assert steps.in_steps and not fused.in_steps
    want = results(fused, x, params, routing, dy)
    got = results(steps, x, params, routing, dy)
    for (path, g), (_, w) in zip(oracle.leaves(got), oracle.leaves(want), strict=True):
        # The same codes; a float32 sum in another order flips one in some thousand of what follows.
        error = oracle.rms(np.float64(g) - np.float64(w)) / oracle.rms(w)
        assert error <= 2.0**-4 * 2.0**-5, f"{path}: {error:.2e}"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_float8_h_through_bfloat16(precision):
    """A GPU's kernels read the codes of h as bfloat16, or write h as that first: a rounding more.

    It moves a value by a quarter of bfloat16's step on average, 2^-6 of a code's step: so many
    codes flip, in gate and in up, each by a step of at most 2^-3 of its value.
    """
    cfg = dropless.MoEConfig(5, 2, 72, precision=precision, save_h="fp8")
    x, params, dy = oracle.layer_case(cfg, (61, 56), jnp.bfloat16)
    routing = dropless.route(x.astype(jnp.float32) @ params["router"]["kernel"], cfg)
    spec = Spec.of(cfg, precision)
    want = results(spec, x, params, routing, dy)
    got = results(dataclasses.replace(spec, gpu=True), x, params, routing, dy)
    np.testing.assert_array_equal(got["y"], want["y"])
    for (path, g), (_, w) in zip(oracle.leaves(got), oracle.leaves(want), strict=True):
        error = oracle.rms(np.float64(g) - np.float64(w)) / oracle.rms(w)
        assert error <= np.sqrt(2 * 2.0**-6) * 2.0**-3, f"{path}: {error:.2e}"
        assert path == "['y']" or error > 0, path


@pytest.mark.parametrize("name", fp8_columns.GROUPS)
def test_operands_of_weight_gradients_quantised_where_they_are_made(name):
    cpu = jax.devices("cpu")[0]
    fp8_columns.assert_same_gradients(name, (48, 144), cpu, pow2=1, special=name == "ragged")
    fp8_columns.assert_same_gradients(name, (32, 112), cpu, kind=2)


def test_a_gpus_weight_gradients_are_a_cpus():
    cfg = dropless.MoEConfig(5, 2, 144, precision="fp8", wgrad_precision="fp8")
    x, params, dy = oracle.layer_case(cfg, (61, 272), jnp.bfloat16)
    routing = dropless.route(x.astype(jnp.float32) @ params["router"]["kernel"], cfg)
    want = results(Spec.of(cfg, "fp8"), x, params, routing, dy)
    got = results(Spec.of(cfg, "fp8", "gpu"), x, params, routing, dy)
    for (path, g), (_, w) in zip(oracle.leaves(got), oracle.leaves(want), strict=True):
        np.testing.assert_array_equal(g, w, err_msg=path)
