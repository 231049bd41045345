"""The commands to disturb: fast enough to run hundreds of times, with reproducible answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.faults import stores
from benchmarks.faults.command import Place
from benchmarks.processes import ROOT

_WORKLOAD = str(ROOT / "benchmarks" / "faults" / "workload.py")


@dataclass(frozen=True)
class Work:
    """A command.

    Args:
        name: of the command.
        arguments: the complete command line.
        answer: selects from the `--json` output the part that must not depend on a fault.
    """

    name: str
    arguments: tuple[str, ...]
    answer: Callable[[Any], Any]

    def again(self, place: Place) -> Sequence[str]:
        """Return the arguments to resume: the same ones, or --resume for a training with a checkpoint."""
        if self.name == "train" and (run_id := stores.resumable_training(place.stores)) is not None:
            return ["train", _WORKLOAD, "--resume", run_id, "--json"]
        return self.arguments

    def answer_of(self, stdout: str) -> Any:
        """Return the answer in the output of the command; None if there is none."""
        try:
            return json.loads(json.dumps(self.answer(json.loads(stdout))))
        except ValueError:
            return None


def _max_batches(found: Any) -> Any:
    names = ("max_batch", "first_failing_batch", "bound")
    return {precision: [max_batch.get(name) for name in names] for precision, max_batch in found["precisions"].items()}


def _metrics(found: Any) -> Any:
    return [[cell.get(name) for name in ("value", "precision", "metric")] for cell in found["rows"]]


FIT = Work(
    "max-batch",
    ("max-batch", _WORKLOAD, "--precision", "fp32", "--memory-budget", "16MiB", "--study", "s", "--json"),
    _max_batches,
)
SEARCH = Work(
    "search",
    (
        "search", _WORKLOAD, "--precision", "fp32", "--memory-budget", "16MiB", "--max-batch-size", "256",
        "--epochs", "1", "--trials", "3", "--study", "s", "--json",
    ),
    _max_batches,
)  # fmt: skip
COMPARE = Work(
    "compare",
    (
        "compare", _WORKLOAD, "--precision", "fp32,bf16", "--vary", "width=64,128", "--epochs", "1",
        "--study", "s", "--json",
    ),
    _metrics,
)  # fmt: skip
TRAIN = Work(
    "train",
    ("train", _WORKLOAD, "--precision", "bf16", "--steps", "400", "--checkpoint-every", "100", "--json"),
    lambda found: [found["metric"], found["steps"]],
)
STUDIES = (FIT, SEARCH, COMPARE)
ALL = (*STUDIES, TRAIN)
