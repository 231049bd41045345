"""The same training at every precision with several seeds."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from amp_track.records.job import Job
from amp_track.records.outcome import Outcome
from amp_track.records.values import PRECISIONS, Margin
from amp_track.results.equivalence import Comparison, Interval, compare, interval


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """One training of a comparison over seeds."""

    precision: str
    seed: int
    outcome: Outcome
    run_id: str


@dataclass(frozen=True, kw_only=True)
class SeedsResult:
    """The same training at every precision with several seeds."""

    job: Job
    seeds: int
    margin: Margin
    trainings: tuple[SeedResult, ...]

    def qualities(self, precision: str) -> list[float]:
        """Of the trainings that came to one, by seed."""
        return list(self._by_seed(precision).values())

    def _by_seed(self, precision: str) -> dict[int, float]:
        found = sorted((t for t in self.trainings if t.precision == precision), key=lambda training: training.seed)
        return {
            training.seed: training.outcome.quality
            for training in found
            if training.outcome.quality is not None and math.isfinite(training.outcome.quality)
        }

    def without_quality(self, precision: str) -> int:
        """How many came to none: they diverged, or did not end."""
        return sum(t.precision == precision for t in self.trainings) - len(self.qualities(precision))

    @property
    def precisions(self) -> list[str]:
        there = {training.precision for training in self.trainings}
        return [precision for precision in PRECISIONS if precision in there]

    def interval(self, precision: str) -> Interval | None:
        qualities = self.qualities(precision)
        return interval(qualities) if qualities else None

    def comparison(self, precision: str) -> Comparison | None:
        """With fp32; None for itself, or where one of the two has no quality."""
        reference, found = self._by_seed("fp32"), self._by_seed(precision)
        both = [seed for seed in found if seed in reference]
        if precision == "fp32" or not both:
            return None
        margin = self.margin.of(fmean(reference.values()))
        return compare([found[seed] for seed in both], [reference[seed] for seed in both], margin)

    def as_json(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "margin": str(self.margin),
            "batch_size": self.job.batch_size,
            "precisions": {
                name: {
                    "values": self.qualities(name),
                    "without_quality": self.without_quality(name),
                    "interval": (found := self.interval(name)) and dataclasses.asdict(found),
                    "against_fp32": (against := self.comparison(name)) and dataclasses.asdict(against),
                    "run_ids": [t.run_id for t in self.trainings if t.precision == name],
                }
                for name in self.precisions
            },
        }
