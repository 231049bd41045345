"""Trainings that are killed at some step and resumed: to the bit as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from held_workers import client
from support import DIGITS, WORKLOADS, Done

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("fresh_stores")]
SPIKY = str(WORKLOADS / "spiky.py")
BY_STEP = ("train/step_loss", "amp/scale", "train/loss", "eval/loss", "eval/accuracy")


Command = Callable[..., Done]
"""The command in the tests' own process: what is not killed needs no other."""


def kill(*arguments: str, at_batch: int) -> None:
    """Run the command in a process group of its own, which the workload kills as it trains on that batch of it."""
    killed = subprocess.run(
        [sys.executable, "-m", "amp_track", *arguments],
        capture_output=True,
        timeout=240,
        start_new_session=True,
        env=os.environ | {"KILL_AT_BATCH": str(at_batch)},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr


def record(run_id: str) -> dict[str, Any]:
    """All that a training leaves: what it logged step by step, and the state it ended with."""
    logged = {
        name: sorted((metric.step, metric.value) for metric in client().get_metric_history(run_id, name))
        for name in BY_STEP
    }
    (folder,) = Path("mlruns").glob(f"*/{run_id}/artifacts/checkpoints")
    last = max(folder.glob("*.pt"))
    state = torch.load(last, weights_only=True)
    flat = dict(state["step"]["model"])
    for index, values in state["step"]["optimizer"]["state"].items():
        flat |= {f"{index}.{name}": tensor for name, tensor in values.items()}
    logged["diagnosis"] = [file.read_text() for file in folder.parent.glob("diagnosis.json")]
    return logged | {"state": {name: tensor.tolist() for name, tensor in flat.items()}, "file": last.name}


def killed_run() -> str:
    (run,) = client().search_runs(["1"], "attributes.status = 'RUNNING'")
    return run.info.run_id


@pytest.mark.parametrize(
    ("precision", "kills", "more"),
    # From a checkpoint in the middle of an epoch of 8 steps; twice, the first from the best, at the end of an epoch.
    [
        pytest.param("fp32", [13], (), marks=pytest.mark.slow),
        ("bf16", [18], ()),
        pytest.param("amp", [10, 9], ("--grad-stats-every", "2"), marks=pytest.mark.slow),
        ("amp", [13], ("--nproc", "2", "--batch-size", "4")),
        ("fp32", [13], ("--num-workers", "2")),
    ],
)
def test_a_killed_training_goes_on_to_the_bit(
    amp_track: Command, precision: str, kills: list[int], more: tuple[str, ...]
) -> None:
    command = ["train", SPIKY, "--precision", precision, *more, "--checkpoint-every", "5", "--json"]
    whole = amp_track(*command)
    assert whole.returncode == 0, whole.stderr
    expected = json.loads(whole.stdout)

    kill(*command, at_batch=kills[0])
    run_id = killed_run()
    for batch in kills[1:]:
        kill("train", SPIKY, "--resume", run_id, at_batch=batch)
    done = amp_track("train", SPIKY, "--resume", run_id, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)

    assert record(run_id) == record(expected["run_id"])
    assert found["run_id"] == run_id
    for name in ("metric", "steps", "skipped_steps", "scale"):
        assert found[name] == expected[name]
    if precision == "amp":
        assert found["skipped_steps"] >= 5
    run = client().get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == client().get_run(expected["run_id"]).data.params


def test_a_stopped_training_says_how_to_go_on_and_a_finished_one_can_be_trained_longer(
    amp_track: Command,
) -> None:
    command = [sys.executable, "-m", "amp_track", "train", DIGITS, "--precision", "fp32", "--checkpoint-every", "3"]
    with subprocess.Popen([*command, "--epochs", "200"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("epoch 2"):
                process.send_signal(signal.SIGINT)
                break
        (how,) = [line for line in process.stderr if "--resume" in line]
    assert process.returncode == 130
    run_id = how.split()[-1]
    assert client().get_run(run_id).info.status == "KILLED"

    done = amp_track("train", DIGITS, "--resume", run_id, "--epochs", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 3 * 23
    client().set_terminated(run_id, "KILLED")  # as it would be, killed after its last checkpoint
    ended = amp_track("train", DIGITS, "--resume", run_id, "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["metric"] == json.loads(done.stdout)["metric"]
    again = amp_track("train", DIGITS, "--resume", run_id)
    assert again.returncode == 2
    assert "has finished its training" in again.stderr
    longer = amp_track("train", DIGITS, "--resume", run_id, "--epochs", "4", "--json")
    assert json.loads(longer.stdout)["steps"] == 4 * 23, longer.stderr
    epochs = [metric.step for metric in client().get_metric_history(run_id, "train/loss")]
    assert epochs == [1, 2, 3, 4]
