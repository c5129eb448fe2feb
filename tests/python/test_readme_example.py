"""Every Python snippet of the README and of docs/models.md runs as it is printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless

ROOT = Path(__file__).resolve().parents[2]
H = 32


def snippets(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def scaled_down(code):
    """The same calls with a model width and an expert width that run in a moment."""
    code = re.sub(r"\b2048\b", str(H), code)
    return re.sub(r"\bexpert_dim=1024\b", "expert_dim=24", code)


def test_readme():
    (code,) = snippets("README.md")
    names = {}  # a newcomer has nothing else
    exec(scaled_down(code), names)
    x = names["x"]
    assert isinstance(names["aux"], dropless.MoEAux)
    assert names["y"].shape == x.shape and bool(jnp.isfinite(names["y"]).all())
    want, _ = dropless.moe(x, names["params"], names["cfg"])
    assert np.array_equal(names["y"], want)
    layer = names["layer"]
    assert int(layer.aux.expert_counts.sum()) == 4 * 128 * layer.config.experts_per_token


def test_models_page():
    with np.load(ROOT / "tests/golden/olmoe.npz") as data:
        names = {
            "config": json.loads(str(data["meta"]))["config"],
            "tensors": {k[6:]: data[k] for k in data.files if k.startswith("param/")},
            "x": jnp.asarray(data["x"]),
        }
        y = data["y"]
    source = dict(names["tensors"])
    for code in snippets("docs/models.md"):
        exec(code, names)
    np.testing.assert_allclose(names["y"], y, rtol=0, atol=1e-5 * np.abs(y).max())
    assert names["tensors"].keys() == source.keys()
    assert all(np.array_equal(names["tensors"][name], source[name]) for name in source)


def test_models_page_lists_every_preset_and_family():
    page = (ROOT / "docs/models.md").read_text()
    row = r"^\| `(\S+)` " + r"\| (\d+) " * 4 + r"\| (\d+|-) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    listed = {name: tuple(int(size.replace("-", "0")) for size in sizes) for name, *sizes in rows}
    assert listed == {
        name: (
            *(model_dim, cfg.expert_dim, cfg.num_experts, cfg.experts_per_token),
            cfg.shared_expert_dim or 0,
        )
        for name, (cfg, model_dim) in dropless.models.presets.items()
    }
    assert all(f"`{family}`" in page for family in dropless.models.families)


@pytest.mark.parametrize("options", [{}, {"expert_capacity_factor": 1.0, "dropout": 0.1}])
def test_one_line(options):
    layer = dropless.MoELayer(num_experts=64, **options)
    x = jax.random.normal(jax.random.key(0), (4, 16, H))
    assert layer(x).shape == x.shape
    assert int(layer.aux.dropped_tokens) == 0
