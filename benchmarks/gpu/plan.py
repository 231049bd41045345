"""How far off `plan` is: predicted peaks of memory beside those of real steps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu import jobs
from benchmarks.gpu.parts import Machine, Part, Planned, Reporter, Request
from benchmarks.gpu.rows import Row

_WORKLOAD = "benchmarks.planned:Planned"
_NETS = ("resnet50", "vit_b_16", "convnext_tiny", "unet", "resnet18", "swin_t", "transformer", "lstm")
_PRECISIONS = ("amp", "fp32", "bf16", "tf32")
_STEPS = 3
"""The second step has the optimizer's state from its beginning; the third one shows that nothing grows."""


@dataclass(frozen=True)
class Case:
    """One training step."""

    net: str
    precision: str
    batch_size: int
    optimizer: str = "adamw"
    frozen: bool = False

    @property
    def key(self) -> str:
        trained = "head" if self.frozen else "all"
        return f"{self.net} {self.precision} batch {self.batch_size}, {self.optimizer}, {trained}"

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        return ("net", self.net), ("optimizer_name", self.optimizer), ("frozen", str(self.frozen))


def cases(*, tiny: bool) -> list[Case]:
    """Return all combinations, in an order in which every net, precision, batch and optimizer comes early."""
    if tiny:
        return [Case("mlp", "fp32", 8), Case("mlp", "bf16", 8, "sgd", frozen=True)]
    every = [Case(*one) for one in itertools.product(_NETS, _PRECISIONS, (128, 32, 8), ("adamw", "sgd"), (False, True))]
    random.Random(0).shuffle(every)
    return sorted(every, key=lambda case: case.frozen or case.precision in ("tf32", "bf16"))


def parts(machine: Machine, kept: Mapping[str, Row]) -> list[Part]:
    rows = [Planned(key=one.key, impossible=machine.precisions[one.precision]) for one in cases(tiny=machine.tiny)]
    return [Part(name="errors", rows=rows)]


def measure(request: Request, report: Reporter) -> None:
    runner = jobs.Jobs(request.device)
    for case in cases(tiny=request.tiny):
        if case.key in request.keys:
            report.row(case.key, lambda one=case: _beside(runner, one))


def _beside(runner: jobs.Jobs, case: Case) -> dict[str, Any]:
    """Return what is predicted and what is measured of the same steps."""
    settings: dict[str, Any] = {
        "precision": case.precision,
        "batch_size": case.batch_size,
        "options": case.options,
        "synthetic": True,
        "steps": _STEPS,
    }
    plan = runner.plan(_WORKLOAD, **settings)
    return {
        "predicted_allocated_bytes": plan.peak.allocated_bytes,
        "predicted_reserved_bytes": plan.peak.reserved_bytes,
        "predicted_reserved_bytes_with_workspaces": plan.peak_with_workspaces.reserved_bytes,
        **jobs.values_of(runner.run(_WORKLOAD, **settings)),
    }
