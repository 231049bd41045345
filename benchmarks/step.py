"""Compare TrainStep and EvalStep with bare loops, in turns in one process.

    python -m benchmarks.step [--repeats 5]

Processes that train the same differ by more than what is measured here, so both ways take turns of about 0.1 s in one
process, on the same batch, each with its own copy of the model; every other process makes the copy of the bare loop
first. A ratio is the bare loop's time of a turn over ours in the turn next to it, which ends with a read, as an epoch
does. The bare loop is torch's AMP recipe, in fp32 with autocast and scaler disabled; it is compiled with the settings
of TrainStep. The bare evaluation adds up in float32 under no_grad, EvalStep in float64 under inference_mode. On a CPU
both use one thread, and glibc keeps freed memory.

Writes benchmarks/results/step-cpu.json after each round of cases, and prints it as a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from amp_track import Precision, TrainStep, float32_precision, load_workload
from amp_track.training.amp.evaluation import EvalStep
from benchmarks import markdown, processes, provenance
from benchmarks.bare import BareEvaluation, BareStep

WARM_UP_STEPS = 10
KINDS = ("training", "evaluation")


@dataclass(frozen=True)
class Comparison:
    """A model of `benchmarks.models`, images in channels-last format, and how long to compare: pairs of turns."""

    model: str
    precision: str
    batch_size: int
    compiled: bool = False
    device: str = "cpu"
    turn_seconds: float = 0.1
    pairs: int = 24
    makes_ours_first: bool = True

    @property
    def name(self) -> str:
        """The model, the precision, and whether it is compiled."""
        return f"{self.model} {self.precision}{', compiled' * self.compiled}"


CASES = [
    Comparison(model, precision, batch_size, compiled)
    for model, batch_size, precisions in [("Mlp", 64, ("fp32", "amp", "bf16")), ("Cnn", 8, ("fp32", "bf16"))]
    for precision in precisions
    for compiled in (False, True)
]
"""On a CPU."""


def compare(case: Comparison) -> dict[str, Any]:
    """Return the samples/s of all turns, of the bare loop and of ours, in training and in evaluation.

    Says also whether the host has waited for the device within steps.
    """
    workload = load_workload(f"benchmarks.models:{case.model}")
    batch = tuple(part.to(case.device) for part in workload.example(case.batch_size))
    is_image = batch[0].ndim == 4
    layout = torch.channels_last if is_image else torch.preserve_format
    batch = batch[0].to(memory_format=layout), batch[1]

    def model() -> Any:
        torch.manual_seed(0)
        return workload.model().to(case.device).to(memory_format=layout)

    with float32_precision(Precision.named(case.precision)):
        models = model(), model()
        own, other = models if case.makes_ours_first else reversed(models)
        optimizer = workload.optimizer(own.parameters(), workload.learning_rate)
        ours = TrainStep(own, optimizer, workload.loss, case.precision, channels_last=is_image, compile=case.compiled)
        bare_model: Any = torch.compile(other) if case.compiled else other
        settings: Any = {"precision": case.precision, "device": case.device, "channels_last": is_image}
        training = _in_turns(case, batch, BareStep(workload, bare_model, **settings), ours, ours.read)
        waits = _waits(case, batch, ours)
        own.eval()
        other.eval()
        evaluation = EvalStep(ours.forward, workload.loss, workload.score, **settings)
        bare_evaluation = BareEvaluation(workload, bare_model, **settings)
        evaluating = _in_turns(case, batch, bare_evaluation, evaluation, evaluation.read)
    return {"training": training, "evaluation": evaluating, "waits": waits}


def _in_turns(
    case: Comparison,
    batch: tuple[Any, ...],
    bare: Callable[..., Any],
    ours: Callable[..., Any],
    read: Callable[[], Any],
) -> dict[str, list[float]]:
    """Time turns of both, every other time in reverse order."""

    def seconds(step: Callable[..., Any], steps: int, finish: Callable[[], Any]) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            step(*batch)
        finish()
        if case.device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - started

    ways = {"bare": (bare, lambda: None), "ours": (ours, read)}
    for step, finish in ways.values():
        seconds(step, WARM_UP_STEPS, finish)
    steps = max(round(WARM_UP_STEPS * case.turn_seconds / seconds(bare, WARM_UP_STEPS, lambda: None)), 3)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for pair in range(case.pairs):
        for way in ways if pair % 2 == 0 else reversed(ways):
            step, finish = ways[way]
            found[way].append(round(steps * case.batch_size / seconds(step, steps, finish), 1))
    return found


def _waits(case: Comparison, batch: tuple[Any, ...], step: TrainStep) -> str:
    if not case.device.startswith("cuda"):
        return "not known: torch detects it only on CUDA"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(4):
            step(*batch)
        return "none"
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ratios(turns: dict[str, list[float]]) -> list[float]:
    """Return the speed of ours over that of the bare loop in each pair of turns."""
    return [ours / bare for bare, ours in zip(turns["bare"], turns["ours"], strict=True)]


def measure(repeats: int) -> Iterator[dict[str, Any]]:
    """Run each case in `repeats` fresh processes. Yield what is measured so far, after each round of all cases."""
    runs: dict[str, list[dict[str, Any]]] = {case.name: [] for case in CASES}
    found = provenance.of_device(str(processes.ROOT / "experiments" / "digits.py"), device="cpu")
    for repeat in range(repeats):
        for case in CASES:
            asked = "--one", json.dumps(dataclasses.asdict(case) | {"makes_ours_first": repeat % 2 == 0})
            run = processes.json_of("benchmarks.step", *asked, environment=processes.KEEPING_FREED_MEMORY)
            medians = ", ".join(f"{kind} {statistics.median(ratios(run[kind])):.3f} ×" for kind in KINDS)
            print(f"{case.name}: {medians}", file=sys.stderr)
            runs[case.name].append(run)
        cases = {case.name: dataclasses.asdict(case) for case in CASES}
        yield {**found, "n": repeat + 1, "cases": cases, "runs": runs}


def table(result: dict[str, Any]) -> str:
    rows = []
    for name, runs in result["runs"].items():
        case, cells = result["cases"][name], []
        for kind in KINDS:
            milliseconds = [1000 * case["batch_size"] / speed for run in runs for speed in run[kind]["bare"]]
            found = [statistics.median(ratios(run[kind])) for run in runs]
            spread = f"({min(found):.3f} to {max(found):.3f})"
            cells += [f"{statistics.median(milliseconds):.2f} ms", f"{statistics.median(found):.3f} × {spread}"]
        rows.append([f"{name}, batch {case['batch_size']}", *cells])
    times = f"n={result['n']} processes of {case['pairs']} pairs, medians"
    shown = markdown.table(["", "bare step", "TrainStep", "bare evaluation step", "EvalStep"], rows)
    return f"{shown}\n\n*{provenance.sentence(result, 'torch')}, {times}*"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="fresh processes per case (default 5)")
    parser.add_argument("--one", metavar="CASE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        torch.set_num_threads(1)
        print(json.dumps(compare(Comparison(**json.loads(arguments.one)))))
        return
    for result in measure(arguments.repeats):
        provenance.write("step-cpu", result)
    print(table(result))


if __name__ == "__main__":
    main()
