"""A ConvModel fitted to a quantized sinusoid, trained and used at every precision: beside its write-up's claims."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.claims import Bench
from benchmarks.gpu import jobs
from benchmarks.gpu.parts import Machine, Part, Reporter, Request
from benchmarks.gpu.rows import Row

SEEDS = 3


def key(precision: str, seed: int) -> str:
    return f"{precision} seed {seed}"


def trainings(*, tiny: bool) -> list[jobs.Training]:
    """Every precision with one seed first. The write-up's own size; small, a picture of 32 pixels."""
    size = (("size", "32"), ("hidden", "16"), ("steps_per_epoch", "8")) if tiny else ()
    return [
        jobs.Training(
            key=key(precision, seed),
            workload=Bench.workload("sinusoid"),
            settings={"precision": precision, "seed": seed, "options": size},
        )
        for seed in range(1 if tiny else SEEDS)
        for precision in jobs.precisions()
    ]


def parts(machine: Machine, kept: Mapping[str, Row]) -> list[Part]:
    return [Part(name="trainings", rows=[one.planned(machine) for one in trainings(tiny=machine.tiny)])]


def measure(request: Request, report: Reporter) -> None:
    jobs.measure(trainings(tiny=request.tiny), request, report)
