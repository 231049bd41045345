"""Where new runs and their files go, and what is refused before anything is written."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import mlflow
import pytest
from support import stores

from amp_track.records.errors import BadInput
from amp_track.tracking import Tracker

pytestmark = pytest.mark.usefixtures("fresh_stores")


def tracker() -> Tracker:
    return Tracker(stores()["tracking_uri"])


def test_a_store_of_files_whose_library_is_not_installed_is_rejected() -> None:
    mlflow.MlflowClient(stores()["tracking_uri"]).create_experiment("amp_track", "s3://me:hunter2@nowhere/x")
    with pytest.raises(BadInput, match=r"stores files in s3://me:\*\*\*@nowhere/x, which requires boto3\. Install it"):
        tracker()


@pytest.mark.parametrize("is_made", [False, True])
def test_a_place_in_which_no_files_can_be_kept_is_rejected(is_made: bool, tmp_path: Path) -> None:
    if is_made:
        (tmp_path / "file").touch()
        mlflow.MlflowClient(stores()["tracking_uri"]).create_experiment("amp_track", str(tmp_path / "file" / "runs"))
    else:
        Path("mlruns").touch()
    with pytest.raises(BadInput, match=r"is not a writable folder\. "):
        tracker()


@pytest.mark.parametrize("location", ["mlflow-artifacts:/1", "dbfs:/1", "relative/1"])
def test_other_places_are_nobodys_concern(location: str) -> None:
    mlflow.MlflowClient(stores()["tracking_uri"]).create_experiment("amp_track", location)
    tracker()


@pytest.mark.parametrize("table", ["metrics", "latest_metrics", "datasets"])
def test_a_table_that_is_missing_is_seen_and_not_made(table: str) -> None:
    with closing(sqlite3.connect("mlflow.db")) as connection:
        connection.execute(f"DROP TABLE {table}")
        connection.commit()
    before = Path("mlflow.db").read_bytes()
    with pytest.raises(BadInput, match=f"has no table {table}, which MLflow .* needs"):
        tracker()
    assert Path("mlflow.db").read_bytes() == before


def test_a_run_whose_last_records_are_rejected_has_not_finished() -> None:
    opened = tracker()
    with pytest.raises(mlflow.exceptions.MlflowException), opened.run("a run", tags={}) as run:
        run.metric("a//b", 1.0)
    kept = mlflow.MlflowClient(stores()["tracking_uri"]).get_run(run.run_id)
    assert kept.info.status == "FAILED"


@pytest.mark.parametrize("variable", ["MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"])
def test_a_given_experiment_takes_precedence_over_the_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = mlflow.MlflowClient(stores()["tracking_uri"])
    monkeypatch.setenv(variable, client.create_experiment("7") if variable.endswith("ID") else "7")
    with Tracker(stores()["tracking_uri"], experiment="mine").run("a run", tags={}) as run:
        pass
    assert client.get_experiment(run.experiment_id).name == "mine"
    with tracker().run("another", tags={}) as run:
        pass
    assert client.get_experiment(run.experiment_id).name == "7"


def test_an_experiment_that_was_deleted_is_rejected() -> None:
    client = mlflow.MlflowClient(stores()["tracking_uri"])
    client.delete_experiment(client.create_experiment("mine"))
    with pytest.raises(BadInput, match=r"experiment mine of .* has been deleted"):
        Tracker(stores()["tracking_uri"], experiment="mine")
