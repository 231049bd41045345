"""The metrics of a run: their names in MLflow, where their values come from, and how to merge those of the ranks.

To add a metric of a job, add a field to `JobResult` and an entry to `LOGGED_METRICS`; if the ranks may differ, add the
field to `_LARGEST` too. The names of metrics by step or epoch, which events stream while a job runs, are here as well.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from typing import Any

from amp_track.records.result import JobResult
from amp_track.records.units import MEBIBYTE

NON_FINITE_LOSSES = "train/non_finite_losses"
LOGGED_METRICS = {
    "time/wall_s": "wall_seconds",
    "time/train_s": "train_seconds",
    "input/waited_fraction": "waited_fraction",
    "input/load_s": "load_seconds",
    "throughput/samples_per_s": "samples_per_second",
    "throughput/eval_samples_per_s": "eval_samples_per_second",
    "memory/max_allocated_mib": "train_peak_allocated_bytes",
    "memory/max_reserved_mib": "peak_bytes",
    "memory/eval_max_allocated_mib": "eval_peak_allocated_bytes",
    "memory/max_resident_mib": "peak_resident_bytes",
    "detail/requested_mib": "requested_bytes",
    "detail/allocation_retries": "allocation_retries",
    "detail/diagnosis_s": "diagnosis.seconds",
    "train/steps": "steps",
    "train/optimizer_steps": "optimizer_steps",
    NON_FINITE_LOSSES: "non_finite_batches",
    "amp/skipped_steps": "skipped_steps",
    "amp/final_scale": "scale.final",
}
"""The attribute of `JobResult` that each run logs once, by the name in MLflow. Sizes are logged in MiB."""
_LARGEST = (
    "waited_seconds", "train_peak_allocated_bytes", "peak_bytes", "eval_peak_allocated_bytes", "peak_resident_bytes",
    "first_step_peak_bytes", "allocation_retries",
)  # fmt: skip
"""The fields of `JobResult` of which the largest over the ranks counts. The others are those of rank 0."""

PREDICTED_MEMORY = "memory/predicted_mib"  # the peak memory predicted before the job runs
STEP_LOSS, SCALE = "train/step_loss", "amp/scale"
TRAIN_LOSS, EVAL_LOSS = "train/loss", "eval/loss"
NON_FINITE_FRACTION, UNDERFLOW_FRACTION = "amp/non_finite_fraction", "amp/underflow_fraction"
ZERO_FRACTION = "amp/zero_fraction"

_REJECTED = re.compile(r"[^\w. :/-]", re.ASCII)  # matches a character that MLflow rejects in a metric name
_LONGEST_NAME = 250  # the longest metric name that MLflow accepts, in characters


def logged_metrics(job_result: JobResult) -> dict[str, float]:
    """Return the metrics of a job by name, without those that it did not measure."""
    logged = {}
    for name, source in LOGGED_METRICS.items():
        if name.startswith("train/") and not job_result.fits:
            continue  # steps mean nothing for a job that ended early
        if name.startswith("amp/") and job_result.scale is None:
            continue
        number: Any = job_result
        for attribute in source.split("."):
            number = getattr(number, attribute) if number is not None else None
        if number is not None:
            logged[name] = number / MEBIBYTE if name.endswith("_mib") else number
    return logged


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
    losses = (STEP_LOSS, SCALE, TRAIN_LOSS, EVAL_LOSS, eval_metric(metric_name))
    return (*losses, NON_FINITE_FRACTION, UNDERFLOW_FRACTION, ZERO_FRACTION)


def merged_fields(job_results: Sequence[JobResult]) -> dict[str, Any]:
    """Return the fields of a job result, given one per rank, that are merged over the ranks."""
    return {
        field: max((number for result in job_results if (number := getattr(result, field)) is not None), default=None)
        for field in _LARGEST
    }
