"""The estimated time that the remaining trainings take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta


class Pace:
    """Estimates the remaining time from the trainings that have ended.

    Args:
        deadline: the time, by `clock`, after which no training starts.
        clock: returns seconds.
    """

    def __init__(self, deadline: float = math.inf, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline, self._clock = deadline, clock
        self._first: tuple[int, float] | None = None
        """The number of finished trainings when the first one started here, and the time."""

    def next(self, made: int, total: int) -> str:
        """Return the position of the next training: `training 7 of 30, about 0:03:10 left`.

        Args:
            made: the trainings finished by all search workers, including earlier commands.
            total: the number of requested trainings. The time is omitted until one has ended since the first call.
        """
        now = self._clock()
        if self._first is None:
            self._first = made, now
        text = f"training {made + 1} of {total}"
        first, since = self._first
        if made == first or made >= total:
            return text
        left_seconds = min((now - since) / (made - first) * (total - made), max(self._deadline - now, 0))
        return f"{text}, about {timedelta(seconds=round(left_seconds))} left"
