"""How long the rest of several trainings takes, for people who watch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta


class Pace:
    """Judges from the trainings that have ended how long the others take: roughly.

    Args:
        deadline: when no more trainings are begun, by the clock.
        clock: returns seconds.
    """

    def __init__(self, deadline: float = math.inf, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline, self._clock = deadline, clock
        self._first: tuple[int, float] | None = None
        """How many were made when the first began here, and when."""

    def next(self, made: int, total: int) -> str:
        """Return where the training that begins now stands: `training 7 of 30, about 0:03:10 left in all`.

        Args:
            made: by all search workers, and by earlier commands.
            total: how many are wanted. No time is given before one has ended since the first began here.
        """
        now = self._clock()
        if self._first is None:
            self._first = made, now
        text = f"training {made + 1} of {total}"
        first, since = self._first
        if made == first or made >= total:
            return text
        left_seconds = min((now - since) / (made - first) * (total - made), max(self._deadline - now, 0))
        return f"{text}, about {timedelta(seconds=round(left_seconds))} left in all"
