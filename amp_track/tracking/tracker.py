"""An MLflow tracking store: its experiment, and runs that end with their block."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterator, Mapping
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
_FIRST_EXPERIMENT = "0"
"""The id of the experiment that every new store has."""
_NOT_THERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""MLflow's codes for an id of nothing, and for a text that can be no id."""
_LONGEST_ID = 18
"""Digits that MLflow gives the id of an experiment at most."""
_LONGEST_NAME = 500
"""Characters that MLflow takes in the name of an experiment."""


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
        resumes: whether runs are resumed alone, wherever the environment would put new ones.

    Raises:
        BadInput: the environment names a run or an experiment that is not in the store. Nothing was written.
    """

    def __init__(self, uri: str, *, resumes: bool = False) -> None:
        _hush()
        self.uri = uri
        file = addresses.new_file(uri)
        if file is not None:
            self._check_environment_of_new_store()
        with store_lock(uri):
            if file is not None:
                private.make_store(file)
            self._client = mlflow.MlflowClient(tracking_uri=uri)  # makes the tables that a fresh store lacks
        if not resumes:
            self._check_environment()

    @functools.cached_property
    def _experiment_id(self) -> str:
        """The experiment of new runs, made when it is first used."""
        with store_lock(self.uri):
            return self._find_experiment()

    def _find_experiment(self) -> str:
        found = self._known_experiment()
        return found if found is not None else str(self._client.create_experiment(_experiment_name()))

    def _known_experiment(self) -> str | None:
        """Return the id of the experiment of new runs; None if it is yet to be made.

        Raises:
            BadInput: it has been deleted, or the environment names it by an id that is none.
        """
        name, given_id = _experiment_name(), os.environ.get("MLFLOW_EXPERIMENT_ID")
        if given_id and len(given_id) > _LONGEST_ID:  # a database raises an error of its own
            raise self._not_there("MLFLOW_EXPERIMENT_ID", given_id, "an experiment")
        try:
            found = self._client.get_experiment(given_id) if given_id else self._client.get_experiment_by_name(name)
        except mlflow.exceptions.MlflowException as error:
            if given_id is None or error.error_code not in _NOT_THERE:
                raise
            raise self._not_there("MLFLOW_EXPERIMENT_ID", given_id, "an experiment") from None
        if found is None:
            return None
        if found.lifecycle_stage != "active":
            raise BadInput(
                f"--tracking-uri: got {addresses.masked(self.uri)}, whose experiment {found.name} has been deleted, "
                "expected one that is there; restore it (mlflow experiments restore --experiment-id "
                f"{found.experiment_id}), or name another with MLFLOW_EXPERIMENT_NAME"
            )
        return str(found.experiment_id)

    def _check_environment(self) -> None:
        """Raise BadInput if new runs cannot be where the environment says."""
        if (run_id := run_id_of_environment()) is None:
            self._known_experiment()
        elif not self.exists(run_id):
            raise self._not_there("MLFLOW_RUN_ID", run_id, "a run")

    def _check_environment_of_new_store(self) -> None:
        """Raise BadInput if the environment names what no new store has."""
        _experiment_name()
        if (run_id := run_id_of_environment()) is not None:
            raise self._not_there("MLFLOW_RUN_ID", run_id, "a run")
        if (experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID") or _FIRST_EXPERIMENT) != _FIRST_EXPERIMENT:
            raise self._not_there("MLFLOW_EXPERIMENT_ID", experiment_id, "an experiment")

    def _not_there(self, variable: str, got: str, expected: str) -> BadInput:
        return BadInput(
            f"{variable}: got {got}, expected {expected} in {addresses.masked(self.uri)}; unset it, or name the store "
            "it is in"
        )

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
                raise self._not_there("MLFLOW_RUN_ID", run_id, "a run")
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
        process = json.loads(tags["amp_track.process"])
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
            if error.error_code not in _NOT_THERE:
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
        killed = 0
        for run in running:
            number = int(run.data.tags.get("optuna.trial", "-1"))
            if number in finished_trials.get(run.data.tags.get("optuna.study", ""), set()):
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


def _experiment_name() -> str:
    """Return the name of the experiment that new runs go to. Raises BadInput if the environment's is none."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise BadInput(
            f"MLFLOW_EXPERIMENT_NAME: got {name!r}, expected a name of {_LONGEST_NAME} printable characters at most; "
            "give another one, or unset it"
        )
    return name


def run_id_of_environment() -> str | None:
    """Return the id of the run that `mlflow run` has made for this process."""
    return os.environ.get("MLFLOW_RUN_ID") or None
