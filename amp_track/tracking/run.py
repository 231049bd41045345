"""One MLflow run while it is written: a job's events and its outcome as metrics, tags and artifacts."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag
from mlflow.entities import Metric as LoggedMetric

from amp_track.records import metrics as names
from amp_track.records.diagnosis import LayerGradients
from amp_track.records.events import CheckpointWritten, EpochEnded, Event, FileWritten, Noted, Started, StepsRecorded
from amp_track.records.inspection import Inspection
from amp_track.records.metrics import METRICS
from amp_track.records.outcome import Outcome
from amp_track.tracking import checkpoints

_MEBIBYTE = 2**20
_FLUSH_SECONDS = 2.0
_METRICS_PER_BATCH, _PARAMS_PER_BATCH = 1000, 100
"""MLflow takes no more in one log_batch."""
_TABLES = "mlflow.loggedArtifacts"
"""The tag by which MLflow's UI knows which files to show as tables; without it they show as JSON."""
_MOST_ROWS = 100_000
"""The rows of diagnosis.json end here: a long training that is diagnosed often has millions."""


class Run:
    """One MLflow run while it is written.

    Metrics are buffered and sent every two seconds: one commit of SQLite takes as long as a thousand metrics.
    """

    def __init__(self, client: mlflow.MlflowClient, run_id: str, experiment_id: str) -> None:
        self.run_id = run_id
        self.experiment_id = experiment_id
        self._client = client
        self._metrics: list[LoggedMetric] = []
        self._params: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self._flushed = time.monotonic()
        self._known_params: dict[str, str] | None = None
        self._on_record: dict[str, dict[int, float]] = {}
        self._diagnosed: list[LayerGradients] = []

        self.has_checkpoint = False
        """Whether a checkpoint has been stored, so that this training can be resumed."""

    def metric(self, name: str, value: float | None, step: int = 0) -> None:
        """Buffer a metric. None is left out, and so is a value that a resumed run has on record already."""
        if value is not None and not _is_same(self._on_record.get(name, {}).get(step), value):
            self._metrics.append(LoggedMetric(name, float(value), int(time.time() * 1000), step))

    def params(self, params: dict[str, str]) -> None:
        """Buffer params, cut to the length that MLflow takes."""
        self._params |= {name: value[:6000] for name, value in params.items()}

    def tags(self, tags: dict[str, str]) -> None:
        """Buffer tags, cut to the length that MLflow takes."""
        self._tags |= {name: value[:8000] for name, value in tags.items()}

    def predicted(self, peak_bytes: int | None) -> None:
        """Log the peak of memory that the memory model predicted before the job ran."""
        self.metric(names.PREDICTED_MEMORY, peak_bytes / _MEBIBYTE if peak_bytes is not None else None)

    def event(self, event: Event, quality_name: str) -> None:
        """Log one event of the job."""
        match event:
            case Started(settings=settings, scale=scale):
                self.tags({f"amp_track.{name}": value for name, value in settings})
                self.metric(names.SCALE, scale, 0)
            case EpochEnded():
                self.metric(names.TRAIN_LOSS, event.train_loss, event.epoch)
                self.metric(names.EVAL_LOSS, event.eval_loss, event.epoch)
                self.metric(names.quality_metric(quality_name), event.quality, event.epoch)
            case StepsRecorded():
                for step, loss in enumerate(event.losses, start=event.first_step):
                    self.metric(names.STEP_LOSS, loss, step)
                for step, scale in event.scale_changes:
                    self.metric(names.SCALE, scale, step)
                self._diagnosis(event.diagnosed)
            case CheckpointWritten():
                self.flush()  # a resumed training does not compute again what precedes the checkpoint
                checkpoints.keep(self._client, self.run_id, event)
                self.has_checkpoint = True
            case Noted(text=text):
                self.tags({"amp_track.note": text})
            case FileWritten(file=file, folder=folder):
                self._client.log_artifact(self.run_id, file, folder or None)
                Path(file).unlink()
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def outcome(self, outcome: Outcome) -> None:
        """Log how the job ended."""
        self.tags({"amp_track.verdict": str(outcome.verdict)})
        if outcome.message:
            self.tags({"amp_track.message": outcome.message})
        if outcome.traceback:
            self.text("traceback.txt", outcome.traceback)
        for metric in METRICS:
            self.metric(metric.name, metric.of(outcome))
        if outcome.scale is not None:
            last_step, last_scale = outcome.scale.history[-1]
            if last_scale == outcome.scale.history[-2][1]:  # else it was streamed as a change
                self.metric(names.SCALE, last_scale, last_step)
        if outcome.diagnosis is not None and self._diagnosed:
            self.table("diagnosis.json", _columns(self._diagnosed))

    def _diagnosis(self, looks: Sequence[LayerGradients]) -> None:
        """Log the whole model's fractions by step as metrics; the layers' go into a table at the end."""
        self._diagnosed += looks[: max(_MOST_ROWS - len(self._diagnosed), 0)]
        for step in dict.fromkeys(look.step for look in looks):
            of_step = [look for look in looks if look.step == step]
            values = max(sum(look.values for look in of_step), 1)
            self.metric(names.NON_FINITE_FRACTION, sum(look.non_finite for look in of_step) / values, step)
            self.metric(names.UNDERFLOW_FRACTION, sum(look.underflowing for look in of_step) / values, step)
            self.metric(names.ZERO_FRACTION, sum(look.zero for look in of_step) / values, step)

    def dataset(self, inspection: Inspection) -> None:
        """Log the data sets that the run is trained and evaluated on."""
        inputs = []
        for context, samples in (("train", inspection.training_samples), ("eval", inspection.evaluation_samples)):
            dataset = Dataset(
                name=f"{inspection.workload_name}-{context}",
                digest=inspection.dataset_digest,
                source_type="code",
                source=json.dumps({"workload": inspection.workload_name, "digest": inspection.workload_digest}),
                profile=json.dumps({"num_rows": samples}),
            )
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", context)]))
        try:
            self._client.log_inputs(self.run_id, datasets=inputs)
        except mlflow.exceptions.MlflowException:
            # Where two search workers are the first to log a data set at the same moment, one fails, because the row is
            # there already; the second time it finds the row.
            self._client.log_inputs(self.run_id, datasets=inputs)

    def text(self, file: str, text: str) -> None:
        """Store a text as an artifact."""
        self._client.log_text(self.run_id, text, file)

    def table(self, file: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Store a table as MLflow's log_table does, but replace an earlier one, to which log_table would append."""
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        self._client.log_dict(self.run_id, {"columns": list(columns), "data": rows}, file)
        known = json.loads(self._client.get_run(self.run_id).data.tags.get(_TABLES, "[]"))
        if (entry := {"path": file, "type": "table"}) not in known:
            self._client.set_tag(self.run_id, _TABLES, json.dumps([*known, entry]))

    def artifact(self, file: Path) -> None:
        """Store a file as an artifact."""
        self._client.log_artifact(self.run_id, str(file))

    def artifact_path(self, file: str) -> str:
        """Return where an artifact is: its path where the store keeps files on this machine, else its address."""
        uri = f"{self._client.get_run(self.run_id).info.artifact_uri}/{file}"
        return uri.removeprefix("file://")

    def flush(self) -> None:
        """Send everything that is buffered."""
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
        """Return the params that can be logged, under a name of their own where the run has another value.

        `mlflow run` has already logged what was given with -P, as it was typed, and a param's value cannot be changed:
        where ours says more ("auto" became 525), it is kept beside it.
        """
        if not params or self._known_params is None:
            return params
        known = self._known_params
        return {
            name if name not in known else f"{name}.resolved": value
            for name, value in params.items()
            if known.get(name) != value
        }

    def adopt(self) -> None:
        """Respect the params of a run that `mlflow run` or an earlier command has made."""
        self._known_params = dict(self._client.get_run(self.run_id).data.params)

    @property
    def on_record(self) -> Mapping[str, Mapping[int, float]]:
        """What a resumed run had logged before: by metric, its values by step or epoch. Empty for a new run."""
        return self._on_record

    def resume(self, quality_name: str) -> None:
        """Read what this run has on record: a training that resumes from a checkpoint repeats what came after it."""
        self.has_checkpoint = True
        for name in names.streamed_metrics(quality_name):
            history = self._client.get_metric_history(self.run_id, name)
            self._on_record[name] = {metric.step: metric.value for metric in history}


def _is_same(known: float | None, value: float) -> bool:
    return known is not None and (known == value or (math.isnan(known) and math.isnan(value)))


def _columns(looks: Sequence[LayerGradients]) -> dict[str, list[Any]]:
    """Return the table of the diagnosis: fractions instead of counts, and inf as text, which JSON lacks."""
    return {
        "step": [look.step for look in looks],
        "layer": [look.layer for look in looks],
        "gradient values": [look.values for look in looks],
        "non-finite": [look.non_finite / max(look.values, 1) for look in looks],
        "underflowing": [look.underflowing / max(look.values, 1) for look in looks],
        "zero": [look.zero / max(look.values, 1) for look in looks],
        "largest output": [
            str(size) if size is not None and not math.isfinite(size) else size
            for size in (look.largest_output for look in looks)
        ],
    }
