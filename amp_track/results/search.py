"""The result of `search`: the max batch of each precision, and trainings within it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amp_track.config.values import Tolerance
from amp_track.results import Shown
from amp_track.results.equivalence import SeedsResult
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.trial_row import TrialRow

if TYPE_CHECKING:
    from amp_track.results.recommendation import Recommendation


@dataclass(frozen=True, kw_only=True)
class SearchResult(Shown):
    """The max batches, the trainings within them, and the trial numbers on the Pareto front of metric and speed."""

    limits: MaxBatchResult
    metric_name: str
    higher_is_better: bool
    workload_batch_size: int
    """The batch size for which the workload's learning rate was chosen."""
    trials: tuple[TrialRow, ...]
    pareto: tuple[int, ...]
    trials_wanted: int = 0
    """The number of requested trainings; fewer may have run within the time limit."""
    seeds: SeedsResult | None = None
    seeds_wanted: int = 1
    tolerance: Tolerance = Tolerance(fraction=0.01)
    """The difference in the metric that does not matter."""
    report: str = ""

    @property
    def study(self) -> str:
        return self.limits.study

    @property
    def run_id(self) -> str:
        return self.limits.run_id

    @property
    def experiment_id(self) -> str:
        return self.limits.experiment_id

    @property
    def max_batch(self) -> dict[str, int]:
        """The max batch by precision, for precisions at which at least one sample fits."""
        return self.limits.max_batch

    @property
    def recommended(self) -> Recommendation | None:
        """The recommended training; None if nothing fits or every training diverged."""
        from amp_track.results.recommendation import recommend  # which imports this module

        return recommend(self)

    def trained(self, precision: str) -> list[TrialRow]:
        """Return the trainings of a precision that fit."""
        return [trial for trial in self.trials if trial.precision == precision and trial.job_result.fits]

    def best(self, precision: str, batch_size: int | None = None) -> TrialRow | None:
        """Return the training of a precision, or at one batch, with the best metric; None if none has a finite one."""
        choose = max if self.higher_is_better else min
        rated = [
            (metric, trial)
            for trial in self.trained(precision)
            if batch_size in (None, trial.batch_size) and (metric := trial.finite_metric) is not None
        ]
        return choose(rated, key=lambda each: each[0])[1] if rated else None

    def as_json(self) -> dict[str, Any]:
        fitted = self.limits.as_json()
        del fitted["report"]
        return fitted | {
            "recommended": recommended.as_json() if (recommended := self.recommended) is not None else None,
            "trials": [trial.as_json() for trial in self.trials],
            "trials_wanted": self.trials_wanted,
            "pareto": list(self.pareto),
            "report": self.report,
            "seeds": self.seeds.as_json() if self.seeds is not None else None,
        }
