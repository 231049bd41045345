"""The result of `amp-track plan`: predicted peaks, and the largest batch that each target is predicted to hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amp_track.records.plan import PlannedEdge, PlanReport, PlanTarget
from amp_track.records.steps import micro_batch
from amp_track.results.shown import Shown


@dataclass(frozen=True, kw_only=True)
class PlanResult(Shown):
    """Everything that was predicted. Nothing here was measured."""

    report: PlanReport
    targets: tuple[PlanTarget, ...]
    effective_batch_size: int | None = None

    def accumulation(self, edge: PlannedEdge) -> tuple[int, int] | None:
        """Return the batch and how many of it make the effective batch; None unless one was asked for and fits."""
        if self.effective_batch_size is None or not edge.largest_batch:
            return None
        return micro_batch(self.effective_batch_size, edge.largest_batch)

    def edge(self, precision: str, target: PlanTarget) -> PlannedEdge | str:
        """Return the edge of a precision on a target, or the reason why the target cannot train at it."""
        plan = next(plan for plan in self.report.precisions if plan.precision == precision)
        found = next((edge for edge in plan.edges if edge.target == target.name), None)
        return found or dict(target.lacks)[precision]

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "workload": self.report.workload,
            "predicted": True,
            "effective_batch_size": self.effective_batch_size,
            "capacities": {
                target.name: {
                    plan.precision: self._edge_as_json(self.edge(plan.precision, target))
                    for plan in self.report.precisions
                }
                for target in self.targets
            },
            "precisions": {
                plan.precision: {
                    "batch_size": plan.batch_size,
                    **plan.peak.as_json(),
                    "recurrent": list(plan.recurrent),
                    "values_read": list(plan.values_read),
                }
                for plan in self.report.precisions
            },
        }

    def _edge_as_json(self, edge: PlannedEdge | str) -> dict[str, Any]:
        if isinstance(edge, str):
            return {"skipped": edge}
        micro, accumulate = self.accumulation(edge) or (None, None)
        return {
            "largest_batch": edge.largest_batch,
            "bound": edge.bound,
            "max_allocated_bytes": edge.peak.allocated_bytes if edge.peak is not None else None,
            "max_reserved_bytes": edge.peak.reserved_bytes if edge.peak is not None else None,
            "one_sample_bytes": edge.at_one_bytes,
            "micro_batch": micro,
            "accumulate": accumulate,
        }
