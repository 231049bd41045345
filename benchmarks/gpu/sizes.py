"""From which size on a lower precision pays: an MLP of growing width, CIFAR-10's ResNet-50, and `compare` itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from benchmarks.claims import Bench
from benchmarks.gpu import jobs
from benchmarks.gpu.parts import Machine, Part, Planned, Reporter, Request
from benchmarks.gpu.rows import Row

WIDTHS = (16, 64, 256, 1024, 4096)
COMPARE = "amp-track compare, width 16 and the largest"


def mlp_key(width: int, precision: str) -> str:
    return f"MLP width {width} {precision}"


def cifar10_key(precision: str) -> str:
    return f"CIFAR-10 {precision}"


def widths(*, tiny: bool) -> tuple[int, ...]:
    return (16, 64) if tiny else WIDTHS


def mlp_trainings(*, tiny: bool) -> list[jobs.Training]:
    """The extremes first. 400 batches: the write-up's 50 are over in a few hundredths of a second."""
    smallest, *between, largest = widths(tiny=tiny)
    batches = "4" if tiny else "400"
    return [
        jobs.Training(
            key=mlp_key(width, precision),
            workload=Bench.workload("mlp"),
            settings={"precision": precision, "options": (("width", str(width)), ("batches", batches))},
        )
        for width in (largest, smallest, *between)
        for precision in jobs.precisions()
    ]


def cifar10_trainings(*, tiny: bool) -> list[jobs.Training]:
    size: dict[str, Any] = {"batch_size": 64, "steps": 80}
    if tiny:
        size = {"batch_size": 2, "steps": 1, "options": (("image_size", "32"),)}
    return [
        jobs.Training(
            key=cifar10_key(precision),
            workload=Bench.workload("cifar10"),
            settings={"precision": precision, "synthetic": True, **size},
        )
        for precision in (jobs.precisions()[:1] if tiny else jobs.precisions())
    ]


def parts(machine: Machine, kept: Mapping[str, Row]) -> list[Part]:
    both = {"MLP": mlp_trainings(tiny=machine.tiny), "CIFAR-10": cifar10_trainings(tiny=machine.tiny)}
    found = [Part(name=name, rows=[one.planned(machine) for one in listed]) for name, listed in both.items()]
    missing = machine.lacks("mlflow") or machine.lacks("optuna")
    return [*found, Part(name="compare", rows=[Planned(key=COMPARE, limit_seconds=240, missing=missing)])]


def measure(request: Request, report: Reporter) -> None:
    if request.part == "compare":
        report.row(COMPARE, lambda: _compare(request))
    else:
        of_part = mlp_trainings if request.part == "MLP" else cifar10_trainings
        jobs.measure(of_part(tiny=request.tiny), request, report)


def _compare(request: Request) -> dict[str, Any]:
    """The command's own answers, which have to agree with the trainings above."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    smallest, *_, largest = widths(tiny=request.tiny)
    bench = Bench(request.device, request.kind, 1)
    over = ("width", (str(smallest), str(largest)))
    settings = {"precision": ["fp32"]} if request.tiny else {}
    result = bench.compare("mlp", {"batches": 4 if request.tiny else 400}, over=over, **settings)
    return {"answers": list(result.answers), "skipped": dict(result.skipped)}
