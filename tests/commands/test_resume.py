"""`train --resume` in one process: what is trained on, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from support import DIGITS, WORKLOADS, Done, client

pytestmark = pytest.mark.usefixtures("fresh_stores")
Command = Callable[..., Done]
SPIKY = str(WORKLOADS / "spiky.py")


def losses(run_id: str) -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in client().get_metric_history(run_id, "train/step_loss"))


@pytest.mark.nightly
def test_more_steps_go_on_in_the_middle_of_an_epoch(amp_track: Command) -> None:
    command = ["train", DIGITS, "--precision", "fp32", "--checkpoint-every", "3", "--json", "--steps"]
    expected = json.loads(amp_track(*command, "30").stdout)
    run_id = json.loads(amp_track(*command, "5").stdout)["run_id"]
    before = client().get_run(run_id).to_dictionary()
    for steps, reason in (("4", f"run {run_id} has made 5 steps in 1 epoch. "), ("5", "has finished its training.")):
        refused = amp_track("train", DIGITS, "--resume", run_id, "--steps", steps)
        assert refused.returncode == 2
        assert reason in refused.stderr
    assert client().get_run(run_id).to_dictionary() == before
    longer = amp_track("train", DIGITS, "--resume", run_id, "--steps", "30", "--json")
    assert longer.returncode == 0, longer.stderr
    assert json.loads(longer.stdout)["steps"] == 30
    assert losses(run_id) == losses(expected["run_id"])
    shorter = amp_track("train", DIGITS, "--resume", run_id, "--epochs", "1")
    assert shorter.returncode == 2
    assert f"--epochs: got 1, but run {run_id} has made 30 steps in 2 epochs" in shorter.stderr
    mean_losses = [client().get_run(each).data.metrics["train/loss"] for each in (run_id, expected["run_id"])]
    assert mean_losses[0] == mean_losses[1], "also over the epoch in which it had ended"


def test_bad_resumptions_change_nothing(amp_track: Command) -> None:
    made = amp_track("train", SPIKY, "--precision", "fp32", "--epochs", "1", "--json")
    run_id = json.loads(made.stdout)["run_id"]
    client().set_terminated(run_id, "KILLED")
    before = client().get_run(run_id).to_dictionary()
    for arguments, said in (
        (["--resume", "0" * 32], "expected a run in"),
        ([SPIKY, "--resume", "RUN"], "has no checkpoint"),
        (
            ["--resume", "RUN", "--trust-store", "--precision", "bf16"],
            "--precision: got bf16 with --resume, expected fp32",
        ),
        (["--resume", "RUN", "--batch-size", "auto"], "--batch-size auto cannot be used with --resume"),
        (["--resume", "RUN", "--headroom", "5%"], "--headroom cannot be used with --resume"),
        ([DIGITS, "--resume", "RUN"], f"another version of {DIGITS}"),
        (["--trust-store"], "--trust-store requires --resume"),
        (["--allow-changed-workload"], "--allow-changed-workload requires --resume"),
    ):
        done = amp_track("train", *(run_id if argument == "RUN" else argument for argument in arguments))
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
        assert client().get_run(run_id).to_dictionary() == before
