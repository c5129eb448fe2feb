"""Every target inside captured CUDA graphs, replayed and updated, and outside of any: same bits.

XLA records runs of thunks into command buffers (CUDA graphs). They are forced on, for every custom
call from the first on, and off, in processes of their own. Skipped without a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import needs_gpu

from dropless import _library

pytestmark = needs_gpu

HERE = Path(__file__).parent
FLAGS = {
    "on": "--xla_gpu_graph_min_graph_size=1"
    " --xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL",
    "off": "--xla_gpu_enable_command_buffer=",
}
# XLA's own products (the router's) take the algorithm that was fastest when they were compiled, so
# two compilations may sum in another order: without tuning both take the same.
SAME = "--xla_gpu_autotune_level=0"
# Without it a profiler's trace is taken with command buffers off.
TRACED = "--xla_enable_command_buffers_during_profiling=true"


def start(setting, folder):
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{FLAGS[setting]} {SAME} {TRACED} --xla_dump_to={folder}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    return subprocess.Popen(
        [sys.executable, str(HERE / "every_target.py")],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def thunks_of(folder):
    """The program's thunks as XLA runs them; those in a command buffer are indented.

    Where no pass changed them, as with command buffers off, XLA writes them once.
    """
    changed = list(folder.glob("*jit_step.*thunk_sequence_after_thunk_passes.txt"))
    (file,) = changed or folder.glob("*jit_step.*thunk_sequence.txt")
    return file.read_text().splitlines()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folders = {setting: tmp_path_factory.mktemp(setting) for setting in FLAGS}
    programs = {setting: start(setting, folder) for setting, folder in folders.items()}
    results = {}
    for setting, program in programs.items():
        out, err = program.communicate(timeout=300)
        assert program.returncode == 0, err[-3000:]
        results[setting] = json.loads(out.splitlines()[-1])
    return {setting: (results[setting], thunks_of(folders[setting])) for setting in FLAGS}


def test_every_target_is_in_the_program(runs):
    for result, _ in runs.values():
        assert result["targets"] == sorted(_library.OPS)
        assert result["finite"]
        assert result["routings"] > 12


def test_command_buffers_hold_the_custom_calls(runs):
    result, thunks = runs["on"]
    calls = [line for line in thunks if "kCustomCall" in line]
    assert len(calls) >= len(result["targets"])
    assert all(line.startswith(" ") for line in calls)
    assert result["executions"] >= 3  # at least one in each of the traced steps
    result, thunks = runs["off"]
    assert any("kCustomCall" in line for line in thunks)
    assert not any("kCommandBuffer" in line for line in thunks)
    assert result["executions"] == 0


def test_the_same_bits_with_and_without(runs):
    on, off = (runs[setting][0]["digests"] for setting in FLAGS)
    assert on.keys() == off.keys() and len(on) > 30
    assert [name for name in on if on[name] != off[name]] == []
