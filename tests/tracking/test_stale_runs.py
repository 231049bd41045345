"""Runs whose process has ended are ended by the next command in the same experiment."""

import json
from typing import Any

import mlflow
import pytest
from support import stores

from amp_track.tracking import Tracker
from amp_track.workers.liveness import this_process

pytestmark = pytest.mark.usefixtures("fresh_stores")
GONE = {"pid": 2**22 + 1}
ELSEWHERE = {"host": "elsewhere", "boot_id": "another"} | GONE


def made(client: mlflow.MlflowClient, process: dict[str, Any] | None, parent: str | None = None) -> str:
    """Make a RUNNING run of a process that differs from this one, or of none, and return its id."""
    tags = {"amp_track.process": json.dumps(this_process() | process)} if process is not None else {}
    tags |= {"mlflow.parentRunId": parent} if parent is not None else {}
    experiment = client.get_experiment_by_name("amp_track") or client.create_experiment("amp_track")
    run = client.create_run(getattr(experiment, "experiment_id", experiment), tags=tags)
    return str(run.info.run_id)


def test_what_the_next_command_ends() -> None:
    client = mlflow.MlflowClient(tracking_uri=stores()["tracking_uri"])
    gone, elsewhere, users_own = made(client, GONE), made(client, ELSEWHERE), made(client, None)
    study, of_another_worker = made(client, GONE), made(client, GONE)
    at_work, killed = made(client, {}, study), made(client, GONE, study)
    also_killed = made(client, GONE, of_another_worker)
    with Tracker(stores()["tracking_uri"]).run("next", tags={}) as following:
        pass
    found = {run_id: client.get_run(run_id).info.status for run_id in (gone, elsewhere, users_own, study, at_work)}
    assert list(found.values()) == ["KILLED", "RUNNING", "RUNNING", "RUNNING", "RUNNING"]
    for run_id in (gone, killed, of_another_worker, also_killed):
        run = client.get_run(run_id)
        assert (run.info.status, run.data.tags["amp_track.status"]) == ("KILLED", "interrupted")
    assert client.get_run(following.run_id).info.status == "FINISHED"


def test_a_new_run_says_at_once_which_process_writes_it() -> None:
    client = mlflow.MlflowClient(tracking_uri=stores()["tracking_uri"])
    with Tracker(stores()["tracking_uri"]).run("begins", tags={}) as run:
        tags = client.get_run(run.run_id).data.tags
    assert json.loads(tags["amp_track.process"]) == this_process()
