"""`amp-track explain` as a user meets it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from memory_plan.torch_snapshots import Recorder, frames
from support import DIGITS, Done

import amp_track
from amp_track.records.errors import BadInput

Command = Callable[..., Done]
MIB = 2**20
FORWARD = frames("/env/site-packages/torch/nn/modules/conv.py(553): forward", "/home/me/net.py(42): forward")


@pytest.fixture
def snapshot(tmp_path: Path) -> str:
    """The file of a snapshot: 32 MiB of activations, and 65 MiB requested of 64 MiB."""
    recorder = Recorder(64 * MIB)
    recorder.allocate(32 * MIB, FORWARD)
    recorder.allocate(65 * MIB, FORWARD)
    file = tmp_path / "oom.pickle"
    file.write_bytes(pickle.dumps(recorder.snapshot()))
    return str(file)


def test_a_snapshot_is_explained(amp_track: Command, snapshot: str) -> None:
    done = amp_track("explain", snapshot)
    assert done.returncode == 0
    assert "Out of memory in the forward pass: net.py:42 forward (conv) requested 65 MiB" in done.stdout
    assert "activations" in done.stdout
    found = json.loads(amp_track("explain", snapshot, "--batch-size", "8", "--json").stdout)
    assert found["by_category"] == {"activations": 32 * MIB}
    assert (found["failed"]["bytes"], found["batch_size"], found["predicted"]) == (65 * MIB, 8, False)


@pytest.mark.slow
def test_the_error_of_a_workload_is_predicted(amp_track: Command, tmp_path: Path) -> None:
    def explain(batch_size: int) -> dict[str, Any]:
        options = ["--memory-budget", "64MiB", "--precision", "fp32", "--device", "cpu", "--json"]
        done = amp_track("explain", DIGITS, *options, "--batch-size", str(batch_size))
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    found = explain(4096)
    max_batch = found["max_batch"]
    assert 300 < max_batch < 700  # measured: 523
    assert found["failed"] is not None
    assert found["ways_out"][0]["change"] == "bf16 instead of fp32"
    assert explain(max_batch)["failed"] is None
    assert explain(max_batch + 1)["failed"] is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.pickle"], "missing.pickle: No such file or directory. Give the file of a memory snapshot."),
        (["missing.py"], "missing.py: file not found, expected a Python file with one Workload"),
        (["SNAPSHOT", "--precision", "bf16"], "--precision is not supported with a snapshot, only with a workload."),
        ([DIGITS], "A workload requires --memory-budget"),
        ([DIGITS, "--memory-budget", "64MiB", "--batch-size", "auto"], "--batch-size: got 'auto', expected"),
        ([""], "SOURCE: got '', expected a name"),
    ],
)
def test_bad_input_is_one_line(amp_track: Command, snapshot: str, arguments: list[str], message: str) -> None:
    done = amp_track("explain", *(snapshot if each == "SNAPSHOT" else each for each in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"amp-track: {message}")
    assert len(done.stderr.splitlines()) == 1


def test_a_notebook_shows_it(snapshot: str) -> None:
    result = amp_track.explain(snapshot, batch_size=8)
    assert result.state.batch_size == 8
    assert "Out of memory in the forward pass" in (result._repr_html_() or "")
    with pytest.raises(BadInput, match="not supported with a snapshot"):
        amp_track.explain(snapshot, memory_budget="1GiB")
