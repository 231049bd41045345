"""Rows that are trainings: each in a fresh process of the sandbox, as every job of amp_track is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amp_track.config.inspection import Inspection, resolve
from amp_track.config.job import Job
from amp_track.memory_plan import gpus
from amp_track.records.plan import PlanTask, PrecisionPlan
from amp_track.records.result import Outcome, Verdict
from amp_track.runner.runner import Sandbox
from benchmarks.gpu.parts import PRECISIONS, Machine, Planned, Reporter, Request

_MEASURED = (
    "phase", "requested_bytes", "wall_seconds", "train_seconds", "samples_per_second", "eval_samples_per_second",
    "max_allocated_bytes", "max_memory_bytes", "eval_max_allocated_bytes", "quality", "steps", "skipped_steps",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Training:
    """A row that is one training.

    Attributes:
        key: of the row.
        workload: a file, or `package.module:Class`.
        settings: fields of its Job.
    """

    key: str
    workload: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def planned(self, machine: Machine, limit_seconds: float = 120.0) -> Planned:
        impossible = machine.precisions.get(self.settings.get("precision", "fp32"), "")
        return Planned(key=self.key, limit_seconds=limit_seconds, impossible=impossible)


class Jobs:
    """Runs jobs on one device; device and workload are inspected once for all jobs with the same options."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._sandboxes: dict[str, Sandbox] = {}
        self._inspections: dict[tuple[object, ...], Inspection] = {}

    def run(self, workload: str, **settings: Any) -> Outcome:
        """Return a job's outcome. Raises RuntimeError unless it ran to its end or out of what the device has."""
        sandbox, job, _ = self._prepared(workload, settings)
        outcome = sandbox.run(job)
        if outcome.verdict not in (Verdict.FITS, Verdict.OOM, Verdict.KERNEL_LIMIT):
            raise RuntimeError(f"{outcome.verdict}: {outcome.message}")
        return outcome

    def plan(self, workload: str, **settings: Any) -> PrecisionPlan:
        """Return what is predicted for a job's own precision and batch on this device."""
        sandbox, job, inspection = self._prepared(workload, settings)
        assert job.batch_size is not None
        task = PlanTask(
            precisions=(job.precision,),
            batch_size=job.batch_size,
            targets=(),
            max_batch_size=job.batch_size,
            blas_workspace_bytes=gpus.blas_workspace_of(inspection.hardware),
        )
        return sandbox.plan(job, task).precisions[0]

    def _prepared(self, workload: str, settings: Mapping[str, Any]) -> tuple[Sandbox, Job, Inspection]:
        sandbox = self._sandboxes.setdefault(workload, Sandbox(workload))
        asked = Job(workload=workload, device=self._device, **settings)
        same = (workload, asked.options, asked.synthetic, asked.memory_budget_bytes)
        if same not in self._inspections:
            self._inspections[same] = sandbox.inspect(asked)
        return sandbox, resolve(asked, self._inspections[same]), self._inspections[same]


def values_of(outcome: Outcome) -> dict[str, Any]:
    """What a row keeps of an outcome."""
    found = {name: getattr(outcome, name) for name in _MEASURED}
    return {"verdict": str(outcome.verdict), "message": outcome.message[:200], **found}


def outcome_of(values: Mapping[str, Any]) -> Outcome:
    """The outcome again, as far as a row keeps it."""
    names = {item.name for item in dataclasses.fields(Outcome)} & {*_MEASURED, "message"}
    return Outcome(verdict=Verdict(values["verdict"]), **{name: values[name] for name in names})


def measure(trainings: Sequence[Training], request: Request, report: Reporter) -> None:
    """Run those that are asked for, in their order."""
    jobs = Jobs(request.device)
    for training in trainings:
        if training.key in request.keys:
            report.row(training.key, lambda one=training: values_of(jobs.run(one.workload, **one.settings)))


def precisions(first: Sequence[str] = ("fp32", "amp")) -> tuple[str, ...]:
    """All precisions, those that are asked about most first."""
    return (*first, *(name for name in PRECISIONS if name not in first))
