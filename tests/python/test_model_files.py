"""Checkpoints on disk, one tensor at a time, and FP8 ones."""

from __future__ import annotations

import dataclasses
import functools
import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dropless

H, I, E, S = 150, 140, 3, 140  # noqa: E741 - more than a block of 128, and no multiple of one
CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": H,
    "moe_intermediate_size": I,
    "n_routed_experts": E,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
PREFIX = "model.layers.3.mlp."


def block_tensors(seed=0):
    """The block's tensors in float32, one linear for each expert."""
    cfg, _ = dropless.models.block_config(CONFIG)
    rng = np.random.default_rng(seed)
    params = dropless.init(jax.random.key(0), H, cfg)
    params = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(np.float32), params)
    return cfg, params, dropless.models.to_hf(cfg, params, CONFIG, layout="per_expert")


def fp8_tensors():
    """The same with FP8 matrices of experts, as DeepSeek's files have them, and their values."""
    _, _, tensors = block_tensors()
    rng = np.random.default_rng(5)
    stored, values = {}, {}
    for name, w in tensors.items():
        if not name.startswith(("experts", "shared_experts")):
            stored[name] = values[name] = w
            continue
        rows, columns = (-(-n // 128) for n in w.shape)
        scale = rng.uniform(0.5, 2.0, (rows, columns)).astype(np.float32)
        wide = np.kron(scale, np.ones((128, 128), np.float32))[: w.shape[0], : w.shape[1]]
        stored[name] = (w / wide).astype(ml_dtypes.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        values[name] = stored[name].astype(np.float32) * wide
    return stored, values


@pytest.fixture
def folder(tmp_path):
    """Two files and their index; the tensors of another layer beside those of the block."""
    _, _, tensors = block_tensors()
    named = {PREFIX + name: a for name, a in tensors.items()}
    named["model.layers.4.mlp.gate.weight"] = np.zeros((E, H), np.float32)
    weight_map = {}
    for part in range(2):
        names = sorted(named)[part::2]
        file = f"model-{part + 1:05d}-of-00002.safetensors"
        save_file({name: named[name] for name in names}, tmp_path / file)
        weight_map |= dict.fromkeys(names, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_a_sharded_checkpoint_gives_the_params_of_its_tensors(folder):
    _, params, _ = block_tensors()
    for path in (folder, folder / "model.safetensors.index.json"):
        checkpoint = dropless.models.open_checkpoint(path)
        _, got = dropless.models.from_hf(CONFIG, checkpoint.block(PREFIX))
        jax.tree.map(np.testing.assert_array_equal, got, params)


def test_every_tensor_is_read_once_and_none_before_the_names_fit(folder):
    class Counted(dropless.models.Checkpoint):
        reads: list[str] = []  # noqa: RUF012

        def __getitem__(self, name):
            self.reads.append(name)
            return super().__getitem__(name)

    block = dropless.models.open_checkpoint(folder).block(PREFIX)
    counted = Counted({name: block._places[name] for name in block})
    dropless.models.from_hf(CONFIG, counted)
    assert sorted(counted.reads) == sorted(block)
    counted.reads.clear()
    with pytest.raises(ValueError, match="missing: experts.3"):
        dropless.models.from_hf(CONFIG | {"n_routed_experts": E + 1}, counted)
    assert not counted.reads


@pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int32, np.float16]
)
def test_dtypes_and_bits_of_a_single_file(tmp_path, dtype):
    tensors = {
        "a": np.arange(-7, 8).astype(dtype).reshape(3, 5),
        "scalar": np.array(3).astype(dtype),
        "nothing": np.zeros((0, 4), dtype),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = dropless.models.open_checkpoint(tmp_path)
    assert checkpoint.keys() == tensors.keys()
    for name, want in tensors.items():
        got = checkpoint[name]
        assert got.dtype == want.dtype == checkpoint.dtype_of(name)
        assert got.shape == want.shape == checkpoint.shape_of(name)
        assert got.tobytes() == want.tobytes()


def damaged(header, data=b"\0" * 64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (damaged({"a": ENTRY})[:-1], "ends within 'a'"),
        (damaged({"a": ENTRY}, b"\0" * 65), r"expected \d+ bytes, got \d+"),
        (damaged({"a": ENTRY | {"data_offsets": [64, 0]}}), r"'a' of shape \(4, 4\) has -64 bytes"),
        (damaged({"a": ENTRY | {"data_offsets": [8, 72]}}, b"\0" * 72), "'a' begins at byte"),
        (damaged({"a": ENTRY | {"data_offsets": [-64, 0]}}), "integers >= 0 of 'a'"),
        (damaged({"a": ENTRY | {"data_offsets": [0, 1e2]}}), "integers >= 0 of 'a'"),
        (damaged({"a": ENTRY | {"shape": [2**40, 2**40]}}), "'a' of shape .* has 64 bytes"),
        (damaged({"a": ENTRY | {"shape": [-4, -4]}}), "integers >= 0 of 'a'"),
        (damaged({"a": ENTRY | {"shape": 4}}), "expected dtype, shape and data_offsets of 'a'"),
        (damaged({"a": ENTRY | {"dtype": "F4"}}), "'a' has dtype F4; known"),
        (damaged({"a": ENTRY | {"dtype": ["F32"]}}), "'a' has dtype"),
        (damaged({"a": "F32"}), "expected dtype, shape and data_offsets of 'a'"),
        (damaged({"a": ENTRY, "b": ENTRY}), "'b' begins at byte"),  # both of the same bytes
        (damaged([ENTRY]), "a JSON object; got list"),
        (damaged(b'{"a": {}, "a": {}}'), "'a' occurs twice"),
        (damaged(b"\xff\xfe{}"), "expected a safetensors file"),
        (damaged(b"[" * 100_000), "expected a safetensors file"),
        ((2**63).to_bytes(8, "little") + b"{}", "expected a safetensors file"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, content, text):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"(?s)model.safetensors: .*{text}"):
        dropless.models.open_checkpoint(file)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda index: b"{", ValueError, "expected a safetensors index"),
        (lambda index: b"[]", ValueError, "a JSON object; got list"),
        (lambda index: {}, ValueError, "an object with 'weight_map'"),
        (lambda index: {"weight_map": {}}, ValueError, "an object with 'weight_map'"),
        (lambda index: {"weight_map": {"a": 1}}, ValueError, "a file of its own folder for 'a'"),
        (lambda index: {"weight_map": {"a": "../x"}}, ValueError, "own folder for 'a', got '../x'"),
        (lambda index: {"weight_map": {"a": "none.safetensors"}}, FileNotFoundError, "none.safe"),
        (
            lambda index: {"weight_map": dict(list(index["weight_map"].items())[1:])},
            ValueError,
            "does not name 'model.layers",
        ),
    ],
)
def test_a_bad_index_is_an_error_that_names_it(folder, change, error, text):
    path = folder / "model.safetensors.index.json"
    changed = change(json.loads(path.read_text()))
    path.write_bytes(changed if isinstance(changed, bytes) else json.dumps(changed).encode())
    with pytest.raises(error, match=text):
        dropless.models.open_checkpoint(path)


