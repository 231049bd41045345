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
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from torchvision.models import resnet50

import amp_track
from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.records.events import Event, StepsRecorded
from amp_track.records.result import JobResult, JobStatus
from amp_track.records.units import format_bytes
from amp_track.results.compare import CompareResult
from amp_track.runner.runner import JobRunner
from amp_track.targets.workload import load_workload
from benchmarks.provenance import provenance, read, write

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
NOT_HERE = "not measurable here"
GIBIBYTE = 2**30


# ----------------------------------------------------------------------------------------------- measurements of claims


@dataclass(frozen=True)
class Row:
    """A claim and its measurement."""

    claim: str
    measured: str
    ratio: str = ""
    """The measured factor divided by the claimed one."""
    command: str = ""
    """A command that reproduces the measurement."""
    by_seed: dict[str, list[float]] = field(default_factory=dict)
    """The factors of the trainings."""


@dataclass
class Bench:
    """The device of the measurements, and the number of repeats."""

    device: str
    kind: str
    """`cpu`, `cuda`, …"""
    repeats: int
    runners: dict[str, JobRunner] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    def runner(self, name: str) -> JobRunner:
        return self.runners.setdefault(name, JobRunner(self.workload(name)))

    @staticmethod
    def workload(name: str) -> str:
        return str(EXPERIMENTS / f"{name}.py")

    def compare(
        self,
        name: str,
        options: Mapping[str, object],
        *,
        vary: tuple[str, tuple[str, ...]] | None = None,
        seeds: int | None = None,
        **job: Any,
    ) -> CompareResult:
        """Run `amp-track compare` in temporary stores."""
        # MLflow keeps artifacts in the working directory
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            return amp_track.compare(
                self.workload(name),
                device=self.device,
                set=options,
                vary={vary[0]: vary[1]} if vary is not None else None,
                seeds=seeds or self.repeats,
                tracking_uri=f"sqlite:///{folder}/mlflow.db",
                **job,
            )

    def memory(self, result: CompareResult, name: str, options: Mapping[str, object], **job: Any) -> CompareResult:
        """Return the result to read memory from: on a CPU, a few steps within a budget."""
        if self.kind != "cpu":
            return result
        return self.compare(name, options, seeds=1, memory_budget=4 * GIBIBYTE, **job)

    def job(self, name: str, **settings: Any) -> Job:
        asked = Job(workload=self.workload(name), device=self.device, **settings)
        return resolve(asked, self.runner(name).inspect(asked))


@dataclass(frozen=True)
class Fact:
    """A claim about 6 GB of memory: training ResNet-50 on Caltech-256."""

    claim: str
    precision: str
    batch_size: int
    status: JobStatus
    bytes: float
    """The peak memory if it fits, else the size of the failed allocation."""


SIX_GIBIBYTES = (
    Fact("fp32 at batch 256 fits 6 GB, in about 3.9 GB", "fp32", 256, JobStatus.FITS, 3.9e9),
    Fact("fp32 at batch 512 runs out of 6 GB, asking for 1.53 GiB", "fp32", 512, JobStatus.OOM, 1.53 * GIBIBYTE),
    Fact("amp at batch 512 fits 6 GB, in about 4 GB", "amp", 512, JobStatus.FITS, 4e9),
)


@dataclass(frozen=True)
class FactorClaim:
    """A claim about the factor of amp relative to fp32."""

    claim: str
    factor: float
    measure: Callable[[JobResult], float | None]
    of_memory: bool


@dataclass(frozen=True)
class Factor:
    """Factors relative to fp32, by seed."""

    by_seed: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.by_seed)

    def __str__(self) -> str:
        apart = max(self.by_seed) - min(self.by_seed)
        between = f" ({min(self.by_seed):.2f}–{max(self.by_seed):.2f})" if apart >= 0.005 else ""
        return f"{self.mean:.2f} ×{between}"


def factors(
    result: CompareResult, measure: Callable[[JobResult], float | None], *, value: str = ""
) -> dict[str, Factor]:
    """Return the factors by precision, without precisions that have no measurement."""

    def of(precision: str) -> list[float | None]:
        return [measure(training.job_result) for training in result.cell(value, precision).trainings]

    found = {}
    for precision in result.precisions:
        pairs = [(own, fp32) for own, fp32 in zip(of(precision), of("fp32"), strict=True) if own and fp32]
        if precision != "fp32" and pairs:
            found[precision] = Factor(tuple(own / fp32 for own, fp32 in pairs))
    return found


def training_time(job_result: JobResult) -> float | None:
    return 1 / job_result.samples_per_second if job_result.samples_per_second else None


def inference_time(job_result: JobResult) -> float | None:
    return 1 / job_result.eval_samples_per_second if job_result.eval_samples_per_second else None


def training_memory(job_result: JobResult) -> float | None:
    return job_result.train_peak_allocated_bytes


def inference_memory(job_result: JobResult) -> float | None:
    return job_result.eval_peak_allocated_bytes


SINUSOID = (
    FactorClaim("training takes 46.38 % less time (13.98 → 7.50 s): 0.54 ×", 7.50 / 13.98, training_time, False),
    FactorClaim("training takes 49.79 % less memory: 0.50 ×", 0.5021, training_memory, True),
    FactorClaim("inference takes 32.23 % less time: 0.68 ×", 0.6777, inference_time, False),
    FactorClaim("inference takes 49.79 % less memory: 0.50 ×", 0.5021, inference_memory, True),
)


def row_of(claim: str, claimed: tuple[float, float], found: dict[str, Factor], command: str, note: str = "") -> Row:
    """Return the row of a claim about the factor of amp, given as an interval."""
    listed = ", ".join(f"{precision} {factor}" for precision, factor in found.items())
    ratios = ", ".join(f"{precision} {over_claimed(factor.mean, claimed)}" for precision, factor in found.items())
    by_seed = {precision: list(factor.by_seed) for precision, factor in found.items()}
    return Row(claim, (listed or NOT_HERE) + (f"; {note}" if note else ""), ratios, command, by_seed)


def over_claimed(factor: float, claimed: tuple[float, float]) -> str:
    """Return the ratio of the factor to the nearer end of the claimed interval."""
    low, high = claimed
    if low < factor < high:
        return "within"
    return f"{factor / (low if factor <= low else high):.2f}"


def command_of(bench: Bench, name: str, options: Mapping[str, object], *more: str) -> str:
    """Return a command that reproduces the measurement."""
    chosen = [f"--set {option}={value}" for option, value in options.items()]
    where = [] if bench.is_gpu else ["--device cpu"]
    return " ".join(["amp-track compare", f"experiments/{name}.py", *chosen, *more, *where, f"--seeds {bench.repeats}"])


# ------------------------------------------------------------------------------------------------------------ write-ups


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
