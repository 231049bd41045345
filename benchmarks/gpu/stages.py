"""The stages of the programme, the most telling first."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import cast

from benchmarks.gpu.parts import StageModule


@dataclass(frozen=True)
class Stage:
    """One stage: its rows are in a file of its own.

    Attributes:
        name: as `--stage` takes it, and the name of its file.
        purpose: what it answers, in a line.
        minutes: how long it is planned to take on a large GPU; after LIMIT_MINUTES no new row is started.
        module: what measures it.
    """

    name: str
    purpose: str
    minutes: int
    module: str

    def load(self) -> StageModule:
        return cast("StageModule", importlib.import_module(self.module))


LIMIT_MINUTES = 8.0
"""For each stage: machines with a GPU are borrowed for minutes."""
STAGES = (
    Stage("tests", "do the tests that need a GPU pass?", 5, "benchmarks.gpu.marked_tests"),
    Stage("caltech256", "which batches fit 6 GiB, and which allocation fails?", 2, "benchmarks.gpu.caltech256"),
    Stage(
        "edges",
        "the largest batch of five models in 6 GiB and on the whole card, beside Lightning",
        8,
        "benchmarks.gpu.edges",
    ),
    Stage(
        "step",
        "TrainStep against the bare loop: images/s on ResNet-50, and does the host ever wait?",
        5,
        "benchmarks.gpu.step",
    ),
    Stage("sinusoid", "time and memory of a ConvModel, beside what its write-up claims", 2, "benchmarks.gpu.sinusoid"),
    Stage(
        "sizes",
        "from which width on does a lower precision pay? And on CIFAR-10's ResNet-50?",
        3,
        "benchmarks.gpu.sizes",
    ),
    Stage(
        "planner",
        "what a probe takes against a whole training; reserved memory against allocated",
        2,
        "benchmarks.gpu.planner",
    ),
    Stage("plan", "how far off are predicted peaks of memory?", 8, "benchmarks.gpu.plan"),
    Stage("costs", "what loading, tracking, a trial and a fresh process cost", 3, "benchmarks.gpu.costs"),
)
NAMES = tuple(stage.name for stage in STAGES)
