"""Runs that are RUNNING though their process has ended: killed, or gone with its machine."""

from __future__ import annotations

import json

import mlflow
from mlflow.entities import Run

from amp_track.records.outcome import Verdict
from amp_track.workers import processes

_PROCESS, _PARENT = "amp_track.process", "mlflow.parentRunId"


def process_tag() -> dict[str, str]:
    """Return the tag that says which process writes a run."""
    return {_PROCESS: json.dumps(processes.this_process())}


def end_all(client: mlflow.MlflowClient, experiment_id: str) -> int:
    """End as KILLED the runs of an experiment whose process is known to be gone. Return how many there were.

    That cannot be known of a process on another machine or in another container. The run of a study goes on while
    another of its search workers is at work.
    """
    running = client.search_runs([experiment_id], "attributes.status = 'RUNNING'")
    gone = [run for run in running if _is_gone(run)]
    ended = {run.info.run_id for run in gone}
    at_work = {run.data.tags.get(_PARENT) for run in running if run.info.run_id not in ended}
    gone = [run for run in gone if run.info.run_id not in at_work]
    for run in gone:
        kill(client, run)
    return len(gone)


def kill(client: mlflow.MlflowClient, run: Run) -> None:
    """End a run as KILLED, as Ctrl-C does."""
    client.set_tag(run.info.run_id, "amp_track.verdict", str(Verdict.INTERRUPTED))
    client.set_terminated(run.info.run_id, "KILLED")


def _is_gone(run: Run) -> bool:
    process = run.data.tags.get(_PROCESS)
    return process is not None and processes.is_gone(json.loads(process))
