"""Cache the trials of a search: each is read until it has ended, and then kept."""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState


class SoFar:
    """The trials of a study at the last look. The cost of a look depends only on the number of new trials."""

    def __init__(self) -> None:
        self._known = 0
        """Number of trials at the last look: numbers are consecutive, and trials are never deleted."""
        self._unfinished: list[FrozenTrial] = []
        self._complete_numbers: list[int] = []
        """The numbers of `complete`, sorted."""
        self._by_params: dict[str, FrozenTrial] = {}
        self.complete: list[FrozenTrial] = []
        """Every COMPLETE trial, in the order in which they were seen."""

    def look(self, trials: Sequence[FrozenTrial]) -> None:
        """Update from all trials of the study, ordered by number."""
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
        """The RUNNING trials, ordered by number."""
        return [trial for trial in self._unfinished if trial.state is TrialState.RUNNING]

    @property
    def begun(self) -> int:
        """Number of COMPLETE and RUNNING trials."""
        return len(self.complete) + len(self.running)

    def begun_before(self, number: int) -> int:
        """Return the number of COMPLETE and RUNNING trials with a lower number."""
        earlier = sum(trial.number < number for trial in self.running)
        return bisect.bisect_left(self._complete_numbers, number) + earlier

    def complete_with(self, params: Mapping[str, Any]) -> FrozenTrial | None:
        """Return a COMPLETE trial with these params, or None."""
        return self._by_params.get(_key(params))


def _key(params: Mapping[str, Any]) -> str:
    """Return a key that is equal for equal params. In a damaged study they may be lists, which have no hash."""
    return json.dumps(params, sort_keys=True)
