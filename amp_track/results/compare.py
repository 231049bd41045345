"""The result of `compare`: the same training at each precision and each value of an option, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Any

from amp_track.batch_search.recommended_batch import NO_SLOWER
from amp_track.config.job import Job
from amp_track.config.precisions import REFERENCE
from amp_track.config.values import Tolerance
from amp_track.records.hardware import Hardware
from amp_track.records.result import JobResult, JobStatus
from amp_track.results import Shown
from amp_track.results.equivalence import Interval, SeedsResult, interval
from amp_track.results.trial_row import TrialRow

_LARGEST = 1e300
"""Larger numbers overflow when a chart subtracts them."""


class Speed(StrEnum):
    FASTER = "faster"
    UNCLEAR = "not clearly faster or slower"
    """The ranges of the readings overlap: another run might turn the difference round."""
    SAME = "no difference"
    SLOWER = "slower"


def judge(speedup: float) -> Speed:
    """Return whether a precision is faster. Differences within 3 %, in either direction, count as the same speed."""
    if speedup * NO_SLOWER > 1:
        return Speed.FASTER
    return Speed.SLOWER if speedup < NO_SLOWER else Speed.SAME


def pays_from(verdicts: Sequence[Speed | None]) -> int | None:
    """Return the index from which on a precision is faster at every value where both ran; None if there is none.

    `verdicts` are by ascending value of the option; None if one of the two did not run.
    """
    start = None
    for place, verdict in enumerate(verdicts):
        if verdict is not None and verdict is not Speed.FASTER:
            start = None
        elif verdict is not None and start is None:
            start = place
    return start


def as_numbers(values: Sequence[str]) -> list[float] | None:
    """Return the values as numbers; None if one is not a number or too large for the axis of a chart."""
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return None
    return numbers if all(abs(number) <= _LARGEST for number in numbers) else None


def in_order(values: Sequence[str]) -> list[str]:
    """Sort numbers in ascending order; leave other values in the given order."""
    return sorted(values, key=float) if as_numbers(values) is not None else list(values)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One precision at one value of the option: one training per seed. Means exclude trainings that did not fit."""

    value: str
    """Empty if no option is varied."""
    precision: str
    trainings: tuple[TrialRow, ...]
    """By seed."""
    least_bytes: int = 0
    """Less memory is unknown: the meter does not show it."""

    @property
    def failure(self) -> JobResult | None:
        """The first job result that does not fit; None if all fit."""
        return next((training.job_result for training in self.trainings if not training.job_result.fits), None)

    @property
    def status(self) -> str:
        """`fits`, or the status of the first training that does not fit."""
        return str(self.failure.status if self.failure is not None else JobStatus.FITS)

    @property
    def samples_per_second(self) -> float | None:
        return self._mean("samples_per_second")

    @property
    def speeds(self) -> list[float]:
        """Samples per second of each training."""
        return self._measured("samples_per_second")

    @property
    def train_seconds(self) -> float | None:
        return self._mean("train_seconds")

    @property
    def eval_samples_per_second(self) -> float | None:
        return self._mean("eval_samples_per_second")

    @property
    def waited_fraction(self) -> float | None:
        return self._mean("waited_fraction")

    @property
    def waits_for_data(self) -> bool:
        return any(job_result.waits_for_data for job_result in self._fitting)

    @property
    def train_memory_bytes(self) -> float | None:
        return self._peak_bytes("train_peak_allocated_bytes")

    @property
    def eval_memory_bytes(self) -> float | None:
        return self._peak_bytes("eval_peak_allocated_bytes")

    @property
    def metric(self) -> Interval | None:
        """The mean metric with its interval, over trainings with a finite metric; None if there are none."""
        fitting = (training for training in self.trainings if training.job_result.fits)
        metrics = [metric for training in fitting if (metric := training.finite_metric) is not None]
        return interval(metrics) if metrics else None

    @property
    def steps(self) -> int:
        """The optimizer steps of all seeds."""
        return sum(job_result.steps for job_result in self._fitting)

    @property
    def has_scaler(self) -> bool:
        """Whether a GradScaler could skip steps."""
        return any(job_result.scale is not None for job_result in self._fitting)

    @property
    def skipped_steps(self) -> int:
        return sum(job_result.skipped_steps for job_result in self._fitting)

    @property
    def _fitting(self) -> list[JobResult]:
        return [training.job_result for training in self.trainings if training.job_result.fits]

    def _measured(self, measure: str) -> list[float]:
        numbers = (getattr(job_result, measure) for job_result in self._fitting)
        return [number for number in numbers if number is not None]

    def _peak_bytes(self, measure: str) -> float | None:
        return max((size for size in self._measured(measure) if size >= self.least_bytes), default=None)

    def _mean(self, measure: str) -> float | None:
        numbers = self._measured(measure)
        return fmean(numbers) if numbers else None


