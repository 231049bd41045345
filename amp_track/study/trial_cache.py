"""What a search knows of the trials of its study: each is looked at until it has ended, and then remembered."""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState


class SoFar:
    """The trials of a study at the last look. A look costs what is new, however many there are."""

    def __init__(self) -> None:
        self._known = 0
        """How many trials there were: numbers are given in order, and none is taken away."""
        self._unfinished: list[FrozenTrial] = []
        self._complete_numbers: list[int] = []
        """Those of `complete`, in order."""
        self._by_params: dict[str, FrozenTrial] = {}
        self.complete: list[FrozenTrial] = []
        """Every finished training, in the order in which they were seen."""

    def look(self, trials: Sequence[FrozenTrial]) -> None:
        """Take in all trials of the study, in their order."""
        new = [*(trials[trial.number] for trial in self._unfinished), *trials[self._known :]]
        self._known = len(trials)
        self._unfinished = [trial for trial in new if not trial.state.is_finished()]
        for trial in new:
            if trial.state is TrialState.COMPLETE:
                self.complete.append(trial)
                bisect.insort(self._complete_numbers, trial.number)
                self._by_params.setdefault(_key(trial.params), trial)

    @property
    def running(self) -> list[FrozenTrial]:
        """The trials that run, in their order."""
        return [trial for trial in self._unfinished if trial.state is TrialState.RUNNING]

    @property
    def begun(self) -> int:
        """How many trials have trained, or train now."""
        return len(self.complete) + len(self.running)

    def begun_before(self, number: int) -> int:
        """Return how many trials with a lower number have trained, or train now."""
        earlier = sum(trial.number < number for trial in self.running)
        return bisect.bisect_left(self._complete_numbers, number) + earlier

    def complete_with(self, params: Mapping[str, Any]) -> FrozenTrial | None:
        """Return a finished training with these params; None if there is none."""
        return self._by_params.get(_key(params))


def _key(params: Mapping[str, Any]) -> str:
    """Return a text that is the same for equal params. Those of a damaged study may hold lists, which have no hash."""
    return json.dumps(params, sort_keys=True)
