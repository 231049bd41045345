"""The table of metrics: what every run logs, under which name and unit, where it comes from, and how ranks merge it.

A new metric is a field of `JobResult` and an entry of `LOGGED_METRICS`: tracking logs it and the job runner merges
it over the ranks of a job. Metrics by step or epoch, which events stream while a job runs, have their names here too.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from amp_track.records.result import JobResult

Merge = Literal["first", "max"]
"""How one value is made of those of a job's processes: the first one's, or the largest that has been measured."""
_PER_UNIT = {"MiB": 2**20}
"""How many of the field's own unit make one of the metric's; 1 for other units."""


@dataclass(frozen=True, kw_only=True)
class LoggedMetric:
    """One number of every run."""

    name: str
    """Its name in MLflow."""
    unit: str
    """The unit in which it is logged: `s`, `MiB`, `samples/s`, or what is counted. Sizes come from fields in bytes."""
    field: str
    """The field of `JobResult` that it is made of."""
    value: Callable[[JobResult], float | None] | None = None
    """Returns the number where it is not the field itself."""
    merge: Merge = "first"
    """How ranks merge the field."""
    only_if_fits: bool = False
    """Whether it says nothing of a job that ended early."""

    def of(self, job_result: JobResult) -> float | None:
        """Return the number to log; None where there is none."""
        if self.only_if_fits and not job_result.fits:
            return None
        number: float | None = self.value(job_result) if self.value is not None else getattr(job_result, self.field)
        return number / _PER_UNIT.get(self.unit, 1) if number is not None else None


def _non_finite_batches(job_result: JobResult) -> int:
    return job_result.non_finite_losses.batches if job_result.non_finite_losses is not None else 0


def _if_scaled(number: Callable[[JobResult], float | None]) -> Callable[[JobResult], float | None]:
    """Return `number` for a job with a GradScaler, and None for any other."""
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
        name="train/updates",
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
"""Every metric of an outcome."""

PREDICTED_MEMORY = "memory/predicted_mib"
"""The peak that the memory model predicts, known before the job runs."""

_REJECTED = re.compile(r"[^\w. :/-]", re.ASCII)
"""A sign that MLflow takes in no name of a metric."""
_LONGEST_NAME = 250
"""Characters that MLflow takes in the name of a metric."""

STEP_LOSS, SCALE = "train/step_loss", "amp/scale"
TRAIN_LOSS, EVAL_LOSS = "train/loss", "eval/loss"
NON_FINITE_FRACTION, UNDERFLOW_FRACTION = "amp/non_finite_fraction", "amp/underflow_fraction"
ZERO_FRACTION = "amp/zero_fraction"


def eval_metric(metric_name: str) -> str:
    """Return the name of the metric that the workload's quality is logged under."""
    return f"eval/{metric_name}"


def is_metric_name(name: str) -> bool:
    """True for a name whose metric MLflow takes, and that is not the loss's: letters, digits, spaces and _ - . : /

    MLflow may keep a metric in a file of its name, and so refuses `a//b` and `../x`, which are other names of files.
    """
    metric = eval_metric(name)
    if not name or metric == EVAL_LOSS or _REJECTED.search(metric) or len(metric) > _LONGEST_NAME:
        return False
    return posixpath.normpath(metric) == metric


def planned_metric(precision: str, name: str) -> str:
    """Return the name of a plan's metric, `plan/amp/reserved_mib`, without signs that MLflow refuses."""
    return _REJECTED.sub("", f"plan/{precision}/{name}")


def streamed_metrics(metric_name: str) -> tuple[str, ...]:
    """Return the names of the metrics by step or epoch, which a resumed run has on record."""
    of_training = (STEP_LOSS, SCALE, TRAIN_LOSS, EVAL_LOSS, eval_metric(metric_name))
    return (*of_training, NON_FINITE_FRACTION, UNDERFLOW_FRACTION, ZERO_FRACTION)


def merged_fields(job_results: Sequence[JobResult]) -> dict[str, Any]:
    """Return the fields of a job's outcome that are not simply those of its first process.

    Args:
        job_results: one of each process, by rank.
    """
    merged = {}
    for metric in LOGGED_METRICS:
        if metric.merge == "max":
            numbers = [
                number for job_result in job_results if (number := getattr(job_result, metric.field)) is not None
            ]
            merged[metric.field] = max(numbers, default=None)
    return merged
