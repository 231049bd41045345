"""The command line as a user meets it: exit codes, and what is printed where."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from support import DIGITS, FAULTS, OUR_FRAMES, Done, stores

pytestmark = pytest.mark.usefixtures("fresh_stores")
Command = Callable[..., Done]


def test_a_workload_whose_loss_raises_is_exit_code_1(amp_track: Command) -> None:
    done = amp_track("train", FAULTS, "--set", "fault=raise", "--precision", "fp32")
    assert done.returncode == 1
    assert "ValueError: the labels are off by one" in done.stderr
    assert 'raise ValueError("the labels are off by one")' in done.stderr
    assert OUR_FRAMES not in done.stderr


@pytest.mark.nightly
def test_a_job_that_hangs_is_given_up(amp_track: Command) -> None:
    done = amp_track("train", FAULTS, "--set", "fault=hang", "--precision", "fp32", "--job-timeout", "3")
    assert done.returncode == 1
    assert "gave up after 3 s (--job-timeout) at fp32, batch 4" in done.stderr


@pytest.mark.nightly
def test_a_batch_that_does_not_fit_is_exit_code_3(amp_track: Command) -> None:
    done = amp_track("train", DIGITS, "--precision", "fp32", "--memory-budget", "1MiB", "--batch-size", "1", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["status"] == "oom"
    assert "does not fit the budget of 1 MiB; it needs" in done.stderr
    assert "bytes" in done.stderr.splitlines()[-1]


@pytest.mark.nightly
def test_json_is_one_object_on_stdout_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "amp_track", "train", DIGITS, "--precision", "bf16", "--epochs", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "fits"


def test_json_is_one_object_on_stdout_whatever_the_workload_prints(amp_track: Command) -> None:
    done = amp_track("train", DIGITS, "--precision", "bf16", "--epochs", "1", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result) == [
        "run_id", "target", "precision", "batch_size", "status", "metric", "wall_seconds", "samples_per_second",
        "peak_bytes", "steps", "skipped_steps", "scale", "device", "memory_budget_bytes",
        "waited_fraction", "non_finite_losses", "advice", "diagnosis",
    ]  # fmt: skip
    assert result["metric"]["name"] == "accuracy"
    assert (result["status"], result["steps"], result["scale"]) == ("fits", 23, None)


def test_fit_prints_a_table_and_how_to_look(amp_track: Command) -> None:
    done = amp_track("max-batch", FAULTS, "--precision", "fp32,bf16", "--max-batch-size", "9", "--study", "small")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("│").split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    why = "".join(row[2].replace(" ", "") for row in rows)
    assert why.startswith(2 * "--max-batch-size")
    assert max(map(len, done.stdout.split("· ")[0].splitlines())) <= 100
    assert "tf32 skipped: needs an NVIDIA GPU of compute capability 8.0" in done.stdout
    assert f"mlflow ui --backend-store-uri {stores()['tracking_uri']} --host 127.0.0.1" in done.stdout
    assert "optuna-dashboard sqlite:///optuna.db" in done.stdout


def test_auto_trains_at_the_largest_batch(amp_track: Command) -> None:
    done = amp_track("train", FAULTS, "--precision", "fp32", "--batch-size", "auto", "--max-batch-size", "9", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["batch_size"] == 9
