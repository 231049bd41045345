"""Means and intervals over seeds, and an equivalence test: is the metric the same within a tolerance?

A difference that is not significant does not prove equality: with few seeds nothing is significant. The test therefore
asks whether the difference is proven to lie within the tolerance, by two one-sided tests (TOST; Schuirmann 1987,
doi:10.1007/BF01068419).
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from amp_track.config.job import Job
from amp_track.config.precisions import PRECISIONS, REFERENCE
from amp_track.config.values import Tolerance
from amp_track.results.trial_row import TrialRow

EQUIVALENT, DIFFERENT, UNKNOWN = "equivalent", "different", "not enough seeds to tell"
NOTHING_LEARNED = "nothing learned"
_LEARNED = 0.05
"""A training that lowers the loss of its first step by less than this fraction has learned nothing."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean and its 95 % confidence interval by Student's t, which needs at least two values."""

    mean: float
    low: float | None
    high: float | None

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The difference between the mean of one precision and the reference's."""

    conclusion: str
    """`equivalent`, `different`, `not enough seeds to tell`, or `nothing learned` instead of `equivalent`."""
    difference: float
    low: float | None
    """The lower end of the 90 % interval of the difference. The interval lies within the tolerance if and only if both
    one-sided tests at 5 % reject."""
    high: float | None
    tolerance: float


def interval(values: Sequence[float]) -> Interval:
    """Return the mean and interval of at least one value."""
    low, high, _ = _t_test(values, 0.95)
    return Interval(mean=fmean(values), low=low, high=high)


def compare(values: Sequence[float], reference: Sequence[float], tolerance: float) -> Comparison:
    """Test whether the means are equivalent within ±tolerance, different, or neither.

    The t-tests at 5 % are paired. Both values of a pair have the same seed, hence the same initial weights and order of
    samples, so that the effect of the seed cancels in the difference.
    """
    differences = [value - other for value, other in zip(values, reference, strict=True)]
    low, high, is_different = _t_test(differences, 0.90)
    if low is not None and high is not None and -tolerance < low and high < tolerance:
        conclusion = EQUIVALENT
    else:
        conclusion = DIFFERENT if is_different else UNKNOWN
    return Comparison(conclusion=conclusion, difference=fmean(differences), low=low, high=high, tolerance=tolerance)


def _t_test(values: Sequence[float], confidence: float) -> tuple[float | None, float | None, bool]:
    if len(values) < 2:
        return None, None, False
    if stdev(values) == 0:
        mean = fmean(values)
        return mean, mean, mean != 0
    from scipy import stats

    with warnings.catch_warnings():  # the variance of nearly identical values is inexact: close to zero is enough here
        warnings.filterwarnings("ignore", "Precision loss occurred", RuntimeWarning)
        test = stats.ttest_1samp(values, 0.0)
        bounds = test.confidence_interval(confidence)
    return float(bounds.low), float(bounds.high), float(test.pvalue) < 0.05


@dataclass(frozen=True, kw_only=True)
class SeedsResult:
    """The same training with several seeds at each precision."""

    job: Job
    seeds: int
    tolerance: Tolerance
    trainings: tuple[TrialRow, ...]

    def metrics(self, precision: str) -> list[float]:
        """Return the finite metrics of one precision, by seed."""
        return list(self._by_seed(precision).values())

    def _by_seed(self, precision: str) -> dict[int, float]:
        own = sorted((t for t in self.trainings if t.precision == precision), key=lambda training: training.seed or 0)
        return {training.seed or 0: metric for training in own if (metric := training.finite_metric) is not None}

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
        against = compare([own[seed] for seed in both], [reference[seed] for seed in both], tolerance)
        if against.conclusion == EQUIVALENT and not self.has_learned:
            return dataclasses.replace(against, conclusion=NOTHING_LEARNED)
        return against

    @property
    def has_learned(self) -> bool:
        """Whether fp32 lowered its loss with most seeds: models that learn nothing are equal at any precision."""
        learned = [
            result.first_loss - min(last) >= _LEARNED * abs(result.first_loss)
            for training in self.trainings
            if training.precision == REFERENCE
            and (result := training.job_result).first_loss is not None
            and (last := [loss for loss in (result.train_loss, result.eval_loss) if loss is not None])
            and all(map(math.isfinite, (result.first_loss, *last)))
        ]
        return not learned or 2 * sum(learned) > len(learned)

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
