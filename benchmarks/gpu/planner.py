"""What a planner of memory must know: a probe's peaks against a whole training's, reserved against allocated memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu import jobs
from benchmarks.gpu.edges import MODELS
from benchmarks.gpu.parts import Machine, Part, Planned, Reporter, Request
from benchmarks.gpu.rows import Row

_PRECISIONS = ("fp32", "amp")
_STEPS = 12
"""Of a whole training: an epoch and a smaller last batch, an evaluation, and most of another epoch."""


@dataclass(frozen=True)
class Case:
    """One model at one precision and batch size."""

    model: str
    precision: str
    batch_size: int

    @property
    def key(self) -> str:
        return f"{self.model} {self.precision} batch {self.batch_size}"

    @property
    def settings(self) -> dict[str, Any]:
        samples = self.batch_size * 8 + self.batch_size // 2
        options = (("samples", str(samples)), ("distinct", "64"), ("eval_samples", str(self.batch_size)))
        return {"precision": self.precision, "batch_size": self.batch_size, "options": options}


def cases(*, tiny: bool) -> list[Case]:
    """All models at the larger batch first."""
    if tiny:
        return [Case("Mlp", "fp32", 4)]
    return [Case(model, precision, batch) for batch in (1024, 64) for precision in _PRECISIONS for model in MODELS]


def parts(machine: Machine, kept: Mapping[str, Row]) -> list[Part]:
    rows = [Planned(key=one.key, impossible=machine.precisions[one.precision]) for one in cases(tiny=machine.tiny)]
    return [Part(name="peaks", rows=rows)]


def measure(request: Request, report: Reporter) -> None:
    runner = jobs.Jobs(request.device)
    for case in cases(tiny=request.tiny):
        if case.key in request.keys:
            report.row(case.key, lambda one=case: _peaks(runner, one))


def _peaks(runner: jobs.Jobs, case: Case) -> dict[str, Any]:
    """Peaks of a probe and of a training, both without a budget."""
    workload = f"benchmarks.models:{case.model}"
    probe = runner.run(workload, probe=True, epochs=2, **case.settings)
    training = runner.run(workload, steps=_STEPS, **case.settings)
    return {"probe": jobs.values_of(probe), "training": jobs.values_of(training)}
