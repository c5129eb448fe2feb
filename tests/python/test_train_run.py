"""A run of the training program from start to report, and the flags that choose what is trained."""

from __future__ import annotations

import base64
import html.parser
import io
import itertools
import json
import math

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dropless.train import device, loop, plots
from dropless.train.cli import main
from train_runs import (
    CHOICES,
    EXPERTS,
    LAYERS,
    SMALL,
    TOKENS,
    compiled_once,
    records,
    untimed,
    write_text,
)

STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def _parts_are_timed_once(tmp_path_factory):
    """The parts of a step are compiled for one run only; the others' reports show made-up times."""
    patch = pytest.MonkeyPatch()
    timed, first = loop.time_parts, itertools.count()

    def time_parts(*arguments):
        return timed(*arguments) if next(first) == 0 else {"experts and router": 1.0, "rest": 2.0}

    patch.setattr(loop, "time_parts", time_parts)
    with compiled_once(tmp_path_factory.mktemp("compiled")):
        yield
    patch.undo()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def train(text, out, *flags, steps=STEPS):
    arguments = ["--text", text, "--out", out, *SMALL, "--steps", steps, "--eval-every", 5, *flags]
    assert main([str(argument) for argument in arguments]) == 0
    return records(out)


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    """The run that most tests look at: its folder and its records."""
    out = tmp_path_factory.mktemp("run") / "out"
    return out, train(text, out, "--checkpoint-every", 4)


def test_metrics_hold_one_complete_object_a_step(run):
    _, rows = run
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert set(row) - {"held_out_loss"} == {
            "step", "loss", "tokens_per_second", "step_seconds", "lr", "grad_norm",
            "load_balance_loss", "z_loss", "dropped_tokens", "expert_counts",
        }  # fmt: skip
        assert np.shape(row["expert_counts"]) == (LAYERS, EXPERTS)
        assert [sum(counts) for counts in row["expert_counts"]] == [CHOICES] * LAYERS
        assert row["dropped_tokens"] == 0
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(TOKENS)
        assert row["load_balance_loss"] + 1e-6 >= 1 and row["load_balance_loss"] <= EXPERTS
        assert row["grad_norm"] > 0 and row["z_loss"] > 0 and row["lr"] > 0
    assert [row["step"] for row in rows if "held_out_loss" in row] == [5, 10, 12]


def test_losses_are_nats_a_byte_and_start_near_a_uniform_guess(run):
    _, rows = run
    # Logits of a fresh model have a variance of about 1, worth half a nat over log(256).
    assert math.log(256) - 0.3 < rows[0]["loss"] < math.log(256) + 1.0
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3


def test_the_learning_rate_warms_up_on_the_presets_schedule(run):
    _, rows = run
    rates = [row["lr"] for row in rows]
    np.testing.assert_allclose(np.diff(rates), rates[0], rtol=1e-4)


def test_tensorboard_reads_the_same_figures(run):
    out, rows = run
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    for tag, name in [
        ("train/loss", "loss"),
        ("train/grad_norm", "grad_norm"),
        ("experts/load_balance_loss", "load_balance_loss"),
    ]:
        scalars = events.Scalars(tag)
        assert [scalar.step for scalar in scalars] == [row["step"] for row in rows]
        np.testing.assert_allclose([s.value for s in scalars], [row[name] for row in rows], 1e-6)
    assert [s.step for s in events.Scalars("held_out/loss")] == [5, 10, 12]
    assert len(events.Scalars("experts/layer_1_max_over_mean")) == STEPS


class _Images(html.parser.HTMLParser):
    """Collects pictures, and fails on a page that needs the network."""

    def __init__(self):
        super().__init__()
        self.pictures, self.cells = [], []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        assert "href" not in attributes
        if tag == "img":
            kind, _, content = attributes["src"].partition(",")
            assert kind == "data:image/png;base64"
            self.pictures.append(base64.b64decode(content))

    def handle_data(self, data):
        self.cells.append(data.strip())


def test_the_report_opens_and_says_what_the_metrics_say(run):
    out, rows = run
    page = _Images()
    page.feed((out / "report.html").read_text(encoding="utf-8"))
    (picture,) = page.pictures
    assert picture == (out / "report.png").read_bytes()
    image = Image.open(io.BytesIO(picture))
    image.load()
    assert image.width > 1000 and image.height > 500
    assert len(set(image.convert("L").resize((60, 40)).tobytes())) > 20  # not a blank page
    assert f"{rows[-1]['held_out_loss']:.3f} nats per byte" in page.cells
    for cell in ("attention", "experts and router", "optimiser", "num_experts", "jax", "compile"):
        assert cell in page.cells


def test_the_drawn_load_is_each_experts_share():
    counts = np.random.default_rng(0).integers(0, 50, (7, LAYERS, EXPERTS))
    load = plots.relative_load([{"expert_counts": c.tolist()} for c in counts], columns=100)
    expected = counts / counts.mean(-1, keepdims=True)
    np.testing.assert_allclose(load, np.moveaxis(expected, 0, -1))
    few = plots.relative_load([{"expert_counts": c.tolist()} for c in counts], columns=3)
    assert few.shape == (LAYERS, EXPERTS, 3)
    np.testing.assert_allclose(few.mean(1), 1)


