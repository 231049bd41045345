"""Compare claims with measurements: trainings at every precision, as factors relative to fp32."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import amp_track
from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.records.result import JobResult, JobStatus
from amp_track.results.compare import CompareResult
from amp_track.runner.runner import JobRunner

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
NOT_HERE = "not measurable here"
GIBIBYTE = 2**30


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
