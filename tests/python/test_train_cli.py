"""Bad input to the training program: one clear sentence, a non-zero exit, nothing overwritten."""

from __future__ import annotations

import errno
import json
import os
import pathlib

import jax
import pytest

from dropless.train import config as settings
from dropless.train import loop
from dropless.train.cli import main
from train_runs import SMALL, run_program, write_text

pytestmark = pytest.mark.any_jax


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text.txt")


def tree(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def refuse(capsys, tmp_path, *arguments) -> str:
    """Expects one sentence on stderr and no change on disk; returns the sentence."""
    before = tree(tmp_path)
    code = main([str(argument) for argument in arguments])
    error = capsys.readouterr().err
    assert code == 2
    assert tree(tmp_path) == before
    assert error.startswith("dropless-train: error: ")
    assert error.count("\n") == 1
    assert error.rstrip().endswith(".")
    return error


def test_a_missing_text_file_is_named(capsys, tmp_path):
    error = refuse(capsys, tmp_path, "--text", tmp_path / "nowhere.txt", "--out", tmp_path / "out")
    assert "nowhere.txt does not exist" in error


def test_an_empty_text_file_is_named(capsys, tmp_path):
    (tmp_path / "empty.txt").touch()
    error = refuse(capsys, tmp_path, "--text", tmp_path / "empty.txt", "--out", tmp_path / "out")
    assert "empty.txt is empty" in error


def test_a_folder_without_text_is_named(capsys, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "picture.bin").write_bytes(b"\x00\x01\x02" * 100)
    error = refuse(capsys, tmp_path, "--text", folder, "--out", tmp_path / "out")
    assert "holds no text file (1 files passed over)" in error


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (1, "shorter than one window: it has 1 tokens, and 17 are needed"),
        (16, "shorter than one window: it has 16 tokens, and 17 are needed"),
        (17, "too short for one window to train on and another to hold out"),
        (33, "it has 33 tokens, and 34 are needed"),
    ],
)
def test_a_text_shorter_than_its_windows_says_how_much_is_needed(capsys, tmp_path, size, words):
    (tmp_path / "short.txt").write_bytes(b"x" * size)
    error = refuse(
        capsys, tmp_path, "--text", tmp_path / "short.txt", "--out", tmp_path / "out", *SMALL
    )
    assert words in error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--preset", "huge"], "no preset 'huge'; the presets are tiny, small, olmoe-mini"),
        (["--steps", "0"], "--steps: must be a whole number of at least 1, not '0'"),
        (["--steps", "ten"], "not 'ten'"),
        (["--steps", "-3"], "not '-3'"),
        (["--seed", "-1"], "--seed: must be a whole number of at least 0"),
        (["--seed", str(2**63)], "--seed: must be at most 9223372036854775807"),
        (["--text", ""], "--text: must be a path, not ''"),
        (["--out", ""], "--out: must be a path, not ''"),
        (["--out", "out\udcff"], "--out: must be a path in UTF-8, not 'out\\udcff'"),
        (["--tokenizer", ""], "--tokenizer: must be a path, not ''"),
        (["--batch", "0"], "--batch-size/--batch: must be a whole number of at least 1, not '0'"),
        (["--seq", "-5"], "--seq-len/--seq: must be a whole number of at least 1, not '-5'"),
        (["--model-dim", "-24"], "--model-dim: must be a whole number of at least 1, not '-24'"),
        (["--eval-every", "1e3"], "--eval-every: must be a whole number of at least 1, not '1e3'"),
        (["--warmup-steps", ""], "--warmup-steps: must be a whole number of at least 0, not ''"),
        (["--layers", "5000"], "--layers must be at most 4096"),
        (["--num-experts", "16777217"], "--num-experts must be at most 16777216"),
        (["--model-dim", "6000000000"], "--model-dim must be at most 2147483647"),
        (["--expert-dim", "6000000000"], "--expert-dim must be at most 2147483647"),
        (["--batch", "134217728"], "--batch-size times --seq-len must be at most 2147483647"),
        (["--lr", "nan"], "-lr: must be a positive number that float32 can hold, not 'nan'"),
        (["--lr", "-1"], "--learning-rate/--lr: must be a positive number"),
        (["--lr", "1e39"], "must be a positive number that float32 can hold, not '1e39'"),
        (["--lr", "fast"], "must be a positive number that float32 can hold, not 'fast'"),
        (["--expert-capacity-factor", "0"], "must be a positive number that float32 can hold"),
        (["--precision", "fp4"], "invalid choice: 'fp4'"),
        (["--ffn", "sparse"], "invalid choice: 'sparse'"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--experts-per-token", "6"], "6 is more than 5"),
        (["--heads", "5"], "24 is not a multiple of 10"),
        (["--mesh", "data=two"], "--mesh must look like data=2"),
        (["--mesh", "rows=2"], "--mesh must look like data=2"),
        (["--mesh", "expert=4"], "--mesh expert=4 does not divide the 5 experts"),
        (["--mesh", "expert=5"], "does not offer yet"),
        (["--mesh", "data=3"], "--batch-size 4 does not divide over --mesh data=3"),
        (["--mesh", "data=64", "--batch-size", "64"], "needs 64 devices, but jax has"),
        (["--ffn", "dense", "--overflow", "drop"], "--overflow drop needs --ffn moe"),
        (["--tokenizer", "/nowhere/tokenizer.json"], "tokenizer.json does not exist"),
    ],
)
def test_a_bad_flag_is_explained(capsys, tmp_path, text, flags, words):
    error = refuse(capsys, tmp_path, "--text", text, "--out", tmp_path / "out", *SMALL, *flags)
    assert words in error