def test_the_run_file_holds_every_setting(run, text):
    out, _ = run
    stored = json.loads((out / "run.json").read_text())
    assert stored["config"]["text"] == [str(text)]
    assert stored["config"]["model_dim"] == 24
    assert stored["data"]["train_bytes"] + stored["data"]["held_out_bytes"] == text.stat().st_size


def test_the_same_seed_gives_the_same_bits_and_another_does_not(run, text, tmp_path, capfd):
    out, _ = run
    train(text, tmp_path / "same", "--checkpoint-every", 100)
    assert untimed(tmp_path / "same") == untimed(out)
    said = capfd.readouterr().out
    assert "device: 1 x " in said and "(cpu): " in said
    assert "1 files" in said and "each file is held out" in said
    assert "step 12/12  loss " in said and " tokens/s load " in said
    assert "dropped tokens: 0 in all steps" in said
    other = train(text, tmp_path / "other", "--seed", 1, steps=1)
    assert other[0]["loss"] != records(out)[0]["loss"]


@pytest.mark.parametrize(
    ("platform", "driver", "plugin", "forced", "words"),
    [
        ("cpu", None, False, None, "no NVIDIA GPU is visible"),
        (
            "cpu",
            "580.65",
            False,
            None,
            "(driver 580.65), BUT IT IS NOT USED: jax has no CUDA",
        ),
        ("cpu", "580.65", True, None, "jax's CUDA plugin did not start"),
        ("cpu", "580.65", True, "cpu", "JAX_PLATFORMS=cpu asks for it"),
        ("gpu", "580.65", True, None, "driver 580.65"),
    ],
)
def test_the_cpu_is_never_chosen_silently(monkeypatch, platform, driver, plugin, forced, words):
    monkeypatch.setattr(device, "_has_cuda_plugin", lambda: plugin)
    if forced is None:
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    else:
        monkeypatch.setenv("JAX_PLATFORMS", forced)
    assert words in device._reason(platform, driver)


def test_names_in_brackets_are_no_markup(text, tmp_path, capsys):
    out = tmp_path / "[" / "red] [bold]"  # to rich "[/red]" ends a style that never began
    train(text, out, steps=2)
    assert f"report: {out}/report.html" in capsys.readouterr().out


def test_dense_has_no_expert_figures(text, tmp_path):
    rows = train(text, tmp_path / "out", "--ffn", "dense")
    for row in rows:
        assert row["expert_counts"] == [] and row["dropped_tokens"] is None
        assert row["load_balance_loss"] is None and row["z_loss"] is None
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3


def test_drop_counts_what_a_full_expert_turned_away(text, tmp_path):
    rows = train(
        text, tmp_path / "out", "--overflow", "drop", "--expert-capacity-factor", "1.0", steps=4
    )
    capacity = -(-CHOICES // EXPERTS)
    for row in rows:
        over = np.maximum(np.array(row["expert_counts"]) - capacity, 0).sum()
        assert row["dropped_tokens"] == over
    assert sum(row["dropped_tokens"] for row in rows) > 0


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_low_precision_stays_near_float32(run, text, tmp_path, precision):
    """Both start from the same parameters: their losses differ by rounding.

    A bfloat16 activation is off by 2^-9 relative, an e4m3 operand by 2^-4 (fp8 keeps bfloat16
    activations outside its products). A loss is a mean over 64 tokens of a nonlinear function of a
    sum over dozens of such errors, which average out; the figures below are one operand's error.
    """
    limit = {"bf16": 2.0**-8, "fp8": 2.0**-4}[precision]
    rows = train(text, tmp_path / "out", "--precision", precision)
    exact = records(run[0])
    assert rows[0]["loss"] == pytest.approx(exact[0]["loss"], rel=limit)
    assert rows[-1]["loss"] == pytest.approx(exact[-1]["loss"], rel=limit)
    assert rows[0]["loss"] != exact[0]["loss"]


def test_two_data_parallel_devices_train_as_one_does(run, text, tmp_path):
    rows = train(text, tmp_path / "out", "--mesh", "data=2")
    exact = records(run[0])
    # Float32 sums in another order, carried through a dozen steps.
    np.testing.assert_allclose(
        [row["loss"] for row in rows], [row["loss"] for row in exact], rtol=1e-4
    )
    assert rows[0]["expert_counts"] == exact[0]["expert_counts"]


def test_a_loss_that_is_not_finite_stops_the_run(text, tmp_path, capsys):
    flags = ["--learning-rate", "1e38", "--warmup-steps", "0", *SMALL, "--steps", "40"]
    assert main(["--text", str(text), "--out", str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err
    assert "not finite at step" in error and "there is no checkpoint yet" in error
    assert "A lower --learning-rate than 1e+38" in error
    rows = records(tmp_path / "out")
    assert None in (rows[-1]["loss"], rows[-1]["grad_norm"])
    assert all(row["loss"] is not None for row in rows[:-1])
    assert not (tmp_path / "out" / "report.html").exists()
