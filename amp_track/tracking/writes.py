"""Describe writes to an MLflow run as plain data, which can be stored on disk and sent repeatedly.

Writes are idempotent. MLflow keeps one row for a metric that is logged twice with the same time, step and value, and
repeated tags, params, artifacts and ends of runs replace each other. Only the creation of a run is not, see
`outbox.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import mlflow
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from amp_track.records import metrics
from amp_track.records.events import CheckpointWritten
from amp_track.records.result import JobStatus
from amp_track.tracking import checkpoints

METRICS_PER_BATCH, PARAMS_PER_BATCH, TAGS_PER_BATCH = 800, 100, 100
"""Limits of one log_batch in MLflow: 100 params, 100 tags and 1,000 entries in total."""

_SECTION, _MOST_RUNS = "amp_track", 100
"""The section of the charts in MLflow's UI, and the maximum number of runs in one chart."""

MetricRow = tuple[str, float, int, int]
"""Name, value, time in milliseconds since 1970, and step."""


@dataclass(frozen=True, kw_only=True)
class CreateRun:
    """Create a child run."""

    kind: Literal["create"] = "create"
    experiment_id: str
    name: str
    tags: dict[str, str]
    start_time_ms: int


@dataclass(frozen=True, kw_only=True)
class ResumeRun:
    """Set an existing run to RUNNING."""

    kind: Literal["resume"] = "resume"


@dataclass(frozen=True, kw_only=True)
class GoOn:
    """Set a run to RUNNING again, with tags, if an interrupted search worker has ended it."""

    kind: Literal["go-on"] = "go-on"
    tags: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LogBatch:
    """Log metrics, params and tags."""

    kind: Literal["batch"] = "batch"
    metrics: list[MetricRow] = Field(default_factory=list)
    params: dict[str, str] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LogDatasets:
    """Log the data sets of a run, by context."""

    kind: Literal["datasets"] = "datasets"
    datasets: dict[str, DatasetRow]


@dataclass(frozen=True, kw_only=True)
class DatasetRow:
    """One data set in MLflow's terms; `source` and `profile` are JSON."""

    name: str
    digest: str
    source: str
    profile: str


@dataclass(frozen=True, kw_only=True)
class LogText:
    """Store a text as an artifact."""

    kind: Literal["text"] = "text"
    path: str
    text: str


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """Store a file as an artifact in `folder`; an empty folder is the root."""

    kind: Literal["file"] = "file"
    file: str
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class LogCheckpoint:
    """Store a checkpoint, and remove those that it replaces."""

    kind: Literal["checkpoint"] = "checkpoint"
    file: str
    step: int
    is_last: bool
    is_best: bool


@dataclass(frozen=True, kw_only=True)
class KeepView:
    """Store the view of the trainings under a run as a tag of its experiment."""

    kind: Literal["view"] = "view"
    experiment_id: str
    batches_differ: bool


@dataclass(frozen=True, kw_only=True)
class EndRun:
    """End a run as FINISHED, FAILED or KILLED."""

    kind: Literal["end"] = "end"
    status: str
    end_time_ms: int


