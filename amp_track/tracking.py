"""MLflow: the only module that imports mlflow. Runs are made and ended here, and what a job streams is logged to them.

Everything goes through MlflowClient with explicit run ids: the fluent API's hidden state (an active run, an experiment,
a tracking URI) belongs to the user's program.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import mlflow
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunStatus, RunTag

from amp_track import stores
from amp_track.errors import BadInput
from amp_track.events import EpochEnded, Event, Started
from amp_track.job import Inspection, Job
from amp_track.outcome import Outcome, Verdict

EXPERIMENT = "amp_track"
_MEBIBYTE = 2**20
_FLUSH_SECONDS = 2.0
_METRICS_PER_BATCH, _PARAMS_PER_BATCH = 1000, 100
"""The most that MLflow takes in one log_batch."""


class Run:
    """One MLflow run while it is written. Metrics are buffered and go out every two seconds: one commit of SQLite takes
    as long as a thousand metrics."""

    def __init__(self, client: mlflow.MlflowClient, run_id: str, experiment_id: str) -> None:
        self.run_id = run_id
        self.experiment_id = experiment_id
        self._client = client
        self._metrics: list[Metric] = []
        self._params: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self._flushed = time.monotonic()
        self._known_params: dict[str, str] | None = None

    def metric(self, name: str, value: float | None, step: int = 0) -> None:
        """Buffer a metric; None is left out."""
        if value is not None:
            self._metrics.append(Metric(name, float(value), int(time.time() * 1000), step))

    def params(self, params: dict[str, str]) -> None:
        self._params |= {name: value[:6000] for name, value in params.items()}

    def tags(self, tags: dict[str, str]) -> None:
        self._tags |= {name: value[:8000] for name, value in tags.items()}

    def predicted(self, peak_bytes: int | None) -> None:
        """What the memory model expected before the job ran."""
        self.metric("memory/predicted_mib", peak_bytes / _MEBIBYTE if peak_bytes is not None else None)

    def event(self, event: Event, quality_name: str) -> None:
        """Log what a job streamed."""
        match event:
            case Started(settings=settings):
                self.tags({f"amp_track.{name}": value for name, value in settings})
            case EpochEnded():
                self.metric("train/loss", event.train_loss, event.epoch)
                self.metric("eval/loss", event.eval_loss, event.epoch)
                self.metric(f"eval/{quality_name}", event.quality, event.epoch)
                for step, scale in event.scale_changes:
                    self.metric("amp/scale", scale, step)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def outcome(self, outcome: Outcome) -> None:
        """Log what a job came to."""
        self.tags({"amp_track.verdict": str(outcome.verdict)})
        if outcome.message:
            self.tags({"amp_track.message": outcome.message})
        if outcome.traceback:
            self.text("traceback.txt", outcome.traceback)
        self.metric("time/wall_s", outcome.wall_seconds)
        self.metric("time/train_s", outcome.train_seconds)
        self.metric("throughput/samples_per_s", outcome.samples_per_second)
        self.metric("throughput/eval_samples_per_s", outcome.eval_samples_per_second)
        for name, size in (
            ("max_allocated", outcome.max_allocated_bytes),
            ("max_reserved", outcome.max_memory_bytes),
            ("eval_max_allocated", outcome.eval_max_allocated_bytes),
            ("max_resident", outcome.max_resident_bytes),
            ("requested", outcome.requested_bytes),
        ):
            self.metric(f"memory/{name}_mib", size / _MEBIBYTE if size is not None else None)
        if outcome.fits:
            self.metric("train/steps", outcome.steps)
            self.metric("train/updates", outcome.updates)
            self.metric("train/non_finite_losses", outcome.non_finite_losses)
        if outcome.scale is not None:
            self.metric("amp/skipped_steps", outcome.skipped_steps)
            self.metric("amp/final_scale", outcome.scale.final)
            self.metric("amp/scale", outcome.scale.initial, 0)
            last_step, last_scale = outcome.scale.history[-1]
            if last_scale == outcome.scale.history[-2][1]:  # else it was streamed as a change
                self.metric("amp/scale", last_scale, last_step)

    def dataset(self, found: Inspection) -> None:
        """What the run was trained and evaluated on."""
        inputs = []
        for context, samples in (("train", found.training_samples), ("eval", found.evaluation_samples)):
            dataset = Dataset(
                name=f"{found.workload_name}-{context}",
                digest=found.dataset_digest,
                source_type="code",
                source=json.dumps({"workload": found.workload_name, "digest": found.workload_digest}),
                profile=json.dumps({"num_rows": samples}),
            )
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", context)]))
        self._client.log_inputs(self.run_id, datasets=inputs)

    def text(self, file: str, text: str) -> None:
        self._client.log_text(self.run_id, text, file)

    def table(self, file: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """A table as MLflow's log_table writes it, in place of an earlier one: that would append to it."""
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        self._client.log_dict(self.run_id, {"columns": list(columns), "data": rows}, file)

    def artifact(self, file: Path) -> None:
        self._client.log_artifact(self.run_id, str(file))

    def artifact_path(self, file: str) -> str:
        """Where an artifact is: a path where the store keeps files on this machine, else an address."""
        uri = f"{self._client.get_run(self.run_id).info.artifact_uri}/{file}"
        return uri.removeprefix("file://")

    def flush(self) -> None:
        metrics, self._metrics = self._metrics, []
        params, self._params = list(self._without_clashes(self._params).items()), {}
        tags, self._tags = self._tags, {}
        while metrics or params or tags:
            self._client.log_batch(
                self.run_id,
                metrics=metrics[:_METRICS_PER_BATCH],
                params=[Param(name, value) for name, value in params[:_PARAMS_PER_BATCH]],
                tags=[RunTag(name, value) for name, value in tags.items()],
            )
            metrics, params, tags = metrics[_METRICS_PER_BATCH:], params[_PARAMS_PER_BATCH:], {}
        self._flushed = time.monotonic()

    def _without_clashes(self, params: dict[str, str]) -> dict[str, str]:
        """`mlflow run` has already logged what was given with -P, as it was typed; a param's value cannot be changed,
        so where ours says more ("auto" became 525) it is kept beside it."""
        if not params or self._known_params is None:
            return params
        known = self._known_params
        return {
            name if name not in known else f"{name}.resolved": value
            for name, value in params.items()
            if known.get(name) != value
        }

    def adopt(self) -> None:
        """This run was made by someone else: respect what is in it."""
        self._known_params = dict(self._client.get_run(self.run_id).data.params)


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
        with stores.first_use(uri):
            self._client = mlflow.MlflowClient(tracking_uri=uri)  # makes the tables of a fresh store
            self._experiment_id = self._find_experiment()

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
                run.flush()
            finally:
                self._client.set_terminated(run.run_id, status)

    def _open(self, name: str, tags: dict[str, str], run_id: str | None, parent: Run | None) -> Run:
        if run_id is not None:
            if not self.exists(run_id):
                raise BadInput(
                    f"MLFLOW_RUN_ID: got {run_id}, expected a run in {stores.masked(self.uri)}; unset it, or name the "
                    "store it is in"
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


def describe(run: Run, job: Job, found: Inspection, *, kind: str, with_params: bool = True) -> None:
    """What every run says of itself: the job, the device, the versions, the data, and the commit it came from. A
    study's run has no one precision or batch size: `with_params=False`."""
    if with_params:
        run.params(job.params())
        run.tags({"amp_track.precision_reason": found.support(job.precision).reason})
    run.tags(
        {
            "amp_track.kind": kind,
            "amp_track.device": found.device_name,
            "amp_track.device_kind": found.device_kind,
            "amp_track.workload_digest": found.workload_digest,
            **{f"amp_track.version.{name}": value for name, value in (*found.versions, *_versions())},
            **_commit_of(job.workload),
        }
    )
    run.dataset(found)


@functools.cache
def _common_tags() -> dict[str, str]:
    """User and source as MLflow's own `start_run` records them.

    The one place that touches this registry; should it move, the columns User and Source of the UI become empty.
    """
    from mlflow.tracking.context import registry

    return dict(registry.resolve_tags())


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    packages = ("mlflow", "optuna", "torchvision")
    return tuple((name, importlib.metadata.version(name)) for name in packages)


@functools.cache
def _commit_of(workload: str) -> dict[str, str]:
    """The git commit of the workload's folder, and whether it has changes that are not in it."""
    folder = Path(workload.partition(":")[0])
    folder = folder.resolve().parent if folder.exists() else Path.cwd()
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"mlflow.source.git.commit": commit, "amp_track.git_changed": str(bool(changed))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