def test_a_file_that_is_no_tokenizer_is_named(capsys, tmp_path, text):
    flags = ["--tokenizer", text, *SMALL]
    error = refuse(capsys, tmp_path, "--text", text, "--out", tmp_path / "out", *flags)
    assert "not a file of the tokenizers library" in error


def test_resume_with_nothing_there(capsys, tmp_path, text):
    error = refuse(capsys, tmp_path, "--text", text, "--out", tmp_path / "out", "--resume")
    assert "there is no run to resume in" in error
    (tmp_path / "out").mkdir()
    refuse(capsys, tmp_path, "--text", text, "--out", tmp_path / "out", "--resume")
    assert "--out DIR" in refuse(capsys, tmp_path, "--resume")


def test_out_that_is_a_file_or_the_text_itself(capsys, tmp_path, text):
    assert "is a file" in refuse(capsys, tmp_path, "--text", text, "--out", text)
    error = refuse(capsys, tmp_path, "--text", text, "--out", text / "inside" / "out")
    assert "cannot be written: " in error and "text.txt is a file, not a folder" in error
    folder = tmp_path / "folder"
    folder.mkdir()
    write_text(folder / "a.txt")
    assert "is the text folder itself" in refuse(
        capsys, tmp_path, "--text", folder, "--out", folder
    )


def test_out_that_cannot_be_written(capsys, tmp_path, text, monkeypatch):
    long = refuse(capsys, tmp_path, "--text", text, "--out", tmp_path / ("a" * 300))
    assert "--out" in long and "cannot be used: File name too long" in long
    long = refuse(capsys, tmp_path, "--text", text, "--resume", "--out", tmp_path / ("a" * 300))
    assert "there is no run to resume" in long
    # Not by permissions, which do not bind everyone.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    error = refuse(capsys, tmp_path, "--text", text, "--out", tmp_path / "not" / "there")
    assert f"cannot be written: permission denied in {tmp_path}" in error


