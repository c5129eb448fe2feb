"""gpt-oss's MXFP4 checkpoints against the format's definition, number by number."""

from __future__ import annotations

import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dropless

H, I, E = 64, 96, 3  # noqa: E741 - multiples of 32, and different
CONFIG = {
    "model_type": "gpt_oss",
    "hidden_size": H,
    "intermediate_size": I,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*"]},
}


def mxfp4_tensors(low=100, high=140):
    rng = np.random.default_rng(0)
    tensors = {
        "router.weight": rng.standard_normal((E, H)).astype(ml_dtypes.bfloat16),
        "router.bias": rng.standard_normal(E).astype(ml_dtypes.bfloat16),
        "experts.gate_up_proj_bias": rng.standard_normal((E, 2 * I)).astype(ml_dtypes.bfloat16),
        "experts.down_proj_bias": rng.standard_normal((E, H)).astype(ml_dtypes.bfloat16),
    }
    for name, width, out in ("gate_up_proj", H, 2 * I), ("down_proj", I, H):
        scales = (E, out, width // 32)
        tensors[f"experts.{name}_blocks"] = rng.integers(0, 256, (*scales, 16), np.uint8)
        tensors[f"experts.{name}_scales"] = rng.integers(low, high, scales).astype(np.uint8)
    return tensors


def number(code, scale):
    """e2m1: a sign, two bits of exponent with a bias of 1, one bit of mantissa; times 2^(s-127)."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return (-1) ** sign * magnitude * 2.0 ** (int(scale) - 127)


def matrix(tensors, name, expert):
    """[in, out] in float64, from the nibbles: of a byte the lower one first."""
    blocks, scales = tensors[f"{name}_blocks"][expert], tensors[f"{name}_scales"][expert]
    out, groups = scales.shape
    values = np.empty((out, groups * 32))
    for row, column in np.ndindex(out, groups * 32):
        group, place = divmod(column, 32)
        byte = int(blocks[row, group, place // 2])
        values[row, column] = number((byte >> 4 * (place % 2)) & 15, scales[row, group])
    return values.T


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(("low", "high"), [(100, 140), (0, 5)])
def test_every_number_is_its_code_times_its_scale(low, high, as_array):
    """Also where scales are so small that products are subnormal."""
    tensors = mxfp4_tensors(low, high)
    given = {name: as_array(a) for name, a in tensors.items()}
    _, params = dropless.models.from_hf(CONFIG, given)
    experts = params["experts"]
    for expert in range(E):
        both = matrix(tensors, "experts.gate_up_proj", expert)
        for leaf, want in (
            ("gate", both[:, 0::2]),
            ("up", both[:, 1::2]),
            ("down", matrix(tensors, "experts.down_proj", expert)),
        ):
            got = np.asarray(experts[leaf][expert])
            assert got.dtype == ml_dtypes.bfloat16
            # Bits, so that -0 and subnormal numbers count: the definition's numbers are bfloat16s.
            assert got.tobytes() == want.astype(ml_dtypes.bfloat16).tobytes(), leaf
            np.testing.assert_array_equal(want.astype(ml_dtypes.bfloat16).astype(float), want)


def test_the_layer_is_that_of_the_bfloat16_checkpoint():
    tensors = mxfp4_tensors(118, 122)
    cfg, params = dropless.models.from_hf(CONFIG, tensors)
    plain = dropless.models.to_hf(cfg, params, CONFIG)
    assert plain["experts.gate_up_proj"].shape == (E, H, 2 * I)
    again = dropless.models.from_hf(CONFIG, plain)
    assert again[0] == cfg
    jax.tree.map(np.testing.assert_array_equal, again[1], params)


def unusual_tensors():
    """Every scale, blocks of nothing but zeros, and codes whose numbers other codes have too."""
    tensors = mxfp4_tensors(0, 256)
    tensors["experts.down_proj_blocks"][1, :, 0] = 0x80  # 0 and -0
    tensors["experts.down_proj_blocks"][2, :, 1] = 0x22  # the number 1 alone: codes 1 to 4 have it
    return tensors


@pytest.mark.parametrize("params_as", [np.asarray, jnp.asarray])
def test_o2_round_trip_is_bit_equal(params_as, tmp_path):
    tensors = unusual_tensors()
    dropless.models.save_checkpoint(tmp_path, iter(tensors.items()))
    source = dropless.models.open_checkpoint(tmp_path).block("")
    cfg, params = dropless.models.from_hf(CONFIG, source)
    packed = dropless.models.prepared_from_hf(CONFIG, source)
    assert isinstance(packed, dropless.models.MXFP4Experts)
    params = jax.tree.map(params_as, params)
    out = dropless.models.to_hf(cfg, params, CONFIG, prepared=packed)
    assert out.keys() == tensors.keys()
    for name, want in tensors.items():
        got = np.asarray(out[name])
        assert got.dtype == want.dtype and got.tobytes() == want.tobytes(), name


def test_float32_copies_of_the_numbers_are_the_same_numbers():
    tensors = mxfp4_tensors(100, 140)
    cfg, params = dropless.models.from_hf(CONFIG, tensors)
    params["experts"] = {n: a.astype(np.float32) for n, a in params["experts"].items()}
    packed = dropless.models.prepared_from_hf(CONFIG, tensors)
    out = dropless.models.to_hf(cfg, params, CONFIG, prepared=packed)
    assert out["experts.down_proj_blocks"] is packed.stored["experts.down_proj_blocks"]


@pytest.mark.parametrize("leaf", ["gate", "up", "down"])
def test_edited_numbers_are_no_mxfp4(leaf):
    """Not rounded to four bits in silence: the other tensors, biases, may change."""
    tensors = mxfp4_tensors(100, 140)
    cfg, params = dropless.models.from_hf(CONFIG, tensors)
    packed = dropless.models.prepared_from_hf(CONFIG, tensors)
    params["router"]["bias"] = params["router"]["bias"] + 1
    params["experts"]["down_bias"] = params["experts"]["down_bias"] * 2
    out = dropless.models.to_hf(cfg, params, CONFIG, prepared=packed)
    np.testing.assert_array_equal(out["router.bias"], params["router"]["bias"])

    edited = params["experts"][leaf].copy()
    edited[1, 3, 5] = -edited[1, 3, 5] + 1
    params["experts"][leaf] = edited
    name = "down_proj" if leaf == "down" else "gate_up_proj"
    with pytest.raises(ValueError, match=f"{name} of params .*expert 1.*without prepared="):
        dropless.models.to_hf(cfg, params, CONFIG, prepared=packed)
    plain = dropless.models.to_hf(cfg, params, CONFIG)
    assert f"experts.{name}" in plain and f"experts.{name}_blocks" not in plain


def test_stored_experts_of_another_block_are_refused():
    tensors = mxfp4_tensors()
    cfg, params = dropless.models.from_hf(CONFIG, tensors)
    packed = dropless.models.prepared_from_hf(CONFIG, tensors)
    short = {name: value[:2] for name, value in packed.stored.items()}
    for stored in short, {**packed.stored, "experts.up_proj_blocks": short}:
        other = dropless.models.MXFP4Experts(stored)
        with pytest.raises(ValueError, match="prepared: expected"):
            dropless.models.to_hf(cfg, params, CONFIG, prepared=other)
    x = jnp.zeros((4, H), jnp.bfloat16)
    with pytest.raises(TypeError, match="prepared must come from .*got MXFP4Experts"):
        dropless.moe(x, jax.tree.map(jnp.asarray, params), cfg, prepared=packed)


def test_scales_beyond_bfloat16_are_infinite_or_nan():
    tensors = mxfp4_tensors()
    tensors["experts.down_proj_blocks"][0, 0, 0, 0] = 0x74  # codes of 2 and 6
    tensors["experts.down_proj_scales"][0, 0, 0] = 254
    tensors["experts.down_proj_scales"][1, 0, 0] = 255
    _, params = dropless.models.from_hf(CONFIG, tensors)
    down = np.asarray(params["experts"]["down"], np.float32)
    assert np.isposinf(down[0, :2, 0]).all()
    assert np.isnan(down[1, :32, 0]).all() and not np.isnan(down[1, 32:, 0]).any()


def test_no_more_than_one_tensor_is_held_beside_the_result():
    h, i, e = 256, 320, 12
    config = CONFIG | {"hidden_size": h, "intermediate_size": i, "num_local_experts": e}
    cfg, _ = dropless.models.block_config(config)
    params = jax.tree.map(np.asarray, dropless.init(jax.random.key(0), h, cfg))
    tensors = dropless.models.to_hf(cfg, params, config)
    rng = np.random.default_rng(1)
    for name, width, out in ("gate_up_proj", h, 2 * i), ("down_proj", i, h):
        del tensors[f"experts.{name}"]
        blocks = (e, out, width // 32)
        tensors[f"experts.{name}_blocks"] = rng.integers(0, 256, (*blocks, 16), np.uint8)
        tensors[f"experts.{name}_scales"] = rng.integers(110, 130, blocks).astype(np.uint8)
    tracemalloc.start()
    _, got = dropless.models.from_hf(config, tensors)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    result = sum(leaf.nbytes for leaf in jax.tree.leaves(got))
    gate_up = 2 * e * h * 2 * i  # bytes, in bfloat16
    # An expert's codes on the way are 64-bit indices of a table: 8 bytes each, twice.
    assert peak < result + gate_up + 16 * h * 2 * i + 200_000


def test_o1_blocks_and_scales_come_together_in_their_shapes():
    tensors = mxfp4_tensors()

    def refused(text, **changed):
        named = {f"experts.{name}": a for name, a in changed.items()}
        bad = {n: a for n, a in (tensors | named).items() if a is not None}
        with pytest.raises(ValueError, match=text):
            dropless.models.from_hf(CONFIG, bad)

    refused(r"missing: experts.down_proj_scales \(3, 64, 3\)", down_proj_scales=None)
    # Scales alone are no tensor of the block.
    refused("unexpected: experts.down_proj_scales", down_proj_blocks=None)
    refused(
        r"down_proj_blocks expected \(3, 64, 3, 16\), got \(3, 64, 3, 8\)",
        down_proj_blocks=tensors["experts.down_proj_blocks"][..., :8],
    )
    refused(
        "down_proj_scales: expected uint8, got float32",
        down_proj_scales=tensors["experts.down_proj_scales"].astype(np.float32),
    )
    refused("unexpected: experts.down_proj", down_proj=np.zeros((E, I, H), np.float32))
    with pytest.raises(ValueError, match=r"experts.gate_up_proj_blocks: .*multiple.*says 65"):
        dropless.models.from_hf(CONFIG | {"hidden_size": 65}, tensors)