Write = CreateRun | ResumeRun | GoOn | LogBatch | LogDatasets | LogText | LogFile | LogCheckpoint | KeepView | EndRun
WRITES: TypeAdapter[Write] = TypeAdapter(Annotated[Write, Field(discriminator="kind")])
"""Parses a write from the output of `dataclasses.asdict`."""


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that cannot be set. On Linux, it continues while the machine sleeps."""
_ahead_seconds = time.time() - time.clock_gettime(_CLOCK)


def set_clock() -> None:
    """Synchronize the clock of `now_ms` with the system clock, at the start of each command."""
    global _ahead_seconds
    _ahead_seconds = time.time() - time.clock_gettime(_CLOCK)


def now_ms() -> int:
    """Return the time in milliseconds since 1970.

    It is monotonic within a command. The system clock may be set back, and a run would end before its start.
    """
    return int((_ahead_seconds + time.clock_gettime(_CLOCK)) * 1000)


def killed(started_ms: int) -> tuple[Write, ...]:
    """Return the writes that end a run like Ctrl-C does: KILLED, with the status interrupted.

    Args:
        started_ms: the start of the run, which may be later than now if the clock was set back.
    """
    end_time_ms = max(now_ms(), started_ms)
    tags = {"amp_track.status": str(JobStatus.INTERRUPTED)}
    return LogBatch(tags=tags), EndRun(status="KILLED", end_time_ms=end_time_ms)


def create(client: mlflow.MlflowClient, write: CreateRun) -> mlflow.entities.Run:
    """Create a run and return it."""
    return client.create_run(write.experiment_id, start_time=write.start_time_ms, tags=write.tags, run_name=write.name)


def apply(client: mlflow.MlflowClient, run_id: str, write: Write) -> None:
    """Send a write to an existing run. Keep the file of the write."""
    match write:
        case CreateRun():
            raise AssertionError("an existing run cannot be created")
        case ResumeRun():
            client.update_run(run_id, status="RUNNING")
        case GoOn():
            if client.get_run(run_id).info.status in ("FAILED", "KILLED"):
                client.update_run(run_id, status="RUNNING")
                for name, value in write.tags.items():
                    client.set_tag(run_id, name, value)
        case LogBatch():
            client.log_batch(
                run_id,
                metrics=[Metric(*row) for row in write.metrics],
                params=[Param(name, value) for name, value in write.params.items()],
                tags=[RunTag(name, value) for name, value in write.tags.items()],
            )
        case LogDatasets():
            datasets = [_dataset_input(context, row) for context, row in write.datasets.items()]
            _twice(client.log_inputs, run_id, datasets=datasets)
        case LogText():
            client.log_text(run_id, write.text, write.path)
        case LogFile():
            client.log_artifact(run_id, write.file, write.folder or None)
        case LogCheckpoint():
            checkpoints.keep(
                client,
                run_id,
                CheckpointWritten(file=write.file, step=write.step, is_last=write.is_last, is_best=write.is_best),
            )
        case KeepView():
            view = trainings_view(run_id, batches_differ=write.batches_differ)
            _twice(client.set_experiment_tag, write.experiment_id, view_tag(run_id), view)
        case EndRun():
            client.set_terminated(run_id, write.status, write.end_time_ms)


def file_of(write: Write) -> Path | None:
    """Return the file of a write, or None."""
    return Path(write.file) if isinstance(write, LogFile | LogCheckpoint) else None


def merged(first: Write, second: Write) -> LogBatch | None:
    """Return two batches as one; None for other writes, or if MLflow's limits are exceeded."""
    if not isinstance(first, LogBatch) or not isinstance(second, LogBatch):
        return None
    params, tags = first.params | second.params, first.tags | second.tags
    rows = [*first.metrics, *second.metrics]
    if len(rows) > METRICS_PER_BATCH or len(params) > PARAMS_PER_BATCH or len(tags) > TAGS_PER_BATCH:
        return None
    return LogBatch(metrics=rows, params=params, tags=tags)


def _twice(call: Callable[..., object], *arguments: object, **keywords: object) -> None:
    """Call again after an error: if two search workers create a tag or a data set at the same time, one fails."""
    try:
        call(*arguments, **keywords)
    except mlflow.exceptions.MlflowException:
        call(*arguments, **keywords)


def _dataset_input(context: str, row: DatasetRow) -> DatasetInput:
    dataset = Dataset(name=row.name, digest=row.digest, source_type="code", source=row.source, profile=row.profile)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def view_tag(run_id: str) -> str:
    """Return the name of the experiment's tag that holds the view of the trainings of a study.

    A "shared view" of MLflow's UI defines charts, and has a URL. It is not part of MLflow's API: its names are the same
    in the UI of all releases from 3.10 to 3.18. If they change, the URL shows the default charts of all runs. A URL
    with a filter shows no view, so the filter is part of the view, and each study has one view.
    """
    return f"mlflow.sharedViewState.{run_id}"


def trainings_view(run_id: str, *, batches_differ: bool) -> str:
    """Return the view of the trainings under a study's run: speed and memory first, then the loss.

    Args:
        run_id: the id of the study's run.
        batches_differ: whether to plot over the batch size instead of bars.
    """
    speed, memory, seconds = "throughput/samples_per_s", "memory/max_reserved_mib", "time/wall_s"

    def scatter(across: str, kind: str, up: str) -> dict[str, Any]:
        return {"type": "SCATTER", "xaxis": {"key": across, "type": kind}, "yaxis": {"key": up, "type": "METRIC"}}

    charts = [
        scatter("batch_size", "PARAM", name) if batches_differ else {"type": "BAR", "metricKey": name}
        for name in (speed, memory)
    ]
    charts.append(scatter(seconds, "METRIC", metrics.EVAL_LOSS))
    shown = {"deleted": False, "isGenerated": False, "runsCountToCompare": _MOST_RUNS}
    return json.dumps(
        {
            "searchFilter": f"tags.`mlflow.parentRunId` = '{run_id}' AND tags.`amp_track.kind` = 'train'",
            "orderByKey": f"metrics.`{speed}`",  # by time, the UI folds children under their parent
            "orderByAsc": False,
            "runsHiddenMode": "SHOWALL",  # the default is ten
            "compareRunCharts": [
                {"uuid": f"{_SECTION}-{number}", "metricSectionId": _SECTION, **shown, **chart}
                for number, chart in enumerate(charts)
            ],
            "compareRunSections": [
                {"uuid": _SECTION, "name": "Speed, memory, loss", "display": True, "isReordered": False}
            ],
            "isAccordionReordered": True,
        }
    )