def test_a_tensor_in_two_files_is_refused(folder):
    first, second = sorted(folder.glob("*.safetensors"))
    tensors = dict(load_file(second))
    save_file(tensors | dict(list(load_file(first).items())[:1]), second)
    with pytest.raises(ValueError, match="does not name"):
        dropless.models.open_checkpoint(folder)


@pytest.mark.parametrize("layout", ["fused", "per_expert"])
def test_no_more_than_one_tensor_is_held_beside_the_result(tmp_path, layout):
    sizes = {"hidden_size": 192, "moe_intermediate_size": 320, "num_experts": 24}
    config = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, **sizes}
    cfg, model_dim = dropless.models.block_config(config)
    params = jax.tree.map(np.asarray, dropless.init(jax.random.key(0), model_dim, cfg))
    tensors = dropless.models.to_hf(cfg, params, config, layout=layout)
    save_file(tensors, tmp_path / "model.safetensors")
    result = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest = max(a.nbytes for a in tensors.values())
    checkpoint = dropless.models.open_checkpoint(tmp_path)
    tracemalloc.start()
    _, got = dropless.models.from_hf(config, checkpoint)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    jax.tree.map(np.testing.assert_array_equal, got, params)
    # Names, shapes and Python itself take some kilobytes.
    assert result < peak < result + largest + 200_000


