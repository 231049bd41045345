"""`mlflow run .` as users type it. With the environment at hand: `.ci/run` makes the fresh one, which takes minutes."""

import os
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from support import ROOT

pytestmark = pytest.mark.nightly


def mlflow_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "mlflow", "run", str(ROOT), "--env-manager", "local", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def runs(folder: Path) -> list[mlflow.entities.Run]:
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    return list(client.search_runs([experiment.experiment_id for experiment in client.search_experiments()]))


@pytest.mark.slow
def test_main_trains_in_the_run_that_mlflow_made(tmp_path: Path) -> None:
    done = mlflow_run(tmp_path, "-P", "precision=bf16", "-P", "epochs=1", "-P", "batch_size=128")
    assert done.returncode == 0, done.stderr
    (run,) = runs(tmp_path)
    assert run.info.status == "FINISHED"
    assert (run.data.params["precision"], run.data.params["batch_size"]) == ("bf16", "128")
    assert run.data.tags["amp_track.status"] == "fits"
    assert "eval/accuracy" in run.data.metrics


def test_fit_makes_that_run_the_parent(tmp_path: Path) -> None:
    arguments = ["-e", "max_batch", "-P", "max_batch_size=5", "-P", "precision=fp32"]
    arguments += ["-P", f"storage=sqlite:///{tmp_path}/o.db"]
    for _ in range(2):
        done = mlflow_run(tmp_path, *arguments)
        assert done.returncode == 0, done.stderr
    found = runs(tmp_path)
    parents = [run for run in found if "max_batch/fp32" in run.data.metrics]
    assert [run.data.metrics["max_batch/fp32"] for run in parents] == [5]
    (second,) = [run for run in found if "amp_track.continues" in run.data.tags]
    assert second.data.tags["amp_track.continues"] == parents[0].info.run_id
    assert {run.info.status for run in found} == {"FINISHED"}


def test_bad_input_fails_the_run(tmp_path: Path) -> None:
    done = mlflow_run(tmp_path, "-P", "precision=fp8")
    assert done.returncode != 0
    assert "amp-track: --precision: got 'fp8'" in done.stderr
    assert [run.info.status for run in runs(tmp_path)] == ["FAILED"]
