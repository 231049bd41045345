"""Compare the claims of five published write-ups of mixed precision with measurements.

    python -m benchmarks.published [--device cpu] [--repeats 3]

Writes benchmarks/results/published-<device>.json, which docs/published.md shows. On a GPU the sizes are those of the
write-ups, on synthetic images of the real shape; on a CPU they are smaller, as each row's command says. A claim that
needs a GPU or missing images is reported as such.

Factors are time or memory relative to fp32: the mean and the range over several seeds. On a CPU, memory is measured in
an additional short training within a memory budget, where the meter is exact.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchvision.models import resnet50

from amp_track.config.job import Job
from amp_track.records.events import Event, StepsRecorded
from amp_track.records.result import JobResult, JobStatus
from amp_track.records.units import format_bytes
from amp_track.runner.runner import JobRunner
from amp_track.targets.workload import load_workload
from benchmarks.claims import (
    GIBIBYTE,
    NOT_HERE,
    SINUSOID,
    SIX_GIBIBYTES,
    Bench,
    Row,
    command_of,
    factors,
    row_of,
    training_memory,
    training_time,
)
from benchmarks.provenance import provenance, read, write


@dataclass(frozen=True)
class WriteUp:
    """A write-up, and the measurement of its claims."""

    title: str
    rows: Callable[[Bench], list[Row]]


def caltech256(bench: Bench) -> list[Row]:
    size, batch_size, steps = ({}, 256, 30) if bench.is_gpu else ({"image_size": 96}, 16, 6)
    result = bench.compare("caltech256", size, synthetic=True, batch_size=batch_size, steps=steps)
    rows = [parameters(), *six_gibibytes(bench)]
    rows.append(
        row_of(
            "10 epochs in 61.67 instead of 68.05 minutes: 0.91 × the time",
            (61.67 / 68.05, 61.67 / 68.05),
            factors(result, training_time),
            command_of(bench, "caltech256", size, f"--synthetic --batch-size {batch_size} --steps {steps}"),
            "computing alone",
        )
    )
    return [*rows, accuracy(bench)]


def accuracy(bench: Bench) -> Row:
    """Train as in the write-up, once per seed, if the images are available."""
    claim = "83.11 % instead of 80.86 % accuracy"
    command = command_of(bench, "caltech256", {})
    folder = Path.cwd() / "data"
    if not (folder / "256_ObjectCategories").is_dir():
        return Row(claim, f"{NOT_HERE}: Caltech-256 is not in data/", command=command)
    result = bench.compare("caltech256", {"data_dir": str(folder)})
    metrics = {precision: result.cell("", precision).metric for precision in result.precisions}
    listed = ", ".join(f"{name} {found.mean:.2%}" for name, found in metrics.items() if found is not None)
    ratios = ", ".join(
        f"{name} {found.mean / claimed:.2f}"
        for name, claimed in (("fp32", 0.8086), ("amp", 0.8311))
        if (found := metrics.get(name)) is not None
    )
    return Row(claim, listed, ratios, command)


def parameters() -> Row:
    """Count the parameters of the model, which needs no training."""
    model = load_workload(Bench.workload("caltech256"), [("weights", "none")]).model()
    here = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    as_written = sum(parameter.numel() for parameter in resnet50(weights=None).parameters()) + trainable
    return Row(
        "26,081,576 parameters in the model as written, 524,544 trainable",
        f"{as_written:,} as written (the replaced layer kept), {here:,} here, {trainable:,} trainable",
        f"{as_written / 26_081_576:.2f}, {trainable / 524_544:.2f}",
        "python -m benchmarks.published",
    )


def six_gibibytes(bench: Bench) -> list[Row]:
    rows = []
    for fact in SIX_GIBIBYTES:
        command = (
            f"amp-track train experiments/caltech256.py --synthetic --precision {fact.precision} "
            f"--batch-size {fact.batch_size} --memory-budget 6GiB --steps 10"
        )
        if not bench.is_gpu:
            rows.append(Row(fact.claim, f"{NOT_HERE}: needs a GPU", command=command))
            continue
        job = bench.job(
            "caltech256", synthetic=True, precision=fact.precision, batch_size=fact.batch_size,
            memory_budget_bytes=6 * GIBIBYTE, steps=10,
        )  # fmt: skip
        job_result = bench.runner("caltech256").run(job)
        assert job_result.status in (JobStatus.FITS, JobStatus.OOM), job_result.message
        amount = job_result.peak_bytes if job_result.fits else job_result.requested_bytes
        what = "in" if job_result.fits else f"in {job_result.phase}, asking for"
        measured = f"{job_result.status} {what} {format_bytes(amount) if amount else '?'} (6 GiB emulated, n=1)"
        as_claimed = job_result.status is fact.status and amount is not None
        ratio = f"{amount / fact.bytes:.2f}" if as_claimed and amount else "not so"
        rows.append(Row(fact.claim, measured, ratio, command))
    return rows


def mlp(bench: Bench) -> list[Row]:
    widths = ("16", "64", "256", "1024", "4096") if bench.is_gpu else ("16", "64", "256", "1024")
    size = {"batches": 400} if bench.is_gpu else {}  # 50 batches take only a few hundredths of a second
    result = bench.compare("mlp", size, vary=("width", widths))
    command = command_of(bench, "mlp", size, f"--vary width={','.join(widths)}")
    rows = [
        row_of(
            "up to 3 times as fast: 0.33 × the time" if width == "16" else f"the same at width {width}",
            (1 / 3, 1.0),
            factors(result, training_time, value=width),
            command,
        )
        for width in widths
    ]
    return [*rows, Row("from which width on does it pay?", "; ".join(result.answers), "", command)]


def data_parallel(bench: Bench) -> list[Row]:
    import torch

    command = "amp-track train experiments/mlp.py --precision fp32 --nproc 2 --batch-size 256"
    if bench.is_gpu and torch.cuda.device_count() < 2:
        return [Row("one scaler handed on, one rank that writes", f"{NOT_HERE}: needs two GPUs", command=command)]
    rows = []
    for precision in ("fp32", "amp"):
        alone, together = (
            trained(bench, "mlp", precision=precision, batch_size=512 // processes, nproc=processes)
            for processes in (1, 2)
        )
        apart = max(abs(a - b) / abs(a) for a, b in zip(alone.losses, together.losses, strict=True))
        skipped = f"{alone.job_result.skipped_steps} and {together.job_result.skipped_steps} steps skipped"
        speed = (together.job_result.samples_per_second or 0) / (alone.job_result.samples_per_second or 1)
        rows.append(
            Row(
                f"one scaler handed on, one rank that writes: no number; here 2 processes against 1, {precision}",
                f"{len(alone.losses)} losses the same but for {apart:.1e}; {skipped}; {speed:.2f} × the speed (n=1)",
                "",
                command.replace("fp32", precision),
            )
        )
    return rows


@dataclass(frozen=True)
class Trained:
    job_result: JobResult
    losses: list[float]


def trained(bench: Bench, name: str, **settings: Any) -> Trained:
    events: list[Event] = []
    job_result = bench.runner(name).run(bench.job(name, **settings), events.append)
    assert job_result.fits, job_result.message
    return Trained(job_result, [loss for e in events if isinstance(e, StepsRecorded) for loss in e.losses])


def sinusoid(bench: Bench) -> list[Row]:
    size = {} if bench.is_gpu else {"size": 128, "hidden": 64, "steps_per_epoch": 128}
    result = bench.compare("sinusoid", size)
    memory = bench.memory(result, "sinusoid", size | {"steps_per_epoch": 4})
    command = command_of(bench, "sinusoid", size)
    rows = [
        row_of(one.claim, (one.factor, one.factor), factors(memory if one.of_memory else result, one.measure), command)
        for one in SINUSOID
    ]
    metrics = {precision: result.cell("", precision).metric for precision in result.precisions}
    listed = ", ".join(f"{name} {found.mean:.4f}" for name, found in metrics.items() if found is not None)
    fp32, amp = metrics.get("fp32"), metrics.get("amp")
    lower = "" if fp32 is None or amp is None else "lower" if amp.mean < fp32.mean else "not lower"
    return [*rows, Row("a lower loss", f"mean squared error: {listed}; amp's is {lower}", "", command)]


def cifar10(bench: Bench) -> list[Row]:
    size, batch_size, steps = ({}, 64, 80) if bench.is_gpu else ({"image_size": 64}, 16, 6)
    result = bench.compare("cifar10", size, synthetic=True, batch_size=batch_size, steps=steps)
    memory = bench.memory(result, "cifar10", size, synthetic=True, batch_size=batch_size, steps=2)
    command = command_of(bench, "cifar10", size, f"--synthetic --batch-size {batch_size} --steps {steps}")
    return [
        row_of(
            "1.5 to 3 times as fast: 0.33 to 0.67 × the time", (1 / 3, 1 / 1.5), factors(result, training_time), command
        ),
        row_of("20 to 40 % less memory: 0.6 to 0.8 ×", (0.6, 0.8), factors(memory, training_memory), command),
    ]


WRITE_UPS = [
    WriteUp("ResNet-50 transfer learning on Caltech-256", caltech256),
    WriteUp("A small MLP on random data", mlp),
    WriteUp("Distributed training with one scaler", data_parallel),
    WriteUp("A ConvModel fitted to a quantized sinusoid", sinusoid),
    WriteUp("ResNet-50 on CIFAR-10", cifar10),
]


def measure(device: str, repeats: int) -> int:
    """Write the rows of each write-up as soon as it is measured. Return the number of claims."""
    mlp_file = Bench.workload("mlp")
    found = JobRunner(mlp_file).inspect(Job(workload=mlp_file, device=device))
    bench, name = Bench(device, found.hardware.kind, repeats), f"published-{device.replace(':', '')}"
    rows: dict[str, Any] = {}
    made = provenance(found) | {"kind": found.hardware.kind, "n": repeats}
    with contextlib.suppress(FileNotFoundError):  # what the same machine has measured stays until it is measured again
        stored = read(name)
        rows = stored["rows"] if {**stored, "date": made["date"], "rows": {}} == made | {"rows": {}} else {}
    for item in WRITE_UPS:
        print(item.title, file=sys.stderr, flush=True)
        rows[item.title] = [dataclasses.asdict(row) for row in item.rows(bench)]
        write(name, made | {"rows": rows})
    return sum(map(len, rows.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda, … (default cpu)")
    parser.add_argument("--repeats", type=int, default=3, help="trainings per claim, with different seeds (default 3)")
    arguments = parser.parse_args()
    print(f"{measure(arguments.device, arguments.repeats)} claims; `make docs` shows them")


if __name__ == "__main__":
    main()