def test_what_is_no_checkpoint_is_named(folder, tmp_path):
    open_checkpoint = dropless.models.open_checkpoint
    with pytest.raises(ValueError, match="prefix 'layers.9.'.*there are model.layers.3"):
        open_checkpoint(folder).block("layers.9.")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match="model.safetensors.index.json or"):
        open_checkpoint(empty)
    for content in (b"", b"abc", b"\xff" * 20, b"\x02\x00\x00\x00\x00\x00\x00\x00{]"):
        (empty / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="expected a safetensors file"):
            open_checkpoint(empty)
    save_file({"a": np.ones(8, np.float32)}, empty / "model.safetensors")
    whole = (empty / "model.safetensors").read_bytes()
    (empty / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="ends within 'a'"):
        open_checkpoint(empty)["a"]
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["lost"] = next(iter(weight_map.values()))
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="names 'lost'"):
        open_checkpoint(index)


def test_fp8_matrices_become_bfloat16_rounded_once():
    stored, values = fp8_tensors()
    _, params = dropless.models.from_hf(CONFIG, stored)
    rounded = {
        name: a.astype(ml_dtypes.bfloat16) if f"{name}_scale_inv" in stored else a
        for name, a in values.items()
    }
    _, want = dropless.models.from_hf(CONFIG, rounded)
    jax.tree.map(np.testing.assert_array_equal, params, want)
    assert params["experts"]["gate"].dtype == ml_dtypes.bfloat16


def test_fp8_codes_and_scales_reach_the_gemms_as_they_are():
    stored, values = fp8_tensors()
    prepared = dropless.models.prepared_from_hf(CONFIG, stored)
    for leaf, linear in ("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj"):
        for group, names in (
            (prepared, [f"experts.{e}.{linear}.weight" for e in range(E)]),
            (prepared.shared, [f"shared_experts.{linear}.weight"]),
        ):
            weight = getattr(group, leaf)
            codes = np.stack([stored[n] for n in names])
            scales = np.stack([stored[f"{n}_scale_inv"] for n in names])
            assert np.asarray(weight.q_t).tobytes() == codes.tobytes()
            np.testing.assert_array_equal(weight.q, codes.swapaxes(1, 2))
            np.testing.assert_array_equal(weight.scale_t, scales)
            np.testing.assert_array_equal(weight.scale, scales.swapaxes(1, 2))

    # And the layer computes with them: as with the same values quantised anew, but for what a
    # second quantisation loses, a code's half step.
    cfg, params = dropless.models.from_hf(CONFIG, values)
    cfg = dataclasses.replace(cfg, precision="fp8")
    x = jnp.asarray(np.random.default_rng(3).standard_normal((11, H)), jnp.bfloat16)
    y, _ = dropless.moe(x, params, cfg, prepared=prepared)
    again, _ = dropless.moe(x, params, cfg)
    error = np.sqrt(np.mean((np.float64(y) - np.float64(again)) ** 2) / np.mean(np.float64(y) ** 2))
    assert 0 < error < 0.5 * 2.0**-4 * np.sqrt(3)  # three matrices on the way to y


