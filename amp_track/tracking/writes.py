"""Writes to an MLflow run as plain data, which can be stored on disk and sent repeatedly.

Writes are idempotent. MLflow keeps one row for a metric that is logged twice with the same time, step and value, and
repeated tags, params, artifacts and ends of runs replace each other. Only the creation of a run is not, see
`outbox.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import mlflow
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.entities import Run as StoredRun
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from amp_track.records.events import CheckpointWritten, FileWritten
from amp_track.records.result import JobStatus
from amp_track.tracking import checkpoints, mlflow_internals

METRICS_PER_BATCH, PARAMS_PER_BATCH = 800, 100  # MLflow takes 100 params, 100 tags and 1,000 entries in total

STATUS_TAG = "amp_track.status"
_TABLES = "mlflow.loggedArtifacts"

MetricRow = tuple[str, float, int, int]  # name, value, time in milliseconds since 1970, and step


@dataclass(frozen=True, kw_only=True)
class CreateRun:
    kind: Literal["create"] = "create"
    experiment_id: str
    name: str
    tags: dict[str, str]
    start_time_ms: int

    def create(self, client: mlflow.MlflowClient) -> StoredRun:
        return client.create_run(self.experiment_id, self.start_time_ms, self.tags, self.name)


@dataclass(frozen=True, kw_only=True)
class ResumeRun:
    """Set an existing run to RUNNING."""

    kind: Literal["resume"] = "resume"

    def send(self, client: mlflow.MlflowClient, run_id: str) -> None:
        client.update_run(run_id, status="RUNNING")
        _clear_interrupted(client, run_id)


@dataclass(frozen=True, kw_only=True)
class GoOn:
    """Set a run to RUNNING again, with tags, if an interrupted search worker has ended it."""

    kind: Literal["go-on"] = "go-on"
    tags: dict[str, str] = Field(default_factory=dict)

    def send(self, client: mlflow.MlflowClient, run_id: str) -> None:
        if client.get_run(run_id).info.status in ("FAILED", "KILLED"):
            client.update_run(run_id, status="RUNNING")
            _clear_interrupted(client, run_id)
            LogBatch(tags=self.tags).send(client, run_id)


@dataclass(frozen=True, kw_only=True)
class LogBatch:
    kind: Literal["batch"] = "batch"
    metrics: list[MetricRow] = Field(default_factory=list)
    params: dict[str, str] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)

    def send(self, client: mlflow.MlflowClient, run_id: str) -> None:
        params = [Param(name, value) for name, value in self.params.items()]
        tags = [RunTag(name, value) for name, value in self.tags.items()]
        mlflow_internals.log_batch(client, run_id, [Metric(*row) for row in self.metrics], params, tags)


@dataclass(frozen=True, kw_only=True)
class LogDatasets:
    """Log the data sets of a run, with their numbers of samples, if known, by context (`train`, `eval`)."""

    kind: Literal["datasets"] = "datasets"
    workload: str
    workload_digest: str
    digest: str
    samples: dict[str, int | None]

    def send(self, client: mlflow.MlflowClient, run_id: str) -> None:
        source = json.dumps({"workload": self.workload, "digest": self.workload_digest})
        datasets = []
        for context, samples in self.samples.items():
            profile = json.dumps({"num_rows": samples}) if samples is not None else None
            dataset = Dataset(f"{self.workload}-{context}", self.digest, "code", source, profile=profile)
            datasets.append(DatasetInput(dataset, [InputTag("mlflow.data.context", context)]))
        _twice(lambda: client.log_inputs(run_id, datasets=datasets))


@dataclass(frozen=True, kw_only=True)
class LogText:
    """Store a text as an artifact."""

    kind: Literal["text"] = "text"
    path: str
    text: str

    def send(self, client: mlflow.MlflowClient, run_id: str) -> None:
        with checkpoints.time_to_transfer(len(self.text)):
            client.log_text(run_id, self.text, self.path)


@dataclass(frozen=True, kw_only=True)
class LogTable:
    """Store a table, as text in MLflow's format, and list it beside the run's other tables: only those open as one."""

    kind: Literal["table"] = "table"
    path: str
    text: str

    def send(self, client: mlflow.MlflowClient, run_id: str) -> None:
        LogText(path=self.path, text=self.text).send(client, run_id)
        listed = json.loads(client.get_run(run_id).data.tags.get(_TABLES, "[]"))
        if (entry := {"path": self.path, "type": "table"}) not in listed:
            client.set_tag(run_id, _TABLES, json.dumps([*listed, entry]))


@dataclass(frozen=True, kw_only=True)
class LogFile(FileWritten):
    """Store a file as an artifact."""

    kind: Literal["file"] = "file"

    def send(self, client: mlflow.MlflowClient, run_id: str) -> None:
        with checkpoints.time_to_transfer(Path(self.file).stat().st_size):
            client.log_artifact(run_id, self.file, self.folder or None)


@dataclass(frozen=True, kw_only=True)
class LogCheckpoint(CheckpointWritten):
    """Store a checkpoint, and remove those that it replaces."""

    kind: Literal["checkpoint"] = "checkpoint"

    def send(self, client: mlflow.MlflowClient, run_id: str) -> None:
        checkpoints.keep(client, run_id, self)


@dataclass(frozen=True, kw_only=True)
class TagExperiment:
    """Set a tag of an experiment."""

    kind: Literal["experiment-tag"] = "experiment-tag"
    experiment_id: str
    name: str
    value: str

    def send(self, client: mlflow.MlflowClient, run_id: str) -> None:
        _twice(lambda: client.set_experiment_tag(self.experiment_id, self.name, self.value))


@dataclass(frozen=True, kw_only=True)
class EndRun:
    """End a run as FINISHED, FAILED or KILLED."""

    kind: Literal["end"] = "end"
    status: str
    end_time_ms: int
    is_shared: bool = False

    def send(self, client: mlflow.MlflowClient, run_id: str) -> None:
        client.set_terminated(run_id, self.status, self.end_time_ms)
        if self.is_shared and self.status == "FINISHED":
            _clear_interrupted(client, run_id)


Write = (
    CreateRun
    | ResumeRun
    | GoOn
    | LogBatch
    | LogDatasets
    | LogText
    | LogTable
    | LogFile
    | LogCheckpoint
    | TagExperiment
    | EndRun
)
WRITES: TypeAdapter[Write] = TypeAdapter(Annotated[Write, Field(discriminator="kind")])
"""Parses a write from the output of `dataclasses.asdict`."""


def now_ms() -> int:
    """Return the time in milliseconds since 1970."""
    return int(time.time() * 1000)


def killed(started_ms: int) -> tuple[LogBatch, EndRun]:
    """Return the writes that end a run like Ctrl-C does: KILLED, with the status interrupted.

    Not before its start: the clock may have been set back since.
    """
    tags = {STATUS_TAG: str(JobStatus.INTERRUPTED)}
    return LogBatch(tags=tags), EndRun(status="KILLED", end_time_ms=max(now_ms(), started_ms))


def _clear_interrupted(client: mlflow.MlflowClient, run_id: str) -> None:
    """Delete the status interrupted, if a run has it: the run of a study gets no other status that would replace it."""

    def clear() -> None:
        if client.get_run(run_id).data.tags.get(STATUS_TAG) == JobStatus.INTERRUPTED:
            client.delete_tag(run_id, STATUS_TAG)

    _twice(clear)


def _twice(call: Callable[[], object]) -> None:
    """Call again after an error: if two search workers change a tag or a data set at the same time, one fails."""
    try:
        call()
    except mlflow.exceptions.MlflowException:
        call()
