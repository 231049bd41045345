"""The result of `train`: one job and its result."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from amp_track.config.inspection import Inspection
from amp_track.config.job import Job
from amp_track.records.result import JobResult
from amp_track.results import Shown


@dataclass(frozen=True, kw_only=True)
class TrainResult(Shown):
    """One job, its result, and advice on it."""

    run_id: str
    experiment_id: str
    """Of the run."""
    job: Job
    job_result: JobResult
    inspection: Inspection
    advice: tuple[str, ...] = ()
    """Sentences about what happened and what to change, the most serious first."""

    def as_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "target": self.job.workload,
            "precision": self.job.precision,
            "batch_size": self.job.batch_size,
            "status": str(self.job_result.status),
            "metric": {"name": self.inspection.metric_name, "value": self.job_result.metric},
            "wall_seconds": self.job_result.wall_seconds,
            "samples_per_second": self.job_result.samples_per_second,
            "peak_bytes": self.job_result.peak_bytes,
            "steps": self.job_result.steps,
            "skipped_steps": self.job_result.skipped_steps,
            "scale": self.job_result.scale and dataclasses.asdict(self.job_result.scale),
            "device": self.inspection.hardware.as_json(),
            "memory_budget_bytes": self.job.memory_budget_bytes,
            "waited_fraction": self.job_result.waited_fraction,
            "non_finite_losses": self.job_result.non_finite_batches,
            "advice": list(self.advice),
            "diagnosis": self.job_result.diagnosis and dataclasses.asdict(self.job_result.diagnosis),
        }