@pytest.mark.parametrize("width", [I, 128])
@pytest.mark.parametrize("layout", ["fused", "per_expert"])
def test_fp8_files_are_written_as_they_were_read(layout, width):
    """Codes and scales bit for bit; in ``fused`` only where gate and up share no block."""
    config = CONFIG | {"moe_intermediate_size": width}
    rng = np.random.default_rng(7)
    cfg, _ = dropless.models.block_config(config)
    params = dropless.init(jax.random.key(0), H, cfg)
    plain = dropless.models.to_hf(cfg, jax.tree.map(np.asarray, params), config, layout=layout)
    source = {}
    for name, w in plain.items():
        source[name] = w
        if name.startswith(("experts", "shared_experts")):
            codes = rng.integers(0, 256, w.shape, np.uint8)
            codes[codes & 0x7F == 0x7F] = 0  # no NaN
            source[name] = codes.view(ml_dtypes.float8_e4m3fn)
            blocks = (*w.shape[:-2], *(-(-n // 128) for n in w.shape[-2:]))
            source[f"{name}_scale_inv"] = rng.uniform(0.5, 2, blocks).astype(np.float32)
    cfg, params = dropless.models.from_hf(config, source)
    if layout == "fused" and width % 128:
        with pytest.raises(ValueError, match=f"gate_up_proj: expected gate and up.*I = {width}"):
            dropless.models.prepared_from_hf(config, source)
        return
    prepared = dropless.models.prepared_from_hf(config, source)
    out = dropless.models.to_hf(cfg, params, config, layout=layout, prepared=prepared)
    assert out.keys() == source.keys()
    for name, want in source.items():
        got = np.asarray(out[name])
        assert got.dtype == want.dtype and got.shape == want.shape, name
        assert got.tobytes() == want.tobytes(), name


def test_trained_parameters_are_written_in_fp8_when_asked():
    cfg, params, plain = block_tensors()
    prepared = dropless.prepare_experts(params, dataclasses.replace(cfg, precision="fp8"))
    out = dropless.models.to_hf(cfg, params, CONFIG, layout="per_expert", prepared=prepared)
    assert out.keys() == plain.keys() | {
        f"{n}_scale_inv" for n in plain if n.startswith(("experts", "shared_experts"))
    }
    # What is read back is the quantised number, rounded to bfloat16.
    _, read = dropless.models.from_hf(CONFIG, out)
    for leaf in ("gate", "up", "down"):
        w, got = params["experts"][leaf], np.asarray(read["experts"][leaf], np.float32)
        step = np.maximum(2.0**-4 * np.abs(w), np.abs(w).max() * 2.0**-9 / 448)
        assert (np.abs(got - w) <= step + 2.0**-9 * np.abs(w)).all(), leaf
    np.testing.assert_array_equal(out["gate.weight"], plain["gate.weight"])


def test_prepared_of_another_kind_is_refused():
    cfg, params, _ = block_tensors()
    to_hf = functools.partial(dropless.models.to_hf, cfg, params, CONFIG)
    bf16 = dropless.prepare_experts(params, dataclasses.replace(cfg, precision="bf16"))
    with pytest.raises(ValueError, match="prepared: expected precision \"fp8\", got 'bf16'"):
        to_hf(prepared=bf16)
    with pytest.raises(TypeError, match=r"prepared: expected dropless.PreparedExperts, got dict"):
        to_hf(prepared={})
    other = dataclasses.replace(cfg, num_experts=E + 1, precision="fp8")
    small = dropless.prepare_experts(dropless.init(jax.random.key(0), H, other), other)
    with pytest.raises(
        ValueError, match=r"prepared: expected experts.gate of shape \(3, 150, 140\)"
    ):
        to_hf(prepared=small)


def test_fp8_tensors_and_scales_come_together():
    stored, _ = fp8_tensors()
    name = "experts.1.up_proj.weight"
    without = {n: a for n, a in stored.items() if n != f"{name}_scale_inv"}
    with pytest.raises(ValueError, match=f"missing: {name}_scale_inv \\(2, 2\\)"):
        dropless.models.from_hf(CONFIG, without)
    odd = stored | {f"{name}_scale_inv": np.ones((2, 3), np.float32)}
    with pytest.raises(ValueError, match=f"{name}_scale_inv expected \\(2, 2\\), got \\(2, 3\\)"):
        dropless.models.from_hf(CONFIG, odd)
    _, _, plain = block_tensors()
    with pytest.raises(ValueError, match="expected float8_e4m3fn.*prepare_experts"):
        dropless.models.prepared_from_hf(CONFIG, plain)
    blocks = {"weight_block_size": [64, 128]}
    with pytest.raises(ValueError, match="weight_block_size.*128, 128.*64, 128"):
        dropless.models.from_hf(CONFIG | {"quantization_config": blocks}, stored)