def stored_run(tmp_path: pathlib.Path, text: pathlib.Path) -> pathlib.Path:
    """A folder as a run leaves it at its very start."""
    out = tmp_path / "out"
    out.mkdir()
    config = settings.resolve("tiny", {"text": (str(text),), "seed": 7})
    settings.write_run_file(out, config, {"sha256": "of another text"})
    (out / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 5.0}) + "\n")
    return out


def test_a_folder_that_holds_a_run_is_not_overwritten(capsys, tmp_path, text):
    out = stored_run(tmp_path, text)
    error = refuse(capsys, tmp_path, "--text", text, "--out", out)
    assert "already holds a run" in error
    assert "--resume" in error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--preset", "small"], "its preset is tiny, but small was asked for"),
        (["--seed", "8"], "its seed is 7, but 8 was asked for"),
        (["--num-experts", "16"], "its num_experts is 8, but 16"),
        (["--ffn", "dense"], "its ffn is moe, but dense"),
        (["--precision", "bf16"], "its precision is auto, but bf16"),
        (["--mesh", "data=2"], "its mesh is data=1,expert=1, but data=2,expert=1"),
    ],
)
def test_resume_with_another_config_is_refused(capsys, tmp_path, text, flags, words):
    out = stored_run(tmp_path, text)
    error = refuse(capsys, tmp_path, "--out", out, "--resume", *flags)
    assert "a run of another config" in error
    assert words in error


def test_resume_with_another_text_is_refused(capsys, tmp_path, text):
    out = stored_run(tmp_path, text)
    error = refuse(capsys, tmp_path, "--out", out, "--resume")
    assert "the text is not the one that the run" in error


def test_a_damaged_run_file_is_named(capsys, tmp_path, text):
    out = stored_run(tmp_path, text)
    (out / "run.json").write_text("{")
    assert "run.json cannot be read" in refuse(capsys, tmp_path, "--out", out, "--resume")


@pytest.mark.parametrize(
    ("name", "value"), [("heads", 0), ("heads", "two"), ("steps", 2.5), ("ffn", None), ("mesh", 3)]
)
def test_a_run_file_with_an_impossible_setting_is_named(capsys, tmp_path, text, name, value):
    out = stored_run(tmp_path, text)
    stored = json.loads((out / "run.json").read_text())
    stored["config"][name] = value
    (out / "run.json").write_text(json.dumps(stored))
    error = refuse(capsys, tmp_path, "--out", out, "--resume")
    assert "run.json cannot be read" in error
    assert name in error or name == "mesh"


