"""Measure the cost of tracking: a bare PyTorch loop, amp-track train, and Lightning with MLFlowLogger.

    python -m benchmarks.overhead [--device cpu] [--repeats 5]

All use the same model, data, batches, optimizer and precision, each training in a fresh process, in turns. Steps/s are
those of the training loop only, without evaluation, start and end. The bare loop is torch's AMP recipe, in fp32 with
autocast and scaler disabled. amp-track train records the loss and scale of every step in MLflow on SQLite; Lightning
logs the loss to the same store every step or every 50. Compare the ratios of the medians. In all of them glibc keeps
freed memory. benchmarks.step measures what TrainStep costs without a record.

Writes benchmarks/results/overhead-<device>.json after each training, and prints it as a Markdown table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import markdown, processes, provenance

WARM_UP_STEPS = 20


@dataclass(frozen=True)
class Case:
    """A training to compare. `steps` are timed after the warm-up."""

    name: str
    workload: str
    precision: str
    batch_size: int
    steps: int
    device: str = "cpu"
    channels_last: bool = False
    synthetic: bool = False

    @property
    def reference(self) -> str:
        """The workload, loadable from any folder."""
        return self.workload if ":" in self.workload else str(processes.ROOT / self.workload)


DIGITS = "experiments/digits.py"
CASES = {
    "cpu": [
        Case("tiny MLP, fp32", "benchmarks.models:Mlp", "fp32", 64, 3000),
        Case("tiny MLP, amp", "benchmarks.models:Mlp", "amp", 64, 3000),
        Case("tiny MLP, bf16", "benchmarks.models:Mlp", "bf16", 64, 3000),
        Case("digits CNN, amp", DIGITS, "amp", 12, 300),
        Case("digits CNN, bf16", DIGITS, "bf16", 64, 600),
    ],
    "cuda": [
        Case("tiny MLP, amp", "benchmarks.models:Mlp", "amp", 64, 5000, device="cuda"),
        Case(
            "ResNet-50 at 224 px, amp, channels_last", "benchmarks.models:ResNet50", "amp", 128, 200,
            device="cuda", channels_last=True, synthetic=True,
        ),
    ],
}  # fmt: skip


# ------------------------------------------------------------------------- each in its own process, printing steps/s


def batches_of(case: Case, workload: Any) -> Any:
    """Return an efficient loader: it slices batches from the tensors, in a new order each epoch."""
    import torch
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    pin = case.device != "cpu"
    if case.synthetic:
        batch = workload.example(case.batch_size)
        return [tuple(tensor.pin_memory() if pin else tensor for tensor in batch)] * 16
    data = workload.train_data()
    sampler = BatchSampler(RandomSampler(data, generator=torch.Generator().manual_seed(0)), case.batch_size, True)
    return DataLoader(data, sampler=sampler, batch_size=None, pin_memory=pin)


def model_of(case: Case, workload: Any) -> Any:
    import torch

    torch.manual_seed(0)
    model = workload.model().to(case.device)
    return model.to(memory_format=torch.channels_last) if case.channels_last else model


def bare(case: Case) -> float:
    """Measure the training loop from the documentation of torch."""
    from amp_track import Precision, float32_precision, load_workload
    from benchmarks.bare import BareStep

    workload = load_workload(case.reference)
    model = model_of(case, workload)
    step = BareStep(workload, model, case.precision, case.device, channels_last=case.channels_last)
    steps, started = 0, 0.0
    model.train()
    with float32_precision(Precision.named(case.precision)):
        while True:
            for inputs, targets in batches_of(case, workload):
                if steps == WARM_UP_STEPS:
                    synchronize(case)
                    started = time.perf_counter()
                step(inputs, targets)
                steps += 1
                if steps == WARM_UP_STEPS + case.steps:
                    synchronize(case)
                    return case.steps / (time.perf_counter() - started)


def lightning(case: Case, log_every: int) -> float:
    import lightning
    import torch
    from lightning.pytorch.loggers import MLFlowLogger
    from lightning.pytorch.plugins import MixedPrecision, Precision

    from amp_track import load_workload

    workload = load_workload(case.reference)
    model = model_of(case, workload)
    clock = {}

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            if self.global_step == WARM_UP_STEPS:
                synchronize(case)
                clock["started"] = time.perf_counter()
            inputs, targets = batch
            if case.channels_last:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            loss = workload.loss(self.model(inputs), targets)
            self.log("train_loss", loss)
            return loss

        def on_train_end(self) -> None:
            synchronize(case)
            clock["ended"] = time.perf_counter()

        def configure_optimizers(self) -> Any:
            return workload.optimizer(self.model.parameters(), workload.learning_rate)

    scaler = torch.amp.GradScaler(case.device) if case.precision == "amp" else None
    precision: Any = Precision()
    if case.precision != "fp32":
        precision = MixedPrecision("16-mixed" if scaler else "bf16-mixed", device=case.device, scaler=scaler)
    trainer = lightning.Trainer(
        accelerator="cpu" if case.device == "cpu" else "gpu", devices=1, plugins=[precision],
        max_steps=WARM_UP_STEPS + case.steps, max_epochs=-1, log_every_n_steps=log_every,
        logger=MLFlowLogger(tracking_uri="sqlite:///mlflow.db"), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), batches_of(case, workload))
    return case.steps / (clock["ended"] - clock["started"])


def synchronize(case: Case) -> None:
    if case.device != "cpu":
        import torch

        torch.accelerator.synchronize()


def tracked(case: Case, grad_stats_every: int | None) -> float:
    """Run `amp-track train` as a user does, and check its records in MLflow. Return its steps/s."""
    import mlflow

    from amp_track.commands.train import train
    from amp_track.config.commands import request_of

    # Not amp_track.train: it does not lower the priority of the calling process.
    settings = {
        "precision": case.precision, "batch_size": str(case.batch_size), "device": case.device,
        "steps": str(WARM_UP_STEPS + case.steps), "channels_last": case.channels_last, "synthetic": case.synthetic,
    }  # fmt: skip
    if grad_stats_every is not None:
        settings["grad_stats_every"] = str(grad_stats_every)
    given = {f"job_{name}": value for name, value in settings.items()}
    result = train(request_of("train", case.reference, given, owns_process=True))
    job_result = result.job_result
    assert job_result.samples_per_second is not None
    client = mlflow.MlflowClient("sqlite:///mlflow.db")
    on_record = len(client.get_metric_history(result.run_id, "train/step_loss"))
    assert on_record == job_result.steps, f"{on_record} losses of {job_result.steps} steps are on record"
    return job_result.samples_per_second / case.batch_size


def fewer_steps(case: Case) -> Case:
    return dataclasses.replace(case, steps=case.steps // 3)


WAYS: dict[str, Callable[[Case], float]] = {
    "bare loop": bare,
    "amp_track": lambda case: tracked(case, None),
    "amp_track --grad-stats-every 100": lambda case: tracked(case, 100),
    # A third of the steps, because they take up to five times as long.
    "Lightning, every step": lambda case: lightning(fewer_steps(case), 1),
    "Lightning, every 50": lambda case: lightning(fewer_steps(case), 50),
}


# ------------------------------------------------------------------------- all of them, in turns


def in_own_process(case: Case, way: str) -> dict[str, float]:
    """Run one way in a separate process and an empty folder, and return its result."""
    asked = "--one", way, json.dumps(dataclasses.asdict(case))
    environment = processes.KEEPING_FREED_MEMORY
    found: dict[str, float] = processes.json_of("benchmarks.overhead", *asked, environment=environment)
    return found


def measure(cases: list[Case], repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the record of the cases measured so far, after each case."""
    result = provenance.of_device(DIGITS, device=cases[0].device)
    result |= {"versions": result["versions"] | provenance.versions("lightning"), "n": repeats, "cases": []}
    for case in cases:
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for repeat in range(repeats):
            order = list(WAYS) if repeat % 2 == 0 else list(reversed(WAYS))
            for way in order:
                runs[way].append(in_own_process(case, way))
                print(f"{case.name}: {way}: {runs[way][-1]['steps_per_second']:.0f} steps/s", file=sys.stderr)
        result["cases"].append({"case": dataclasses.asdict(case), "runs": runs, "ratios": ratios(runs)})
        yield result


def ratios(runs: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return ratios of the median steps/s to the bare loop."""
    medians = {way: statistics.median(run["steps_per_second"] for run in found) for way, found in runs.items()}
    return {way: median / medians["bare loop"] for way, median in medians.items()}


def table(result: dict[str, Any]) -> str:
    rows = []
    for found in result["cases"]:
        case, cells = found["case"], []
        for way in WAYS:
            speeds = [run["steps_per_second"] for run in found["runs"][way]]
            spread = f" ({min(speeds):,.0f} to {max(speeds):,.0f})" if way == "bare loop" else ""
            cells.append(f"{statistics.median(speeds):,.0f} steps/s{spread}, {found['ratios'][way]:.2f} ×")
        rows.append([f"{case['name']}, batch {case['batch_size']}", *cells])
    return markdown.table(["training", *WAYS], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="measurements per case (default 5)")
    parser.add_argument("--device", choices=list(CASES), default="cpu")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "CASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        way, case = arguments.one
        print(json.dumps({"steps_per_second": WAYS[way](Case(**json.loads(case)))}))
        return
    for result in measure(CASES[arguments.device], arguments.repeats):
        provenance.write(f"overhead-{arguments.device}", result)
    print(table(result))


if __name__ == "__main__":
    main()
