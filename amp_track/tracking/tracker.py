"""An MLflow tracking store: its experiment, and runs that end however their block does."""

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
from amp_track.tracking import checkpoints
from amp_track.tracking.run import Run
from amp_track.workers import processes
from amp_track.workers.locks import store_lock

EXPERIMENT = "amp_track"


@dataclass(frozen=True)
class Resumable:
    """A training that stopped."""

    job: Job
    workload_digest: str
    is_finished: bool


class Tracker:
    """An MLflow tracking store, made ready.

    Args:
        uri: its address, already checked by `stores.check`. New top-level runs go to the experiment that the
            environment names (MLFLOW_EXPERIMENT_ID or _NAME), else to `amp_track`.
    """

    def __init__(self, uri: str) -> None:
        for noisy in ("alembic", "mlflow.store.db.utils", "mlflow.tracking"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        self.uri = uri
        with store_lock(uri):
            self._client = mlflow.MlflowClient(tracking_uri=uri)  # makes the tables of a fresh store

    @functools.cached_property
    def _experiment_id(self) -> str:
        """Of new runs; made when first wanted."""
        with store_lock(self.uri):
            return self._find_experiment()

    def _find_experiment(self) -> str:
        if experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return experiment_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found is not None else str(self._client.create_experiment(name))

    @contextmanager
    def run(
        self, name: str, *, tags: dict[str, str], run_id: str | None = None, parent: Run | None = None
    ) -> Iterator[Run]:
        """A run that ends, however its block does: FINISHED; FAILED after an exception; KILLED after Ctrl-C or SIGTERM.

        Args:
            name: shown in the UI.
            tags: set at once.
            run_id: an existing run to go on with.
            parent: the run to show this one under.
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
                run.end()
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
        made = self._client.create_run(experiment_id, tags=_common_tags() | tags, run_name=name)
        return Run(self._client, made.info.run_id, experiment_id)

    def resumable(self, run_id: str) -> Resumable:
        """What a run says of itself that going on with it needs.

        Raises:
            BadInput: there is no such run, or it is not one that can be gone on with now.
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
        """The newest one, in `folder`. Raises BadInput if there is none."""
        return checkpoints.fetch(self._client, run_id, folder)

    def fetch_pictures(self, run_id: str, folder: Path) -> dict[str, Path]:
        """What the workload drew of a run's model, in `folder`, by name; empty where this store has none."""
        if not self.exists(run_id):
            return {}
        files = [item.path for item in self._client.list_artifacts(run_id, PICTURES)]
        return {Path(file).stem: Path(self._client.download_artifacts(run_id, file, str(folder))) for file in files}

    def exists(self, run_id: str) -> bool:
        """Whether the store has this run, not deleted. An error of the store is not an answer: it is raised."""
        try:
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def kill_orphans(self, parent_run_id: str, finished_trials: Mapping[str, set[int]]) -> int:
        """End as KILLED the children still RUNNING whose Optuna trial is over: their process died without a word.

        Args:
            parent_run_id: the study's run.
            finished_trials: by Optuna study name, the numbers of its finished trials.

        Returns:
            How many there were.
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


def run_id_of_environment() -> str | None:
    """The run that `mlflow run` has made for this process."""
    return os.environ.get("MLFLOW_RUN_ID") or None


@functools.cache
def _common_tags() -> dict[str, str]:
    """User and source as MLflow's own `start_run` records them.

    The one place that touches this registry; should it move, the columns User and Source of the UI become empty.
    """
    from mlflow.tracking.context import registry

    return dict(registry.resolve_tags())
