"""The whole of what `make train` trains, once: three minutes of two cores.

Not in `make test`; `.ci/run` runs it on the oldest jax served.
"""

from __future__ import annotations

import html.parser
import json
import os
import pathlib
import resource
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import dropless
from dropless.train.config import PRESETS

# Seconds that `make train` may take on two cores, of a fresh clone; this is the larger part of it.
# Processor time of both is held against it, which others on the machine do not lengthen.
LIMIT = 8 * 60
CORES = 2
# Nats per byte that the preset must reach. Single bytes tell about 3.2.
LOSS = 2.2


pytestmark = pytest.mark.timeout(4 * LIMIT)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of a run with no flag but where to put it: the standard library's sources."""
    folder = tmp_path_factory.mktemp("tiny") / "out"
    package = pathlib.Path(dropless.__file__).parent.parent
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(package)}
    command = [sys.executable, "-m", "dropless.train", "--preset", "tiny", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime + used.ru_stime < CORES * LIMIT
    assert done.returncode == 0, done.stderr
    assert "dropped tokens: 0 in all steps" in done.stdout
    return folder


@pytest.fixture(scope="module")
def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_falls_below_the_limit_within_the_presets_steps(rows):
    assert [row["step"] for row in rows] == list(range(1, PRESETS["tiny"].steps + 1))
    assert rows[0]["loss"] > 5  # it began by knowing nothing: log(256) is 5.5
    assert rows[-1]["held_out_loss"] < LOSS
    assert np.mean([row["loss"] for row in rows[-50:]]) < LOSS
    print(f"held out {rows[-1]['held_out_loss']:.3f}, trained {rows[-1]['loss']:.3f}")


def test_no_token_is_dropped_and_every_expert_serves_some(rows):
    preset = PRESETS["tiny"]
    for row in rows:
        assert row["dropped_tokens"] == 0
        counts = np.array(row["expert_counts"])
        assert counts.shape == (preset.layers, preset.num_experts)
        assert (counts.sum(1) == preset.tokens_per_step * preset.experts_per_token).all()
    last = np.sum([row["expert_counts"] for row in rows[-50:]], 0)
    assert last.min() > 0.1 * last.mean()  # the balance loss keeps all of them in use


def test_the_report_opens_and_says_the_held_out_loss(out, rows):
    class Text(html.parser.HTMLParser):
        said = ""

        def handle_data(self, data):
            self.said += data

    page = Text()
    page.feed((out / "report.html").read_text(encoding="utf-8"))
    assert f"{rows[-1]['held_out_loss']:.3f} nats per byte" in page.said
    with Image.open(out / "report.png") as image:
        image.load()
        assert image.width > 1000 and image.height > 500
