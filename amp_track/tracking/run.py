"""Write one MLflow run: the events and the result of a job as metrics, tags and artifacts."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Run as StoredRun

from amp_track.config.inspection import Inspection
from amp_track.records import metrics as names
from amp_track.records.events import CheckpointWritten, EpochEnded, Event, FileWritten, Noted, Started, StepsRecorded
from amp_track.records.result import JobResult, LayerGradients
from amp_track.records.units import MEBIBYTE
from amp_track.tracking.mlflow_internals import trainings_view, view_tag
from amp_track.tracking.outbox import Sink
from amp_track.tracking.writes import (
    METRICS_PER_BATCH,
    PARAMS_PER_BATCH,
    STATUS_TAG,
    EndRun,
    GoOn,
    LogBatch,
    LogCheckpoint,
    LogDatasets,
    LogFile,
    LogTable,
    LogText,
    MetricRow,
    TagExperiment,
    now_ms,
)  # fmt: skip

_FLUSH_SECONDS = 2.0
_GO_ON_SECONDS = 10.0
"""The least time between two checks of whether another search worker has ended the run of a study."""
DIAGNOSIS = "diagnosis.json"
_MOST_ROWS = 100_000  # maximum number of rows of diagnosis.json: a long training could have millions


class Run:
    """One MLflow run while it is written.

    Metrics are buffered and sent every two seconds: one commit of SQLite takes as long as a thousand metrics.
    `existing` is the stored run; a new one that has not been created yet has a key in the sink and a start time.
    """

    def __init__(
        self, sink: Sink, key: str, experiment_id: str, *, existing: StoredRun | None = None, started_ms: int = 0
    ) -> None:
        self.experiment_id = experiment_id
        self._sink, self._key, self._existing = sink, key, existing
        self._started_ms = started_ms if existing is None else existing.info.start_time or 0
        self._metrics: list[MetricRow] = []
        self._params: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self._datasets: LogDatasets | None = None
        self._flushed, self._went_on = time.monotonic(), -math.inf
        self._diagnosed: list[dict[str, Any]] = []
        self._has_new_rows = False
        self.on_record: Mapping[str, Mapping[int, float]] = {}  # what a resumed run had logged, by step or epoch
        self.has_checkpoint = False  # whether this training can be resumed

    @property
    def run_id(self) -> str:
        """The id of the run, or its key until a server has created the run."""
        return self._sink.id_of(self._key)

    def metric(self, name: str, value: float | None, step: int = 0) -> None:
        """Buffer a metric. Skip None, and a value that a resumed run has already logged."""
        if value is not None and not _is_same(self.on_record.get(name, {}).get(step), value):
            self._metrics.append((name, float(value), now_ms(), step))

    def params(self, params: dict[str, str]) -> None:
        self._params |= {name: value[:6000] for name, value in params.items()}  # the longest that MLflow accepts

    def tags(self, tags: dict[str, str]) -> None:
        self._tags |= {name: value[:8000] for name, value in tags.items()}

    def predicted(self, peak_bytes: int | None) -> None:
        self.metric(names.PREDICTED_MEMORY, peak_bytes / MEBIBYTE if peak_bytes is not None else None)

    def event(self, event: Event, metric_name: str) -> None:
        match event:
            case Started(settings=settings, scale=scale):
                self.tags({f"amp_track.{name}": value for name, value in settings})
                self.metric(names.SCALE, scale)
            case EpochEnded():
                self.metric(names.TRAIN_LOSS, event.train_loss, event.epoch)
                self.metric(names.EVAL_LOSS, event.eval_loss, event.epoch)
                self.metric(names.eval_metric(metric_name), event.metric, event.epoch)
            case StepsRecorded():
                for step, loss in enumerate(event.losses, start=event.first_step):
                    self.metric(names.STEP_LOSS, loss, step)
                for step, scale in event.scale_changes:
                    self.metric(names.SCALE, scale, step)
                self._diagnosis(event.diagnosed)
            case CheckpointWritten():
                self.diagnosed()
                self.flush()  # a resumed training does not repeat the steps before the checkpoint
                self._sink.write(self._key, LogCheckpoint(**vars(event)))
                self.has_checkpoint = True
            case Noted(text=text):
                self.tags({"amp_track.note": text})
            case FileWritten():
                self._sink.write(self._key, LogFile(**vars(event)))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def job_result(self, job_result: JobResult) -> None:
        self.tags({STATUS_TAG: str(job_result.status)})
        if job_result.message:
            self.tags({"amp_track.message": job_result.message})
        if job_result.traceback:
            self.text("traceback.txt", job_result.traceback)
        for name, value in names.logged_metrics(job_result).items():
            self.metric(name, value)
        if job_result.scale is not None:
            last_step, last_scale = job_result.scale.history[-1]
            if last_scale == job_result.scale.history[-2][1]:  # else it was logged as a change
                self.metric(names.SCALE, last_scale, last_step)
        self.diagnosed()

    def diagnosed(self) -> None:
        """Store the table of the diagnosed layers, if it has new rows."""
        if self._has_new_rows:
            self.table(DIAGNOSIS, self._diagnosed)
            self._has_new_rows = False

    def _diagnosis(self, looks: Sequence[LayerGradients]) -> None:
        """Log the model's fractions by step as metrics; those of the layers go into a table."""
        while looks and self._diagnosed and self._diagnosed[-1]["step"] >= looks[0].step:
            self._diagnosed.pop()  # a resumed training repeats the steps after its checkpoint
        new = looks[: max(_MOST_ROWS - len(self._diagnosed), 0)]
        self._diagnosed += map(_row, new)
        self._has_new_rows |= bool(new)
        for step in dict.fromkeys(look.step for look in looks):
            of_step = [look for look in looks if look.step == step]
            values = max(sum(look.values for look in of_step), 1)
            self.metric(names.NON_FINITE_FRACTION, sum(look.non_finite for look in of_step) / values, step)
            self.metric(names.UNDERFLOW_FRACTION, sum(look.underflowing for look in of_step) / values, step)
            self.metric(names.ZERO_FRACTION, sum(look.zero for look in of_step) / values, step)

    def dataset(self, found: Inspection) -> None:
        self._datasets = LogDatasets(
            workload=found.workload_name,
            workload_digest=found.workload_digest,
            digest=found.dataset_digest,
            samples={
                "train": found.training_samples if not found.is_streamed else None,
                "eval": found.evaluation_samples,
            },
        )

    def text(self, file: str, text: str) -> None:
        self._sink.write(self._key, LogText(path=file, text=text))

    def table(self, file: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store rows with the same names like MLflow's `log_table`, but replace a table instead of appending to it."""
        columns = list(rows[0]) if rows else []
        text = json.dumps({"columns": columns, "data": [[row[name] for name in columns] for row in rows]})
        self._sink.write(self._key, LogTable(path=file, text=text))

    def artifact(self, file: Path) -> None:
        """Move a file to the artifacts."""
        self._sink.write(self._key, LogFile(file=str(file)))

    def artifact_path(self, file: str) -> str:
        """Return the path or URL of an artifact of a top-level run."""
        artifacts = self._existing.info.artifact_uri if self._existing is not None else ""
        return f"{artifacts}/{file}".removeprefix("file://")

    def keep_view(self, *, batches_differ: bool) -> None:
        """Store charts of the trainings under this run, for the URL from `report.links.trainings`."""
        view = trainings_view(self.run_id, batches_differ=batches_differ)
        tag = TagExperiment(experiment_id=self.experiment_id, name=view_tag(self.run_id), value=view)
        self._sink.write(self._key, tag)

    def flush(self) -> None:
        if self._datasets is not None:
            self._sink.write(self._key, self._datasets)
            self._datasets = None
        metrics, self._metrics = self._metrics, []
        params, self._params = list(self._without_clashes(self._params).items()), {}
        tags, self._tags = self._tags, {}
        while metrics or params or tags:
            batch = LogBatch(metrics=metrics[:METRICS_PER_BATCH], params=dict(params[:PARAMS_PER_BATCH]), tags=tags)
            metrics, params, tags = metrics[METRICS_PER_BATCH:], params[PARAMS_PER_BATCH:], {}
            try:
                self._sink.write(self._key, batch)
            except BaseException:  # keep the rest for another flush
                self._metrics, self._params = metrics + self._metrics, dict(params) | self._params
                raise
        self._flushed = time.monotonic()

    def go_on(self, tags: dict[str, str]) -> None:
        """Set the run to RUNNING again, with tags, if an interrupted search worker has ended it.

        This reads the run, so it is not repeated within seconds.
        """
        if time.monotonic() - self._went_on > _GO_ON_SECONDS:
            self._sink.write(self._key, GoOn(tags=tags))
            self._went_on = time.monotonic()

    def end(self, status: str, *, is_shared: bool = False) -> None:
        """End the run as FINISHED, FAILED or KILLED: not before its start, though the clock may have been set back.

        If it `is_shared`, another search worker may have been interrupted since this one last went on.
        """
        end_time_ms = max(now_ms(), self._started_ms)
        self._sink.write(self._key, EndRun(status=status, end_time_ms=end_time_ms, is_shared=is_shared))

    def _without_clashes(self, params: dict[str, str]) -> dict[str, str]:
        """Return the params that can be logged, as NAME.resolved if the run has another value.

        `mlflow run` has already logged the -P values as typed, and params cannot be changed. The resolved value ("auto"
        became 525) is logged in addition.
        """
        known = self._existing.data.params if self._existing is not None else {}
        return {
            name if name not in known else f"{name}.resolved": value
            for name, value in params.items()
            if known.get(name) != value
        }

    def resume(self, on_record: Mapping[str, Mapping[int, float]], diagnosed: Sequence[dict[str, Any]] = ()) -> None:
        """Set the logged metrics and diagnosed layers of this run: the resumed training repeats some of its steps."""
        self.has_checkpoint, self.on_record, self._diagnosed = True, on_record, list(diagnosed)


def _is_same(known: float | None, value: float) -> bool:
    return known is not None and (known == value or (math.isnan(known) and math.isnan(value)))


def _row(look: LayerGradients) -> dict[str, Any]:
    """Return a row of the diagnosis: fractions instead of counts, and inf as text for JSON."""
    values, largest = max(look.values, 1), look.largest_output
    return {
        "step": look.step,
        "layer": look.layer,
        "gradient values": look.values,
        "non-finite": look.non_finite / values,
        "underflowing": look.underflowing / values,
        "zero": look.zero / values,
        "largest output": largest if largest is None or math.isfinite(largest) else str(largest),
    }
