"""Run TPE in constant time: it uses only the hundred most informative trials."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from amp_track.study.trial_cache import SoFar

_MOST_TRIALS = 100
"""With all trials, a proposal of two params took 14 ms for 100, 0.1 s for 1,000, 0.4 s for 10,000 (AMD EPYC, n=3)."""
_RUNNING, _OF_EACH_OBJECTIVE = 40, 20
"""The newest running trials, and the best of each objective. TPE considers at most 25 trials good."""


class BoundedTPE(BaseSampler):
    """Optuna's TPE on a hundred trials: forty running ones, the twenty best of each objective, and the newest.

    Args:
        seed: the seed of the draws.
        looks_at: the trials to use, from `TellingTrials`; None for all of the study.
    """

    def __init__(self, *, seed: int, looks_at: Sequence[FrozenTrial] | None) -> None:
        self._tpe = TPESampler(seed=seed)
        self._looks_at = looks_at
        self._looked_at: optuna.Study | None = None
        """An in-memory study of these trials, shared by all params of a trial."""

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return nothing: params are drawn independently, because the range of one depends on another."""
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return nothing: params are drawn independently."""
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw a param of one trial."""
        if self._looks_at is not None and self._looked_at is None:
            self._looked_at = optuna.create_study(directions=study.directions, storage=_OfTheseTrials(self._looks_at))
        return self._tpe.sample_independent(self._looked_at or study, trial, param_name, param_distribution)


class TellingTrials:
    """Chooses the trials that TPE uses. Each finished trial is read only once.

    Args:
        directions: the directions of the study's objectives.
        so_far: the trials of the study at the last look.
    """

    def __init__(self, directions: Sequence[StudyDirection], so_far: SoFar) -> None:
        self._directions, self._so_far = directions, so_far
        self._looked_at = 0
        """Number of finished trials that have been read."""
        self._finished = 0
        """Number of these that have values."""
        self._telling: list[FrozenTrial] = []
        """The best and the newest of these, in order: only they can still be among the hundred."""

    def beside(self, drawn: int) -> list[FrozenTrial] | None:
        """Return the hundred most informative trials; None if the study has no more than that.

        Args:
            drawn: the number of the trial that is being drawn, which is left out.
        """
        complete = self._so_far.complete
        finished = [trial for trial in complete[self._looked_at :] if self._has_values(trial)]
        self._looked_at = len(complete)
        self._finished += len(finished)
        telling = _in_order([*self._telling, *finished])
        self._telling = _in_order([*_best(telling, self._directions), *telling[-_MOST_TRIALS:]])
        running = [trial for trial in self._so_far.running if trial.number != drawn]
        if self._finished + len(running) <= _MOST_TRIALS:
            return None
        return which_say_most(_in_order([*self._telling, *running]), self._directions)

    def _has_values(self, trial: FrozenTrial) -> bool:
        """Return False for a trial of a damaged database, which is reported when its result is read."""
        return trial.values is not None and len(trial.values) == len(self._directions)


class _OfTheseTrials(InMemoryStorage):
    """A storage of one study with these trials. `add_trials` would copy them and their attributes."""

    def __init__(self, trials: Sequence[FrozenTrial]) -> None:
        super().__init__()
        self._trials = trials

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        return [trial for trial in self._trials if states is None or trial.state in states]


def which_say_most(trials: Sequence[FrozenTrial], directions: Sequence[StudyDirection]) -> list[FrozenTrial]:
    """Return a hundred of the finished and running trials, in order."""
    finished = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    running = [trial for trial in trials if trial.state is TrialState.RUNNING]
    chosen = {trial.number: trial for trial in [*running[-_RUNNING:], *_best(finished, directions)]}
    for trial in reversed(finished):
        if len(chosen) >= _MOST_TRIALS:
            break
        chosen[trial.number] = trial
    return _in_order(chosen.values())


def _best(finished: Sequence[FrozenTrial], directions: Sequence[StudyDirection]) -> list[FrozenTrial]:
    """Return the best trials of each objective, the first among equal ones. May contain a trial twice."""
    values, best = [trial.values for trial in finished], []
    for index, direction in enumerate(directions):
        of_objective = [each[index] for each in values]
        first = heapq.nlargest if direction is StudyDirection.MAXIMIZE else heapq.nsmallest
        best += [
            finished[place] for place in first(_OF_EACH_OBJECTIVE, range(len(values)), key=of_objective.__getitem__)
        ]
    return best


def _in_order(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials ordered by number, without duplicates."""
    by_number = {trial.number: trial for trial in trials}
    return [by_number[number] for number in sorted(by_number)]
