"""Decide whether another process is alive by watching its heartbeat counter."""

from __future__ import annotations

import time

_LONGEST_LOOK_SECONDS = 2.0


class Silence:
    """The time for which a value has not changed, measured by this process's clock.

    At most two seconds count between two calls, because this process itself may have been stopped.
    """

    def __init__(self) -> None:
        self._value: object = None
        self._seconds = 0.0
        self._looked_at = time.monotonic()

    def seconds(self, value: object) -> float:
        """Return the number of seconds without a change of the value."""
        now = time.monotonic()
        if value != self._value:
            self._value, self._seconds = value, 0.0
        else:
            self._seconds += min(now - self._looked_at, _LONGEST_LOOK_SECONDS)
        self._looked_at = now
        return self._seconds
