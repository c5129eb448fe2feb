"""A run that was stopped, killed or damaged goes on as one that was not, bit for bit."""

from __future__ import annotations

import signal

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dropless.train import folder, loop
from dropless.train.cli import main
from train_runs import (
    SMALL,
    compiled_once,
    run_program,
    untimed,
    write_text,
)

STEPS, EVERY = 11, 3
# One layer: these tests compile many programs, and what they look at does not depend on depth.
FLAGS = [*SMALL, "--layers", "1", "--eval-every", "4", "--checkpoint-every", str(EVERY)]


@pytest.fixture(scope="module", autouse=True)
def _no_timing(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(loop, "time_parts", lambda *arguments: {"experts and router": 1.0})
    with compiled_once(tmp_path_factory.mktemp("compiled")):
        yield
    patch.undo()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """Records of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert main(["--text", str(text), "--out", str(out), *FLAGS, "--steps", str(STEPS)]) == 0
    return untimed(out)


def continue_run(out):
    assert main(["--out", str(out), "--resume", "--steps", str(STEPS)]) == 0
    return untimed(out)


def without_held_out(rows):
    return [{k: v for k, v in row.items() if k != "held_out_loss"} for row in rows]


def test_stopped_by_steps_and_resumed_in_another_process(text, whole, tmp_path, capfd):
    out = tmp_path / "out"
    assert main(["--text", str(text), "--out", str(out), *FLAGS, "--steps", "7"]) == 0
    no_timing = "import dropless.train.loop as loop\nloop.time_parts = lambda *a: {'experts': 1.0}"
    # All flags again, as a user's shell history would have them.
    flags = ["--text", text, "--out", out, *FLAGS, "--steps", STEPS, "--resume"]
    done = run_program(*flags, code=no_timing)
    assert done.returncode == 0, done.stderr
    assert "resuming after step 7" in done.stdout
    rows = untimed(out)
    # Once more, with nothing left to do.
    assert main(["--out", str(out), "--resume"]) == 0
    assert untimed(out) == rows
    assert "is the last already" in capfd.readouterr().out
    assert rows[6].pop("held_out_loss") > 0  # step 7 was a last one
    assert rows == whole
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    assert [s.step for s in events.Scalars("train/loss")] == list(range(1, STEPS + 1))


# Orbax completes a checkpoint by renames; a kill before one leaves a save half done.
KILL = """
import os, signal
rename = os.rename
def killing_rename(source, target, *rest, **more):
    if str(target).endswith({target!r}):
        {action}
    return rename(source, target, *rest, **more)
os.rename = killing_rename
"""
DIE = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("target", "action", "resumes_after"),
    [
        ("checkpoints/6.orbax-checkpoint-tmp/state", DIE, 3),
        ("checkpoints/6", DIE, 3),
        ("checkpoints/3", DIE, 0),
    ],
    ids=["inside the save", "before its last rename", "in the first save"],
)
def test_killed_in_the_middle_of_a_save(
    text, whole, tmp_path, capfd, target, action, resumes_after
):
    out = tmp_path / "out"
    flags = ["--text", text, "--out", out, *FLAGS, "--steps", STEPS]
    died = run_program(*flags, code=KILL.format(target=target, action=action))
    assert died.returncode == -signal.SIGKILL, died.stderr
    with open(out / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 7, "lo')  # as if it had also cut a record short
    assert continue_run(out) == whole
    expected = f"after step {resumes_after}\n" if resumes_after else "starting again from step 1\n"
    assert expected in capfd.readouterr().out
    assert not list((out / "checkpoints").glob("*tmp*"))


def test_an_unreadable_checkpoint_is_set_aside_for_the_one_before(text, whole, tmp_path, capfd):
    out = tmp_path / "out"
    assert main(["--text", str(text), "--out", str(out), *FLAGS, "--steps", "9"]) == 0
    damaged = out / "checkpoints" / "9" / "state"
    for path in damaged.rglob("*"):
        if path.is_file():
            path.write_bytes(b"not what was written")
    assert continue_run(out)[:8] == whole[:8]
    assert without_held_out(untimed(out)) == without_held_out(whole)
    said = capfd.readouterr().out
    assert "checkpoint 9 is unreadable" in said and "resuming after step 6" in said
    assert (out / "unreadable-checkpoint-9").is_dir()


def test_a_signal_ends_the_run_with_a_checkpoint(text, whole, tmp_path, monkeypatch):
    out = tmp_path / "out"
    make_record = loop.make_record

    def interrupting(step, *rest):
        if step == 4:
            signal.raise_signal(signal.SIGTERM)
        return make_record(step, *rest)

    monkeypatch.setattr(loop, "make_record", interrupting)
    arguments = ["--text", str(text), "--out", str(out), *FLAGS, "--steps", str(STEPS)]
    assert main(arguments) == 130
    monkeypatch.undo()
    assert 4 <= len(untimed(out)) < STEPS
    assert not (out / "report.html").exists()
    assert continue_run(out) == whole


def test_a_second_process_in_the_same_folder_is_refused(text, tmp_path, capsys):
    out = tmp_path / "out"
    flags = ["--text", str(text), "--out", str(out), *FLAGS]
    with folder.locked(out):
        assert main([*flags, "--steps", "1"]) == 2
    assert "another process is training" in capsys.readouterr().err
    assert not (out / "metrics.jsonl").exists()


def test_a_run_that_cannot_be_resumed_keeps_its_settings(text, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["--text", str(text), "--out", str(out), *FLAGS, "--steps", "1"]) == 0
    settings, metrics = (out / "run.json").read_text(), out / "metrics.jsonl"
    good = metrics.read_bytes()

    def refused():
        assert main(["--out", str(out), "--resume", "--steps", str(STEPS)]) == 2
        assert (out / "run.json").read_text() == settings
        return capsys.readouterr().err

    for line in (b"[1]\n", b'{"loss": 1}\n', b"\xff\n"):
        metrics.write_bytes(good + line)
        assert "metrics.jsonl is damaged" in refused()
        assert metrics.read_bytes() == good + line
    metrics.write_bytes(good)
    (out / "checkpoints").rename(out / "moved")
    assert "checkpoints is missing, although the run has recorded 1 steps" in refused()
    assert metrics.read_bytes() == good
    (out / "checkpoints").touch()
    assert "checkpoints is a file, not a folder" in refused()
