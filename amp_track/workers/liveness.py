"""Whether another process is alive, by a counter that it increments."""

from __future__ import annotations

import time

_LONGEST_LOOK_SECONDS = 2.0


class Silence:
    """How long a value has not changed, by this process's own clock.

    Of the time between two looks only two seconds count: this process itself may have been stopped meanwhile.
    """

    def __init__(self) -> None:
        self._value: object = None
        self._seconds = 0.0
        self._looked_at = time.monotonic()

    def seconds(self, value: object) -> float:
        """Return for how many seconds the value has been the same."""
        now = time.monotonic()
        if value != self._value:
            self._value, self._seconds = value, 0.0
        else:
            self._seconds += min(now - self._looked_at, _LONGEST_LOOK_SECONDS)
        self._looked_at = now
        return self._seconds
