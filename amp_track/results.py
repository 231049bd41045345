"""What the commands found out, in the shape `--json` prints it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amp_track.frontier import Edge
from amp_track.job import Inspection, Job, Outcome


@dataclass(frozen=True, kw_only=True)
class PrecisionFit:
    """The edge of one precision, and what it costs there."""

    edge: Edge
    probes: int
    at_edge: Outcome | None
    """The probe at the largest batch; None where nothing fits."""
    run_id: str | None
    bytes_needed: int | None = None
    """What one sample takes, where not even that fits."""

    def as_json(self) -> dict[str, Any]:
        return {
            "largest_batch": self.edge.largest_batch,
            "first_failing_batch": self.edge.first_failing_batch,
            "bound": self.edge.bound,
            "probes": self.probes,
            "max_memory_bytes": self.at_edge.max_memory_bytes if self.at_edge else self.bytes_needed,
            "samples_per_second": self.at_edge.samples_per_second if self.at_edge else None,
            "run_id": self.run_id,
        }


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The edge at every precision. `skipped` maps the others to the reason."""

    study: str
    run_id: str
    job: Job
    device_name: str
    device_kind: str
    precisions: dict[str, PrecisionFit]
    skipped: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        return {
            "study": self.study,
            "run_id": self.run_id,
            "workload": self.job.workload,
            "device": {"kind": self.device_kind, "name": self.device_name},
            "memory_budget_bytes": self.job.memory_budget_bytes,
            "precisions": {name: fit.as_json() for name, fit in self.precisions.items()}
            | {name: {"skipped": reason} for name, reason in self.skipped.items()},
        }


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """One training of a search."""

    number: int
    precision: str
    batch_size: int
    learning_rate: float
    outcome: Outcome
    run_id: str

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "precision": self.precision,
            "batch_size": self.batch_size,
            "verdict": str(self.outcome.verdict),
            "quality": self.outcome.quality,
            "wall_seconds": self.outcome.wall_seconds,
            "samples_per_second": self.outcome.samples_per_second,
            "max_memory_bytes": self.outcome.max_memory_bytes,
            "skipped_steps": self.outcome.skipped_steps,
            "run_id": self.run_id,
        }


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Edges, trainings inside them, and the numbers of the trials that no other beats in both quality and speed."""

    fit: FitResult
    quality_name: str
    higher_is_better: bool
    trials: tuple[TrialResult, ...]
    pareto: tuple[int, ...]
    report: str = ""

    def as_json(self) -> dict[str, Any]:
        return self.fit.as_json() | {
            "trials": [trial.as_json() for trial in self.trials],
            "pareto": list(self.pareto),
            "report": self.report,
        }


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """One job, as it was run, and what came of it."""

    run_id: str
    job: Job
    outcome: Outcome
    found: Inspection

    def as_json(self) -> dict[str, Any]:
        scale = self.outcome.scale
        return {
            "run_id": self.run_id,
            "workload": self.job.workload,
            "precision": self.job.precision,
            "batch_size": self.job.batch_size,
            "verdict": str(self.outcome.verdict),
            "quality": {"name": self.found.quality_name, "value": self.outcome.quality},
            "wall_seconds": self.outcome.wall_seconds,
            "samples_per_second": self.outcome.samples_per_second,
            "max_memory_bytes": self.outcome.max_memory_bytes,
            "steps": self.outcome.steps,
            "skipped_steps": self.outcome.skipped_steps,
            "scale": scale
            and {"initial": scale.initial, "final": scale.final, "history": [list(change) for change in scale.history]},
            "device": {"kind": self.found.device_kind, "name": self.found.device_name},
            "memory_budget_bytes": self.job.memory_budget_bytes,
        }
