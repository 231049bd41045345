"""Raise Ctrl-C and SIGTERM where nothing is half written.

KeyboardInterrupt at any line of MLflow, Optuna and SQLAlchemy ends badly. Of 270 searches on a simulated device that
were interrupted at a random moment, 56 did: 19 left a trial or a run RUNNING, 10 ended with a traceback, 13 hung with a
database locked, and 14 never noticed, because Python swallows an exception raised in a callback of its garbage
collector. tests/integration/test_interrupts.py repeats it: raised only while a command waits, it ends all of them well.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from amp_track.records.errors import INTERRUPTED_EXIT_CODE

_AT_ONCE = 3
"""At this signal nothing is waited for any more. At the second, people are told."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Deferral:
    """Signals received within one `deferred` block."""

    def __init__(self, *, owns_process: bool) -> None:
        self._owns_process = owns_process
        self._received = 0
        self._is_raised = False
        self._waiting = False
        self._handlers: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Replace the handlers that raise. A signal that is ignored, as under nohup, or that kills, stays so."""
        for number in _SIGNALS:
            if callable(handler := signal.getsignal(number)):
                self._handlers[number] = handler
                signal.signal(number, self._receive)

    def remove(self) -> None:
        """Put back the handlers that were replaced."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let signals raise at once within the block; raise here if one has been received before."""
        self._waiting = True
        try:
            self.check()
            yield
        except KeyboardInterrupt:
            self._is_raised = True
            raise
        else:
            self.check()  # it may have been swallowed
        finally:
            self._waiting = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has been received and not been raised yet."""
        if self._received and not self._is_raised:
            self._is_raised = True
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received += 1
        if self._received >= _AT_ONCE:
            if self._owns_process:
                os._exit(INTERRUPTED_EXIT_CODE)  # the job's processes end with this one
            self._handlers[signal.Signals(number)](number, frame)
        elif self._waiting and not self._is_raised:
            raise KeyboardInterrupt  # not noted as raised: should it be swallowed, the next check raises it again
        elif self._received == _AT_ONCE - 1 and self._owns_process:
            os.write(2, b"amp-track: ending its runs; once more stops at once and leaves that to the next start\n")


_current: _Deferral | None = None


@contextmanager
def deferred(*, owns_process: bool) -> Iterator[None]:
    """Raise KeyboardInterrupt only in `waiting` blocks, at `check`, and at the end of the block.

    Args:
        owns_process: whether the third signal may end the process; else it raises wherever it comes.
    """
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    _current = _Deferral(owns_process=owns_process)
    try:
        _current.install()
        yield
        _current.check()
    finally:
        _current.remove()
        _current = None


@contextmanager
def waiting() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM raise at once within the block, which writes nothing."""
    if _is_deferred():
        assert _current is not None
        with _current.waiting():
            yield
    else:
        yield


def sleep(seconds: float) -> None:
    """Sleep, unless Ctrl-C or SIGTERM comes."""
    with waiting():
        time.sleep(seconds)


def check() -> None:
    """Raise KeyboardInterrupt if Ctrl-C or SIGTERM came since the last check."""
    if _is_deferred():
        assert _current is not None
        _current.check()


def _is_deferred() -> bool:
    return _current is not None and threading.current_thread() is threading.main_thread()
