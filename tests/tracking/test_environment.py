"""Where new runs and their files go, what is rejected before anything is written, and the plot of a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlflow
import pytest
from support import stores

from amp_track.records.errors import BadInput
from amp_track.tracking import Tracker
from amp_track.tracking.lookup import open_plot

pytestmark = pytest.mark.usefixtures("fresh_stores")


def tracker() -> Tracker:
    return Tracker(stores()["tracking_uri"])


def test_a_store_of_files_whose_library_is_not_installed_is_rejected(client: mlflow.MlflowClient) -> None:
    client.create_experiment("amp_track", "s3://me:hunter2@nowhere/x")
    with pytest.raises(BadInput, match=r"stores files in s3://me:\*\*\*@nowhere/x, which requires boto3\. Install it"):
        tracker()


@pytest.mark.parametrize("is_made", [False, True])
def test_a_place_in_which_no_files_can_be_kept_is_rejected(
    is_made: bool, tmp_path: Path, client: mlflow.MlflowClient
) -> None:
    if is_made:
        (tmp_path / "file").touch()
        client.create_experiment("amp_track", str(tmp_path / "file" / "runs"))
    else:
        shutil.rmtree("mlruns", ignore_errors=True)  # MLflow 3.2 has made it
        Path("mlruns").touch()
    with pytest.raises(BadInput, match=r"is not a writable folder\. "):
        tracker()


@pytest.mark.parametrize("location", ["mlflow-artifacts:/1", "dbfs:/1", "relative/1"])
def test_other_places_are_nobodys_concern(location: str, client: mlflow.MlflowClient) -> None:
    client.create_experiment("amp_track", location)
    tracker()


def test_a_run_whose_last_records_are_rejected_has_not_finished(client: mlflow.MlflowClient) -> None:
    opened = tracker()
    with pytest.raises(mlflow.exceptions.MlflowException), opened.run("a run", tags={}) as run:
        run.metric("a//b", 1.0)
    assert client.get_run(run.run_id).info.status == "FAILED"


@pytest.mark.parametrize("variable", ["MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"])
def test_a_given_experiment_takes_precedence_over_the_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch, client: mlflow.MlflowClient
) -> None:
    monkeypatch.setenv(variable, client.create_experiment("7") if variable.endswith("ID") else "7")
    with Tracker(stores()["tracking_uri"], experiment="mine").run("a run", tags={}) as run:
        pass
    assert client.get_experiment(run.experiment_id).name == "mine"
    with tracker().run("another", tags={}) as run:
        pass
    assert client.get_experiment(run.experiment_id).name == "7"


def test_an_experiment_that_was_deleted_is_rejected(client: mlflow.MlflowClient) -> None:
    client.delete_experiment(client.create_experiment("mine"))
    with pytest.raises(BadInput, match=r"experiment mine of .* has been deleted"):
        Tracker(stores()["tracking_uri"], experiment="mine")


def test_a_study_is_known_by_its_search_and_a_training_by_its_curves(
    tmp_path: Path, client: mlflow.MlflowClient
) -> None:
    uri = client.tracking_uri
    run_id = client.create_run("0").info.run_id
    with pytest.raises(FileNotFoundError, match="has no plot"):
        open_plot(uri, run_id)
    for name in ("curves.png", "search.png"):
        (tmp_path / name).write_bytes(name.encode())
        client.log_artifact(run_id, str(tmp_path / name))
        assert open_plot(uri, run_id).read() == name.encode()
    with pytest.raises(FileNotFoundError, match="has no plot"):
        open_plot(uri, "f" * 32)