def test_an_error_reaches_the_shell_without_a_traceback(tmp_path):
    done = run_program("--text", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("nowhere does not exist.")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_too_little_memory_is_said_in_words(capsys, tmp_path, text, monkeypatch):
    def train(*arguments):
        raise MemoryError("Unable to allocate 633. GiB")

    monkeypatch.setattr(loop, "train", train)
    error = refuse(capsys, tmp_path, "--text", text, "--out", tmp_path / "out")
    assert "not enough memory (Unable to allocate 633. GiB); lower --batch-size" in error


def test_more_memory_than_any_machine_has_is_said_in_words(capsys, tmp_path, text):
    huge = ("--expert-dim", 2 * 10**9, "--num-experts", 1000)  # 1 PB a matrix: XLA's own failure
    arguments = ("--text", text, "--out", tmp_path / "out", *huge)
    assert main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert "dropless-train: error: there is not enough memory" in error
    assert "the model's sizes" in error and "Traceback" not in error


# What XLA and Python say when memory ends in the middle of a step.
NO_MEMORY = {
    "in XLA": lambda: jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1"),
    "in Python": lambda: MemoryError("Unable to allocate 633. GiB"),
}


@pytest.mark.parametrize("where", NO_MEMORY)
def test_a_folder_whose_run_never_made_a_step_takes_another(
    capsys, tmp_path, text, monkeypatch, where
):
    def step(*arguments):
        raise NO_MEMORY[where]()

    compiled = loop._Run.compile

    def compile_it(run):
        compiled(run)
        run.train_step = step

    monkeypatch.setattr(loop._Run, "compile", compile_it)
    monkeypatch.setattr(loop, "time_parts", lambda *arguments: {"experts and router": 1.0})
    out = tmp_path / "out"
    arguments = ["--text", str(text), "--out", str(out), *SMALL, "--layers", "1", "--steps", "2"]
    assert main(arguments) == 2
    assert "there is not enough memory" in capsys.readouterr().err
    assert not (out / "run.json").exists()
    # Nothing to resume, so a new run, with other settings, is what is left.
    assert "there is no run to resume" in refuse(
        capsys, tmp_path, "--text", text, "--out", out, "--resume"
    )
    monkeypatch.setattr(loop._Run, "compile", compiled)
    assert main([*arguments, "--batch-size", "2"]) == 0
    assert json.loads((out / "run.json").read_text())["config"]["batch_size"] == 2
    # That one is a run, and stays.
    assert "already holds a run (run.json)" in refuse(capsys, tmp_path, *arguments)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/100/state", "report.png"])
def test_what_a_run_left_is_never_overwritten_even_without_its_settings(
    capsys, tmp_path, text, name
):
    left = tmp_path / "out" / name
    left.parent.mkdir(parents=True)
    left.write_text("something")
    error = refuse(capsys, tmp_path, "--text", text, "--out", tmp_path / "out")
    assert f"already holds a run ({name.split('/')[0]})" in error


def test_a_run_that_another_process_made_meanwhile_is_not_overwritten(
    capsys, tmp_path, text, monkeypatch
):
    compiled = loop._Run.compile

    def compile_slowly(run):
        compiled(run)
        stored_run(tmp_path, text)

    monkeypatch.setattr(loop._Run, "compile", compile_slowly)
    arguments = ["--text", str(text), "--out", str(tmp_path / "out"), *SMALL, "--layers", "1"]
    assert main([*arguments, "--steps", "1"]) == 2
    assert "already holds a run (run.json)" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "metrics.jsonl").read_text()) == {"step": 1, "loss": 5.0}


def test_a_full_disk_is_said_in_words(capsys, tmp_path, text, monkeypatch):
    def train(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(loop, "train", train)
    error = refuse(capsys, tmp_path, "--text", text, "--out", tmp_path / "out")
    assert "No space left on device (metrics.jsonl)" in error


def test_a_disk_that_refuses_a_checkpoint_is_said_in_words_and_the_run_goes_on(tmp_path, text):
    out = tmp_path / "out"
    arguments = ["--text", text, "--out", out, *SMALL, "--checkpoint-every", "1", "--steps", "2"]
    # Files of at most 20 kB: the metrics fit, a checkpoint does not. ASCII has no bars.
    limit = (
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "sys.stdout.reconfigure(encoding='ascii')"
    )
    done = run_program(*arguments, code=limit)
    assert done.returncode == 2, done.stderr
    said = "dropless-train: error: a checkpoint cannot be saved: File too large; --resume continues"
    assert said in done.stderr
    assert main(["--resume", "--out", str(out)]) == 0


def test_a_device_is_no_text(capsys, tmp_path):
    error = refuse(capsys, tmp_path, "--text", "/dev/zero", "--out", tmp_path / "out")
    assert "/dev/zero is neither a regular file nor a folder" in error


def test_the_schedule_does_not_depend_on_where_a_short_run_stops():
    full = settings.PRESETS["tiny"].steps
    assert settings.resolve("tiny", {"steps": 10}).schedule_steps == full
    assert settings.resolve("tiny", {"steps": 20}).schedule_steps == full
    assert settings.resolve("tiny", {"steps": 10 * full}).schedule_steps == 10 * full


def test_settings_survive_the_run_file():
    config = settings.resolve("olmoe-mini", {"mesh": settings.parse_mesh("data=2"), "text": ("a",)})
    assert settings.from_json(json.loads(json.dumps(settings.to_json(config)))) == config
