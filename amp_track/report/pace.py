"""How long the rest of several trainings takes, for people who watch."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta


class Pace:
    """Counts trainings, and judges from those that have ended how long the others take: roughly.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_seconds = clock()
        self._begun = 0

    def next(self, number: int, total: int) -> str:
        """Return where the training that begins now stands: `training 7 of 30, about 0:03:10 left in all`.

        Args:
            number: of this training, from 1; an earlier command may have made those before it.
            total: how many are wanted. No time is given without a training that has ended, nor beyond the last.
        """
        ended, self._begun = self._begun, self._begun + 1
        text = f"training {number} of {total}"
        if not ended or number > total:
            return text
        left_seconds = (self._clock() - self._start_seconds) / ended * (total - number + 1)
        return f"{text}, about {timedelta(seconds=round(left_seconds))} left in all"
