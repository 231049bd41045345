"""The result of training with several seeds at each precision."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from amp_track.config.job import Job
from amp_track.config.precisions import REFERENCE
from amp_track.config.values import PRECISIONS, Tolerance
from amp_track.records.result import JobResult
from amp_track.results.equivalence import Comparison, Interval, compare, interval


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """One training of a comparison over seeds."""

    precision: str
    seed: int
    job_result: JobResult
    run_id: str


@dataclass(frozen=True, kw_only=True)
class SeedsResult:
    """The same training with several seeds at each precision."""

    job: Job
    seeds: int
    tolerance: Tolerance
    trainings: tuple[SeedResult, ...]

    def metrics(self, precision: str) -> list[float]:
        """Return the finite metrics of one precision, by seed."""
        return list(self._by_seed(precision).values())

    def _by_seed(self, precision: str) -> dict[int, float]:
        own = sorted((t for t in self.trainings if t.precision == precision), key=lambda training: training.seed)
        return {
            training.seed: training.job_result.metric
            for training in own
            if training.job_result.metric is not None and math.isfinite(training.job_result.metric)
        }

    def without_metric(self, precision: str) -> int:
        """Return the number of trainings without a finite metric: they diverged or did not finish."""
        return sum(t.precision == precision for t in self.trainings) - len(self.metrics(precision))

    @property
    def precisions(self) -> list[str]:
        """The precisions that were trained, in the order of `PRECISIONS`."""
        trained = {training.precision for training in self.trainings}
        return [precision for precision in PRECISIONS if precision in trained]

    def interval(self, precision: str) -> Interval | None:
        """Return the mean metric of one precision with its interval; None if no metric is finite."""
        metrics = self.metrics(precision)
        return interval(metrics) if metrics else None

    def comparison(self, precision: str) -> Comparison | None:
        """Return the comparison with fp32; None for fp32 itself, or if one of the two has no metric."""
        reference, own = self._by_seed(REFERENCE), self._by_seed(precision)
        both = self.compared_seeds(precision)
        if precision == REFERENCE or not both:
            return None
        tolerance = self.tolerance.of(fmean(reference.values()))
        return compare([own[seed] for seed in both], [reference[seed] for seed in both], tolerance)

    def compared_seeds(self, precision: str) -> list[int]:
        """Return the seeds with a finite metric both at a precision and at fp32."""
        reference = self._by_seed(REFERENCE)
        return [seed for seed in self._by_seed(precision) if seed in reference]

    def as_json(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "tolerance": str(self.tolerance),
            "batch_size": self.job.batch_size,
            "precisions": {
                name: {
                    "values": self.metrics(name),
                    "without_metric": self.without_metric(name),
                    "interval": (interval := self.interval(name)) and dataclasses.asdict(interval),
                    "against_fp32": (against := self.comparison(name)) and dataclasses.asdict(against),
                    "run_ids": [t.run_id for t in self.trainings if t.precision == name],
                }
                for name in self.precisions
            },
        }
