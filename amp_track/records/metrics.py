"""The table of the metrics of a run: name in MLflow, unit, source field, and how to merge ranks.

To add a metric, add a field to `JobResult` and an entry to `LOGGED_METRICS`: tracking logs it and the job runner merges
its ranks. The names of metrics by step or epoch, which events stream while a job runs, are also defined here.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from amp_track.records.result import JobResult

Merge = Literal["first", "max"]
"""How to merge the values of the ranks: take that of rank 0, or the largest."""
_PER_UNIT = {"MiB": 2**20}
"""Divisor from the unit of the field to that of the metric; 1 for other units."""


@dataclass(frozen=True, kw_only=True)
class LoggedMetric:
    """A number that each run logs once."""

    name: str
    """The name in MLflow."""
    unit: str
    """The unit of the logged number: `s`, `MiB`, `samples/s`, or the thing counted. Fields of sizes are in bytes."""
    field: str
    """The source field of `JobResult`."""
    value: Callable[[JobResult], float | None] | None = None
    """Computes the number if it is not the field itself."""
    merge: Merge = "first"
    """How to merge the field over the ranks."""
    only_if_fits: bool = False
    """True if the number means nothing for a job that ended early."""

    def of(self, job_result: JobResult) -> float | None:
        """Return the number to log; None if the job has none."""
        if self.only_if_fits and not job_result.fits:
            return None
        number: float | None = self.value(job_result) if self.value is not None else getattr(job_result, self.field)
        return number / _PER_UNIT.get(self.unit, 1) if number is not None else None


def _non_finite_batches(job_result: JobResult) -> int:
    return job_result.non_finite_losses.batches if job_result.non_finite_losses is not None else 0


def _if_scaled(number: Callable[[JobResult], float | None]) -> Callable[[JobResult], float | None]:
    """Return `number` for a job with a GradScaler, None for other jobs."""
    return lambda job_result: number(job_result) if job_result.scale is not None else None


LOGGED_METRICS = (
    LoggedMetric(name="time/wall_s", unit="s", field="wall_seconds"),
    LoggedMetric(name="time/train_s", unit="s", field="train_seconds"),
    LoggedMetric(
        name="input/waited_fraction",
        unit="fraction",
        field="waited_seconds",
        value=lambda job_result: job_result.waited_fraction,
        merge="max",
    ),
    LoggedMetric(name="input/load_s", unit="s", field="load_seconds"),
    LoggedMetric(name="throughput/samples_per_s", unit="samples/s", field="samples_per_second"),
    LoggedMetric(name="throughput/eval_samples_per_s", unit="samples/s", field="eval_samples_per_second"),
    LoggedMetric(name="memory/max_allocated_mib", unit="MiB", field="train_peak_allocated_bytes", merge="max"),
    LoggedMetric(name="memory/max_reserved_mib", unit="MiB", field="peak_bytes", merge="max"),
    LoggedMetric(name="memory/eval_max_allocated_mib", unit="MiB", field="eval_peak_allocated_bytes", merge="max"),
    LoggedMetric(name="memory/max_resident_mib", unit="MiB", field="peak_resident_bytes", merge="max"),
    LoggedMetric(name="detail/requested_mib", unit="MiB", field="requested_bytes"),
    LoggedMetric(name="detail/allocation_retries", unit="retries", field="allocation_retries", merge="max"),
    LoggedMetric(name="train/steps", unit="steps", field="steps", only_if_fits=True),
    LoggedMetric(
        name="train/optimizer_steps",
        unit="steps",
        field="steps",
        value=lambda job_result: job_result.optimizer_steps,
        only_if_fits=True,
    ),
    LoggedMetric(
        name="train/non_finite_losses",
        unit="batches",
        field="non_finite_losses",
        value=_non_finite_batches,
        only_if_fits=True,
    ),
    LoggedMetric(
        name="amp/skipped_steps",
        unit="steps",
        field="skipped_steps",
        value=_if_scaled(lambda job_result: job_result.skipped_steps),
    ),
    LoggedMetric(
        name="amp/final_scale",
        unit="scale",
        field="scale",
        value=lambda job_result: job_result.scale.final if job_result.scale is not None else None,
    ),
    LoggedMetric(
        name="detail/diagnosis_s",
        unit="s",
        field="diagnosis",
        value=lambda job_result: job_result.diagnosis.seconds if job_result.diagnosis is not None else None,
    ),
)
"""All metrics of a job result."""

PREDICTED_MEMORY = "memory/predicted_mib"
"""The peak memory predicted before the job runs."""

_REJECTED = re.compile(r"[^\w. :/-]", re.ASCII)
"""Matches a character that MLflow rejects in a metric name."""
_LONGEST_NAME = 250
"""The longest metric name that MLflow accepts, in characters."""

STEP_LOSS, SCALE = "train/step_loss", "amp/scale"
TRAIN_LOSS, EVAL_LOSS = "train/loss", "eval/loss"
NON_FINITE_FRACTION, UNDERFLOW_FRACTION = "amp/non_finite_fraction", "amp/underflow_fraction"
ZERO_FRACTION = "amp/zero_fraction"


def eval_metric(metric_name: str) -> str:
    """Return the MLflow name of the workload's metric."""
    return f"eval/{metric_name}"


def is_metric_name(name: str) -> bool:
    """Return whether MLflow accepts a metric of this name, and it is not the name of the loss.

    Allowed are letters, digits, spaces and _ - . : / but not `a//b` or `../x`: MLflow may store a metric in a file of
    its name, so it rejects names that are not normalized paths.
    """
    metric = eval_metric(name)
    if not name or metric == EVAL_LOSS or _REJECTED.search(metric) or len(metric) > _LONGEST_NAME:
        return False
    return posixpath.normpath(metric) == metric


def planned_metric(precision: str, name: str) -> str:
    """Return the name of a planned metric, `plan/amp/reserved_mib`, without characters that MLflow rejects."""
    return _REJECTED.sub("", f"plan/{precision}/{name}")


def streamed_metrics(metric_name: str) -> tuple[str, ...]:
    """Return the names of the metrics by step or epoch, which a resumed run has already logged."""
    of_training = (STEP_LOSS, SCALE, TRAIN_LOSS, EVAL_LOSS, eval_metric(metric_name))
    return (*of_training, NON_FINITE_FRACTION, UNDERFLOW_FRACTION, ZERO_FRACTION)


def merged_fields(job_results: Sequence[JobResult]) -> dict[str, Any]:
    """Return the fields of a job result that are merged over the ranks, not taken from rank 0.

    Args:
        job_results: one per rank, in order.
    """
    merged = {}
    for metric in LOGGED_METRICS:
        if metric.merge == "max":
            numbers = [
                number for job_result in job_results if (number := getattr(job_result, metric.field)) is not None
            ]
            merged[metric.field] = max(numbers, default=None)
    return merged
