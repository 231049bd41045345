"""The result of `train`: one job and its outcome."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from amp_track.config.inspection import Inspection
from amp_track.config.job import Job
from amp_track.records.result import Outcome
from amp_track.results.notebook import Shown


@dataclass(frozen=True, kw_only=True)
class TrainResult(Shown):
    """One job as it was run, with its outcome and advice on it."""

    run_id: str
    experiment_id: str
    """Of the run."""
    job: Job
    outcome: Outcome
    inspection: Inspection
    advice: tuple[str, ...] = ()
    """In words: what happened and what to do about it, the gravest first."""

    def as_json(self) -> dict[str, Any]:
        scale = self.outcome.scale
        return {
            "run_id": self.run_id,
            "workload": self.job.workload,
            "precision": self.job.precision,
            "batch_size": self.job.batch_size,
            "verdict": str(self.outcome.verdict),
            "quality": {"name": self.inspection.quality_name, "value": self.outcome.quality},
            "wall_seconds": self.outcome.wall_seconds,
            "samples_per_second": self.outcome.samples_per_second,
            "max_memory_bytes": self.outcome.max_memory_bytes,
            "steps": self.outcome.steps,
            "skipped_steps": self.outcome.skipped_steps,
            "scale": scale
            and {"initial": scale.initial, "final": scale.final, "history": [list(change) for change in scale.history]},
            "device": self.inspection.hardware.as_json(),
            "memory_budget_bytes": self.job.memory_budget_bytes,
            "waited_fraction": self.outcome.waited_fraction,
            "non_finite_losses": self.outcome.non_finite_losses.batches if self.outcome.non_finite_losses else 0,
            "advice": list(self.advice),
            "diagnosis": self.outcome.diagnosis and dataclasses.asdict(self.outcome.diagnosis),
        }
