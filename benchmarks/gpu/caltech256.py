"""What fits 6 GiB of a training of ResNet-50 on Caltech-256's shapes, and the size of the allocation that fails."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.claims import GIBIBYTE, SIX_GIBIBYTES, Bench, Fact
from benchmarks.gpu import jobs
from benchmarks.gpu.parts import Machine, Part, Reporter, Request
from benchmarks.gpu.rows import Row

_TINY_DIVISOR = 64
"""Of the batch sizes, where sizes are small."""


def key(fact: Fact) -> str:
    return f"{fact.precision} batch {fact.batch_size}"


def trainings(*, tiny: bool) -> list[jobs.Training]:
    """The three facts; small, the same shapes of a training in the memory of a laptop, whatever fits it."""
    limits = (
        {"memory_budget_bytes": GIBIBYTE // 8, "steps": 1, "options": (("image_size", "32"),)}
        if tiny
        else {"memory_budget_bytes": 6 * GIBIBYTE, "steps": 10}
    )
    return [
        jobs.Training(
            key=key(fact),
            workload=Bench.workload("caltech256"),
            settings={
                "synthetic": True,
                "precision": fact.precision,
                "batch_size": fact.batch_size // (_TINY_DIVISOR if tiny else 1),
                **limits,
            },
        )
        for fact in SIX_GIBIBYTES
    ]


def parts(machine: Machine, kept: Mapping[str, Row]) -> list[Part]:
    return [Part(name="facts", rows=[one.planned(machine) for one in trainings(tiny=machine.tiny)])]


def measure(request: Request, report: Reporter) -> None:
    jobs.measure(trainings(tiny=request.tiny), request, report)
