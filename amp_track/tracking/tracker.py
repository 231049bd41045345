"""An MLflow tracking store: its experiment, and runs that end with their block."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlflow
from mlflow.entities import RunStatus

from amp_track.records import addresses
from amp_track.records.errors import BadInput
from amp_track.records.events import PICTURES
from amp_track.records.job import Job
from amp_track.records.outcome import Verdict
from amp_track.tracking import checkpoints, private
from amp_track.tracking.run import Run
from amp_track.workers import processes
from amp_track.workers.locks import store_lock

EXPERIMENT = "amp_track"
PROCESS = "amp_track.process"
"""The tag that says which process writes a run."""


@dataclass(frozen=True)
class Resumable:
    """What it takes to resume a training that has stopped."""

    job: Job
    workload_digest: str
    is_finished: bool


class Tracker:
    """An MLflow tracking store with its tables made.

    New top-level runs go to the experiment that the environment names (MLFLOW_EXPERIMENT_ID or _NAME), else to
    `amp_track`.

    Args:
        uri: the store's address, which the command has checked.
    """

    def __init__(self, uri: str) -> None:
        _hush()
        self.uri = uri
        file = addresses.new_file(uri)
        with store_lock(uri):
            if file is not None:
                private.make_store(file)
            self._client = mlflow.MlflowClient(tracking_uri=uri)  # makes the tables that a fresh store lacks

    @functools.cached_property
    def _experiment_id(self) -> str:
        """The experiment of new runs, made when it is first used."""
        with store_lock(self.uri):
            return self._find_experiment()

    def _find_experiment(self) -> str:
        if experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return experiment_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            return str(self._client.create_experiment(name))
        if experiment.lifecycle_stage != "active":
            raise BadInput(
                f"--tracking-uri: got {addresses.masked(self.uri)}, whose experiment {name} has been deleted, expected "
                "one that is there; restore it (mlflow experiments restore --experiment-id "
                f"{experiment.experiment_id}), or name another with MLFLOW_EXPERIMENT_NAME"
            )
        return str(experiment.experiment_id)

    @contextmanager
    def run(
        self, name: str, *, tags: dict[str, str], run_id: str | None = None, parent: Run | None = None
    ) -> Iterator[Run]:
        """Open a run that ends with its block: FINISHED; FAILED after an exception; KILLED after Ctrl-C or SIGTERM.

        Args:
            name: the name that the UI shows.
            tags: tags that are set at once.
            run_id: an existing run to resume.
            parent: the run under which the UI shows this one.
        """
        run = self._open(name, tags, run_id, parent)
        status = "FAILED"
        try:
            yield run
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            run.tags({"amp_track.verdict": str(Verdict.INTERRUPTED)})
            raise
        finally:
            try:
                run.flush()
            finally:
                self._client.set_terminated(run.run_id, status)

    def _open(self, name: str, tags: dict[str, str], run_id: str | None, parent: Run | None) -> Run:
        if run_id is not None:
            if not self.exists(run_id):
                raise BadInput(
                    f"MLFLOW_RUN_ID: got {run_id}, expected a run in {addresses.masked(self.uri)}; unset it, or name "
                    "the store it is in"
                )
            self._client.update_run(run_id, status=RunStatus.to_string(RunStatus.RUNNING))
            existing = self._client.get_run(run_id)
            run = Run(self._client, run_id, existing.info.experiment_id)
            run.adopt()
            run.tags(tags)
            run.flush()
            return run
        if parent is not None:
            tags = tags | {"mlflow.parentRunId": parent.run_id}
        experiment_id = parent.experiment_id if parent is not None else self._experiment_id
        made = self._client.create_run(experiment_id, tags=private.context_tags() | tags, run_name=name)
        return Run(self._client, made.info.run_id, experiment_id)

    def resumable(self, run_id: str) -> Resumable:
        """Return what it takes to resume a run.

        Raises:
            BadInput: there is no such run, or it cannot be resumed now.
        """
        if not self.exists(run_id):
            raise BadInput(
                f"--resume: got {run_id}, expected a run in {addresses.masked(self.uri)}; name its store with "
                "--tracking-uri"
            )
        run = self._client.get_run(run_id)
        tags = run.data.tags
        if tags.get("amp_track.kind") != "train" or "amp_track.job" not in tags:
            raise BadInput(f"--resume: got run {run_id}, expected one that amp-track train has made")
        process = json.loads(tags[PROCESS])
        if run.info.status == "RUNNING" and not processes.is_gone(process):
            raise BadInput(
                f"--resume: got run {run_id}, expected one that has stopped: process {process['pid']} on "
                f"{process['host']} is training it; stop it first, or, "
                "if that machine is gone, end the run in MLflow: MlflowClient().set_terminated"
            )
        return Resumable(
            job=Job.from_json(tags["amp_track.job"]),
            workload_digest=tags["amp_track.workload_digest"],
            is_finished=run.info.status == "FINISHED",
        )

    def fetch_checkpoint(self, run_id: str, folder: Path) -> Path:
        """Download the newest checkpoint of a run into `folder`. Raise BadInput if there is none."""
        return checkpoints.fetch(self._client, run_id, folder)

    def fetch_pictures(self, run_id: str, folder: Path) -> dict[str, Path]:
        """Download the pictures that the workload drew into `folder` and return them by name; empty without any."""
        if not self.exists(run_id):
            return {}
        files = [item.path for item in self._client.list_artifacts(run_id, PICTURES)]
        return {Path(file).stem: Path(self._client.download_artifacts(run_id, file, str(folder))) for file in files}

    def exists(self, run_id: str) -> bool:
        """Return whether the store has this run, not deleted. An error of the store itself is raised."""
        try:
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def kill_orphans(self, parent_run_id: str, finished_trials: Mapping[str, set[int]]) -> int:
        """End as KILLED the child runs still RUNNING whose Optuna trial is over: their process was killed.

        Args:
            parent_run_id: the study's run.
            finished_trials: the numbers of the finished trials, by the name of their Optuna study.

        Returns:
            How many runs there were.
        """
        experiment_id = self._client.get_run(parent_run_id).info.experiment_id
        running = self._client.search_runs(
            [experiment_id], f"tags.`mlflow.parentRunId` = '{parent_run_id}' and attributes.status = 'RUNNING'"
        )
        return self._kill(
            run
            for run in running
            if int(run.data.tags.get("optuna.trial", "-1"))
            in finished_trials.get(run.data.tags.get("optuna.study", ""), set())
        )

    def kill_dead_trainings(self) -> int:
        """End as KILLED the trainings of `train` that a process of this host, now gone, has left; return how many."""
        running = self._client.search_runs(
            [self._experiment_id], "tags.`amp_track.kind` = 'train' and attributes.status = 'RUNNING'"
        )
        return self._kill(
            run
            for run in running
            if "mlflow.parentRunId" not in run.data.tags  # a trial ends with its study
            and PROCESS in run.data.tags
            and processes.is_gone(json.loads(run.data.tags[PROCESS]))
        )

    def _kill(self, runs: Iterable[mlflow.entities.Run]) -> int:
        """End runs as KILLED, and return how many there were."""
        killed = 0
        for run in runs:
            self._client.set_tag(run.info.run_id, "amp_track.verdict", str(Verdict.INTERRUPTED))
            self._client.set_terminated(run.info.run_id, "KILLED")
            killed += 1
        return killed


def warm_up(uri: str) -> None:
    """Do what takes a while before the store at `uri` can be opened. Writes nothing."""
    _hush()
    if addresses.new_file(uri) is not None:
        private.empty_store()
    private.context_tags()


def _hush() -> None:
    for noisy in ("alembic", "mlflow.store.db.utils", "mlflow.tracking"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def run_id_of_environment() -> str | None:
    """Return the id of the run that `mlflow run` has made for this process."""
    return os.environ.get("MLFLOW_RUN_ID") or None
