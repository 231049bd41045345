"""The result of `amp-track plan`: predicted peaks, and the predicted max batch on each GPU or budget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from amp_track.config.precisions import BY_NAME
from amp_track.records.plan import PlannedMaxBatch, PlanReport, PlanTarget, PrecisionPlan, Way
from amp_track.results import Shown

Changes = tuple[tuple[str, str], ...]
"""Options of the workload with changed values; empty for the unchanged workload."""
CHANNELS_LAST = "--channels-last"
"""The one change that is not an option of the workload."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The workload with some options changed, and its prediction."""

    changes: Changes
    report: PlanReport
    is_one_of_several: bool = False
    """Whether the plan has several targets, which name its variants."""

    @property
    def name(self) -> str:
        """`finetune=all`, or `as it is`; with several targets, this one."""
        return self.report.workload if self.is_one_of_several else self.name_of(self.changes)

    @staticmethod
    def name_of(changes: Iterable[tuple[str, str]]) -> str:
        return ", ".join(_change(name, value) for name, value in changes) or "as it is"

    def costs_the_same_as(self, other: Variant) -> bool:
        """Return whether memory and work equal those of another variant at every precision."""
        own, others = (
            [(plan.peak, plan.max_batches, plan.flops_per_sample) for plan in variant.report.precisions]
            for variant in (self, other)
        )
        return own == others


def _change(name: str, value: str) -> str:
    if name != CHANNELS_LAST:
        return f"{name}={value}"
    return f"with {name}" if value == str(True) else f"without {name}"


@dataclass(frozen=True, kw_only=True)
class ListedWay:
    """A way to reach the effective batch, with its variant and precision."""

    variant: Variant
    plan: PrecisionPlan
    way: Way

    def as_json(self) -> dict[str, Any]:
        return {
            "changes": dict(self.variant.changes),
            "precision": self.plan.precision,
            "micro_batch": self.way.micro_batch,
            "grad_accum": self.way.grad_accum,
            "peak_reserved_bytes": self.way.peak.reserved_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class PlanResult(Shown):
    """The predictions of a plan. Nothing here was measured."""

    variants: tuple[Variant, ...]
    """The first is the unchanged workload."""
    targets: tuple[PlanTarget, ...]
    effective_batch_size: int | None = None
    changes_nothing: tuple[str, ...] = ()
    """The `--what-if` changes that alter neither memory nor work."""
    not_planned: tuple[tuple[str, str], ...] = ()
    """The `--what-if` changes, or the targets of several, that could not be planned, with the reason."""
    run_id: str | None = None
    """The MLflow run that stores the plan, if any."""
    unmoved_since: str | None = None
    """The file or revision whose plan this one equals within the tolerance, or that now has this plan."""

    @property
    def report(self) -> PlanReport:
        return self.variants[0].report

    def max_batch(self, variant: Variant, precision: str, target: PlanTarget) -> PlannedMaxBatch | str:
        """Return the max batch of a precision on a GPU or budget, or the reason why it cannot be used there."""
        plan = next(plan for plan in variant.report.precisions if plan.precision == precision)
        found = next((max_batch for max_batch in plan.max_batches if max_batch.target == target.name), None)
        return found or dict(target.lacks)[precision]

    def relative_work(self, plan: PrecisionPlan) -> float | None:
        """Return the floating-point operations per sample relative to the first plan; None if unknown."""
        first = self.report.precisions[0].flops_per_sample
        return plan.flops_per_sample / first if first and plan.flops_per_sample is not None else None

    def half_work(self, plan: PrecisionPlan) -> float | None:
        """Return the fraction of the work that is computed in 16 bits; None if the work is unknown."""
        return plan.trace.half_fraction if self.relative_work(plan) is not None else None

    def ways(self, target: PlanTarget) -> list[ListedWay]:
        """Return the ways to reach the effective batch on a GPU or budget, by ascending work.

        Ties are ordered by more 16-bit work, then tf32 before fp32, then less accumulation. Unknown work comes last.
        """

        def cost(found: ListedWay) -> tuple[float, float, bool, int, int]:
            work = self.relative_work(found.plan)
            known = round(work, 3) if work is not None else math.inf
            is_strict = BY_NAME[found.plan.precision].computes == "float32"
            reserved_bytes = found.way.peak.reserved_bytes
            return known, -found.plan.trace.half_fraction, is_strict, found.way.grad_accum, reserved_bytes

        found = (
            (variant, plan, self.max_batch(variant, plan.precision, target))
            for variant in self.variants
            for plan in variant.report.precisions
        )
        ways = [
            ListedWay(variant=variant, plan=plan, way=max_batch.way)
            for variant, plan, max_batch in found
            if isinstance(max_batch, PlannedMaxBatch) and max_batch.way is not None
        ]
        return sorted(ways, key=cost)

    def without_twins(self) -> list[PrecisionPlan]:
        """Return the plans without those whose peak equals that of an earlier one: tf32 allocates the same as fp32."""
        return list({plan.peak: plan for plan in reversed(self.report.precisions)}.values())[::-1]

    def as_json(self) -> dict[str, Any]:
        return {
            "predicted": True,
            "effective_batch_size": self.effective_batch_size,
            "run_id": self.run_id,
            "unmoved_since": self.unmoved_since,
            **self._variant_as_json(self.variants[0]),
            "variants": [self._variant_as_json(variant) for variant in self.variants[1:]],
            "ways": {target.name: [found.as_json() for found in self.ways(target)] for target in self.targets},
            "changes_nothing": list(self.changes_nothing),
            "not_planned": dict(self.not_planned),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each target, variant, GPU or budget, and precision."""
        return [
            {
                "target": variant.report.workload,
                "variant": Variant.name_of(variant.changes),
                "gpu_or_budget": target.name,
                "precision": plan.precision,
                **self._max_batch_as_json(variant, plan.precision, target),
            }
            for variant in self.variants
            for target in self.targets
            for plan in variant.report.precisions
        ]

    def _variant_as_json(self, variant: Variant) -> dict[str, Any]:
        names = [plan.precision for plan in variant.report.precisions]
        return {
            "target": variant.report.workload,
            "changes": dict(variant.changes),
            "budgets": {
                target.name: {name: self._max_batch_as_json(variant, name, target) for name in names}
                for target in self.targets
            },
            "precisions": {plan.precision: self._precision_as_json(plan) for plan in variant.report.precisions},
        }

    def _precision_as_json(self, plan: PrecisionPlan) -> dict[str, Any]:
        with_workspaces = plan.peak_with_workspaces
        return {
            "batch_size": plan.batch_size,
            **plan.peak.as_json(),
            "peak_allocated_bytes_with_workspaces": with_workspaces.allocated_bytes,
            "peak_reserved_bytes_with_workspaces": max(plan.peak.reserved_bytes, with_workspaces.reserved_bytes),
            "relative_work": self.relative_work(plan),
            "half_precision_work": self.half_work(plan),
            "values_read": list(plan.trace.values_read),
        }

    def _max_batch_as_json(self, variant: Variant, precision: str, target: PlanTarget) -> dict[str, Any]:
        max_batch = self.max_batch(variant, precision, target)
        return {"skipped": max_batch} if isinstance(max_batch, str) else max_batch.as_json()
