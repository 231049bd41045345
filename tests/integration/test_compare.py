"""The command as a user meets it: real trainings of small workloads in real processes."""

import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import optuna
import pytest
from optuna.trial import TrialState
from PIL import Image
from support import DIGITS, FAULTS, WORKLOADS, Done

pytestmark = pytest.mark.nightly
PAINTER = str(WORKLOADS / "painter.py")
GROWS = str(WORKLOADS / "grows.py")
COMMAND = [sys.executable, "-m", "amp_track", "compare"]
Compare = Callable[..., Done]


@pytest.fixture
def compare(amp_track: Callable[..., Done], fresh_stores: None) -> Compare:
    """The command, in this process; its trainings have processes of their own."""
    return functools.partial(amp_track, "compare")


def rows_of(done: Done) -> dict[str, Any]:
    """What a comparison that went well says."""
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def client() -> mlflow.MlflowClient:
    return mlflow.MlflowClient(f"sqlite:///{Path.cwd()}/mlflow.db")  # MLflow keeps a store open by its address


def runs() -> list[mlflow.entities.Run]:
    return list(client().search_runs([experiment.experiment_id for experiment in client().search_experiments()]))


def trials(study: str) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=study, storage="sqlite:///optuna.db").trials


@pytest.mark.slow
def test_out_of_memory_is_a_row_and_not_the_end(compare: Compare) -> None:
    """60 samples take 3.75 MiB; the model that grows at once takes 1 MiB more, and more than the budget."""
    done = compare(
        GROWS, "--precision", "fp32,bf16", "--vary", "more_after=1000,0", "--steps", "2", "--batch-size", "60",
        "--memory-budget", "4600KiB", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    statuses = {(row["value"], row["precision"]): row["status"] for row in result["rows"]}
    assert statuses["1000", "fp32"] == "fits"
    assert statuses["0", "fp32"] == "oom"
    failed = next(row for row in result["rows"] if row["status"] == "oom")
    assert failed["samples_per_second"] is None
    assert client().get_run(failed["run_ids"][0]).data.tags["amp_track.status"] == "oom"
    assert {run.info.status for run in runs()} == {"FINISHED"}
    states = {trial.state for trial in trials(f"{result['study']}/compare")}
    assert states == {TrialState.COMPLETE}

    nothing = compare(GROWS, "--precision", "fp32", "--batch-size", "60", "--memory-budget", "2MiB", "--json")
    assert nothing.returncode == 3
    assert "no training of this comparison fits at batch 60 (oom)" in nothing.stderr
    assert [row["status"] for row in json.loads(nothing.stdout)["rows"]] == ["oom"]


def test_plots_of_the_workload_stand_side_by_side(compare: Compare) -> None:
    result = rows_of(compare(PAINTER, "--precision", "fp32,bf16", "--vary", "kind=tanh,relu", "--steps", "4", "--json"))
    with Image.open(client().download_artifacts(result["run_id"], "side-by-side.png", ".")) as plot:
        columns, rows = 3, 2
        assert plot.width / plot.height == pytest.approx(columns / rows, rel=0.15)
        assert len(plot.convert("L").getcolors()) > 50
    attributes = [trial.user_attrs["option.kind"] for trial in trials(f"{result['study']}/compare")]
    assert attributes == ["tanh", "tanh", "relu", "relu"]


def test_made_up_data_compares_speed_and_memory_alone(compare: Compare) -> None:
    result = rows_of(
        compare(DIGITS, "--precision", "fp32,bf16", "--steps", "3", "--synthetic", "--batch-size", "16", "--json")
    )
    assert result["vary"] is None
    for row in result["rows"]:
        assert row["metric"] is None
        assert row["samples_per_second"] > 0
    again = rows_of(
        compare(DIGITS, "--precision", "fp32,bf16", "--steps", "3", "--synthetic", "--batch-size", "16", "--json")
    )
    assert again["rows"] == result["rows"]


def test_interrupted_it_ends_its_runs_and_goes_on(compare: Compare) -> None:
    hanging = ["--precision", "fp32", "--study", "stopped", "--vary"]
    command = [*COMMAND, FAULTS, *hanging, "fault=none,hang"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "(fault=none seed 0)" in line:
                break
        while "RUNNING" not in {run.info.status for run in runs() if "mlflow.parentRunId" in run.data.tags}:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert "the same command resumes where it stopped" in process.stderr.read()
    assert process.returncode == 130
    assert sorted(run.info.status for run in runs()) == ["FINISHED", "KILLED", "KILLED"]
    rest = compare(FAULTS, *hanging, "fault=none,nan")
    assert rest.returncode == 0, rest.stderr
    assert "(fault=nan seed 0)" in rest.stderr
    assert "(fault=none seed 0)" not in rest.stderr, "it is known"
    assert TrialState.RUNNING not in {trial.state for trial in trials("stopped/compare")}


def test_two_workers_share_a_comparison_and_repeat_nothing() -> None:
    command = [*COMMAND, PAINTER, "--precision", "fp32,bf16", "--vary", "hidden=2,4,8", "--steps", "30", "--json"]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    first, second = (json.loads(output) for output, _ in outputs)
    assert first["rows"] == second["rows"]
    complete = [trial for trial in trials(f"{first['study']}/compare") if trial.state is TrialState.COMPLETE]
    assert len(complete) == 6
    assert {run.info.status for run in runs()} == {"FINISHED"}
