"""Checkpoints written tensor by tensor, and read again by us and by the format's own library."""

from __future__ import annotations

import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import dropless

CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 20,
    "moe_intermediate_size": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}


def model(layers=3):
    """Names and tensors of several blocks."""
    cfg, model_dim = dropless.models.block_config(CONFIG)
    for layer in range(layers):
        params = dropless.init(jax.random.key(layer), model_dim, cfg)
        for name, value in dropless.models.to_hf(cfg, params, CONFIG, layout="per_expert").items():
            yield f"model.layers.{layer}.mlp.{name}", np.asarray(value)


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        assert np.asarray(got[name]).tobytes() == np.asarray(value).tobytes(), name


@pytest.mark.parametrize("file_bytes", [10**9, 9_000, 1])
def test_blocks_written_in_files_of_any_size_are_read_again(tmp_path, file_bytes):
    want = dict(model())
    dropless.models.save_checkpoint(tmp_path, model(), file_bytes=file_bytes)
    assert_same(dropless.models.open_checkpoint(tmp_path), want)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == {10**9: 1, 1: len(want)}.get(file_bytes, len(files)) > 0
    by_library = {n: a for file in files for n, a in load_file(file).items()}
    assert_same(by_library, want)
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(a.nbytes for a in want.values())
        assert set(index["weight_map"].values()) == {file.name for file in files}
    assert not list(tmp_path.glob("*.unfinished"))
    block = dropless.models.open_checkpoint(tmp_path).block("model.layers.1.mlp.")
    cfg, params = dropless.models.from_hf(CONFIG, block)
    again = dropless.models.to_hf(cfg, params, CONFIG, layout="per_expert")
    assert_same(again, dict(block))


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.uint8, np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
     ml_dtypes.float8_e8m0fnu],
)  # fmt: skip
def test_every_dtype_order_and_shape_keeps_its_bits(tmp_path, dtype):
    values = np.random.default_rng(0).integers(0, 2, (3, 5)).astype(dtype)
    tensors = {
        "plain": values,
        "transposed": values.T,
        "strided": values[::2, ::3],
        "scalar": values[0, 0],
        "nothing": values[:0],
        "of_jax": jnp.asarray(values),
    }
    dropless.models.save_checkpoint(tmp_path / "new" / "folder", tensors)
    assert_same(dropless.models.open_checkpoint(tmp_path / "new" / "folder"), tensors)


def test_no_tensor_is_held_after_it_was_written(tmp_path):
    size = 1_000_000

    def tensors():
        for i in range(20):
            yield f"t{i}", np.full(size, i, np.uint8)

    tracemalloc.start()
    dropless.models.save_checkpoint(tmp_path, tensors(), file_bytes=5 * size)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The generator's last one and the next, and the room of a header.
    assert peak < 2 * size + 2 * (1 << 20) + 200_000
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


def test_o1_a_name_that_comes_twice_leaves_nothing_behind(tmp_path):
    pairs = [("a", np.ones(3)), ("b", np.ones(2)), ("a", np.zeros(3))]
    for file_bytes in (10**6, 1):
        with pytest.raises(ValueError, match="'a' comes twice"):
            dropless.models.save_checkpoint(tmp_path, iter(pairs), file_bytes=file_bytes)
        assert not list(tmp_path.iterdir())


def test_n2_what_cannot_be_written_is_named(tmp_path):
    save = dropless.models.save_checkpoint
    with pytest.raises(ValueError, match="'a' has dtype complex128; known"):
        save(tmp_path, {"a": np.ones(2, complex)})
    with pytest.raises(ValueError, match="expected at least one, got none"):
        save(tmp_path, {})
    with pytest.raises(TypeError, match="expected names, got 3"):
        save(tmp_path, {3: np.ones(2)})
    with pytest.raises(ValueError, match="file_bytes: expected an int >= 1, got 0"):
        save(tmp_path, {"a": np.ones(2)}, file_bytes=0)
    assert not list(tmp_path.iterdir())
    save(tmp_path, {"a": np.ones(2)})
    with pytest.raises(FileExistsError, match=r"model.safetensors: exists"):
        save(tmp_path, {"b": np.ones(2)})
    assert_same(dropless.models.open_checkpoint(tmp_path), {"a": np.ones(2)})