@dataclass(frozen=True, kw_only=True)
class CompareResult(Shown):
    """The same training at each precision and each value of the option."""

    study: str
    run_id: str
    experiment_id: str
    job: Job
    hardware: Hardware
    metric_name: str
    asked: Job = Job()
    """The settings that the user gave; `job` adds the workload's own values."""
    higher_is_better: bool = True
    option: str | None
    """The option that is varied; None if there is none, and then `values` holds one empty string."""
    values: tuple[str, ...]
    precisions: tuple[str, ...]
    skipped: dict[str, str]
    """The precisions that the device does not support, each with the reason."""
    seeds: int
    tolerance: Tolerance
    cells: tuple[Cell, ...] = field(repr=False)
    """Ordered by value, then by precision."""
    cautions: dict[str, str] = field(default_factory=dict)
    """A caution for each precision that the device emulates."""
    missing: int = 0
    """The number of trainings still to be run."""
    answers: tuple[str, ...] = ()
    report: str = ""

    def cell(self, value: str, precision: str) -> Cell:
        return next(cell for cell in self.cells if (cell.value, cell.precision) == (value, precision))

    def at(self, value: str) -> str:
        """Return `width=16` for a value; empty if no option is varied."""
        return f"{self.option}={value}" if self.option is not None else ""

    def ratio(self, cell: Cell, measure: str) -> float | None:
        """Return the ratio of a measure to the reference at the same value; None if one of the two is unknown."""
        own, reference = getattr(cell, measure), getattr(self.cell(cell.value, REFERENCE), measure)
        return own / reference if own is not None and reference else None

    def speedups(self, precision: str) -> list[float | None]:
        return [self.ratio(self.cell(value, precision), "samples_per_second") for value in self.values]

    def verdicts(self, precision: str) -> list[Speed | None]:
        """Return the verdict of a precision at each value."""
        return [self.verdict(self.cell(value, precision)) for value in self.values]

    def verdict(self, cell: Cell) -> Speed | None:
        """Return whether a cell is faster than the reference at its value; None if one of the two did not run."""
        speedup = self.ratio(cell, "samples_per_second")
        if speedup is None:
            return None
        own, reference = cell.speeds, self.cell(cell.value, REFERENCE).speeds
        overlap = min(max(own), max(reference)) >= max(min(own), min(reference))
        found = judge(speedup)
        return Speed.UNCLEAR if overlap and found is not Speed.SAME else found

    def seeds_at(self, value: str) -> SeedsResult:
        trainings = tuple(training for cell in self.cells if cell.value == value for training in cell.trainings)
        return SeedsResult(job=self.job, seeds=self.seeds, tolerance=self.tolerance, trainings=trainings)

    @property
    def has_metric(self) -> bool:
        return any(cell.metric is not None for cell in self.cells)

    def as_json(self) -> dict[str, Any]:
        tested = self.values if self.seeds > 1 and self.has_metric else ()
        return {
            "study": self.study,
            "run_id": self.run_id,
            "target": self.job.workload,
            "device": self.hardware.as_json(),
            "memory_budget_bytes": self.job.memory_budget_bytes,
            "batch_size": self.job.batch_size,
            "metric_name": self.metric_name,
            "seeds": self.seeds,
            "vary": self.option and {"option": self.option, "values": list(self.values)},
            "rows": [self.row(cell) for cell in self.cells],
            "equivalence": [{"value": value, **self.seeds_at(value).as_json()} for value in tested],
            "skipped": self.skipped,
            "cautions": self.cautions,
            "answers": list(self.answers),
            "report": self.report,
        }

    def row(self, cell: Cell) -> dict[str, Any]:
        """Return one cell with its ratios to the reference, as `--json` and MLflow's table show it."""
        return {
            "value": cell.value if self.option is not None else None,
            "precision": cell.precision,
            "status": cell.status,
            "samples_per_second": cell.samples_per_second,
            "speedup": self.ratio(cell, "samples_per_second"),
            "train_seconds": cell.train_seconds,
            "waited_fraction": cell.waited_fraction,
            "train_memory_bytes": cell.train_memory_bytes,
            "train_memory_ratio": self.ratio(cell, "train_memory_bytes"),
            "eval_samples_per_second": cell.eval_samples_per_second,
            "eval_speedup": self.ratio(cell, "eval_samples_per_second"),
            "eval_memory_bytes": cell.eval_memory_bytes,
            "eval_memory_ratio": self.ratio(cell, "eval_memory_bytes"),
            "metric": cell.metric.mean if cell.metric is not None else None,
            "metric_half_width": cell.metric.half_width if cell.metric is not None else None,
            "steps": cell.steps,
            "skipped_steps": cell.skipped_steps,
            "run_ids": [training.run_id for training in cell.trainings],
        }
