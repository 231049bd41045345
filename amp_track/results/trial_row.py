"""One trial of a study: the one row that terminal, page, notes, dashboard, `--json` and MLflow's tables show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from amp_track.records.result import JobResult


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """One job of a study: a probe, a training, or a training with one of several seeds."""

    number: int | None = None
    """The Optuna trial of a probe or training."""
    precision: str
    batch_size: int
    learning_rate: float | None = None
    seed: int | None = None
    kind: str = "train"
    """For a job of a max-batch study, one of `max_batch_jobs.Proposal`."""
    reason: str = ""
    """Why a probe has this batch size."""
    predicted_bytes: int | None = None
    job_result: JobResult
    run_id: str

    @property
    def finite_metric(self) -> float | None:
        """The metric; None if there is none, or if the training diverged."""
        metric = self.job_result.metric
        return metric if metric is not None and math.isfinite(metric) else None

    @property
    def measured_bytes(self) -> int | None:
        """The peak by the finest meter, to compare with the prediction; for a failure, roughly the memory it needs."""
        if not self.job_result.fits:
            return self.job_result.wanted_bytes
        return self.job_result.peak_allocated_bytes or self.job_result.peak_bytes

    def as_json(self) -> dict[str, Any]:
        """Return a training as an entry of `search --json`."""
        return {
            "number": self.number,
            "precision": self.precision,
            "batch_size": self.batch_size,
            "status": str(self.job_result.status),
            "metric": self.finite_metric,
            "wall_seconds": self.job_result.wall_seconds,
            "samples_per_second": self.job_result.samples_per_second,
            "peak_bytes": self.job_result.peak_bytes,
            "skipped_steps": self.job_result.skipped_steps,
            "run_id": self.run_id,
        }

    def probe_row(self) -> dict[str, Any]:
        """Return a probe as a row of probes.json."""
        return {
            "trial": self.number,
            "precision": self.precision,
            "batch_size": self.batch_size,
            "kind": self.kind,
            "status": str(self.job_result.status),
            "phase": self.job_result.phase,
            "predicted_bytes": self.predicted_bytes,
            "peak_allocated_bytes": self.job_result.peak_allocated_bytes,
            "peak_bytes": self.job_result.peak_bytes,
            "wanted_bytes": self.job_result.wanted_bytes,
            "samples_per_second": self.job_result.samples_per_second,
            "wall_seconds": self.job_result.wall_seconds,
            "reason": self.reason,
        }
