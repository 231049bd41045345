"""Fresh processes, forked from a server that has imported torch: started, listened to, ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import BadInput
from amp_track.records.events import Event
from amp_track.records.inspection import Inspection
from amp_track.records.outcome import Outcome
from amp_track.sandbox import ranks

_ADDR_NO_RANDOMIZE, _NO_CHANGE = 0x0040000, 0xFFFFFFFF
"""Of Linux's sys/personality.h."""
_TRACKING_NICENESS = 10
_EXIT_SECONDS = 10
"""How long a child that has reported may take to exit."""
_PEERS_SECONDS = 2
"""How long the others may still say something once one has failed: it may have failed because of one of them."""

Result = Outcome | Inspection | DtypesReport


@dataclass
class Child:
    """A process at work, and what it has come to."""

    process: ForkServerProcess
    connection: Connection[Any, Any]
    result: Result | None = None
    has_died: bool = False
    """Without a result."""

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.has_died

    def read(self, on_event: Callable[[Event], None]) -> None:
        """Take one message, or note its death."""
        if not self.connection.poll():
            self.has_died = True
            return
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionResetError):
            wait([self.process.sentinel])  # the pipe closes a moment before the process is gone
            self.has_died = True
            return
        match message:
            case Outcome() | Inspection() | DtypesReport():
                self.result = message
            case BadInput():
                raise message
            case _:
                on_event(message)


@contextlib.contextmanager
def started(context: ForkServerContext, target: Callable[..., None], *arguments: Any) -> Iterator[Child]:
    """A process that calls `target` with the arguments and its end of a pipe; it does not outlive the block."""
    with _fixed_addresses():
        forkserver.ensure_running()
    _let_jobs_go_first()
    connection, childs_end = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, childs_end))
    with _no_main_module():
        process.start()
    childs_end.close()  # so that the child's death closes the pipe
    child = Child(process, connection)
    try:
        yield child
        if child.is_over:
            process.join(_EXIT_SECONDS)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        connection.close()
        process.close()


def listen(children: Sequence[Child], on_event: Callable[[Event], None], deadline: float | None) -> None:
    """Pass events on until all are over, one has failed and the others had their time to, or the deadline has passed.

    Args:
        children: that work together.
        on_event: called with what they say, but for results.
        deadline: by `time.monotonic`.
    """
    while listening := [child for child in children if not child.is_over]:
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        ready = wait([end for child in listening for end in (child.connection, child.process.sentinel)], left)
        if not ready:
            return
        for child in listening:
            if child.connection in ready or child.process.sentinel in ready:
                child.read(on_event)
        if any(isinstance(child.result, Outcome) and ranks.is_conclusive(child.result) for child in children):
            return
        if any(child.has_died or (isinstance(child.result, Outcome) and not child.result.fits) for child in children):
            soon = time.monotonic() + _PEERS_SECONDS
            deadline = soon if deadline is None else min(deadline, soon)


@contextlib.contextmanager
def _fixed_addresses() -> Iterator[None]:
    """Programs started within get the same addresses each time, where Linux allows to ask for it (containers may not).

    Objects are then hashed, sorted and placed alike, and a job takes the same memory in every command: the peak of an
    LSTM's training in 12 commands was the same to the page, and with random addresses differed by up to 0.7 %.
    """
    random_addresses = _personality(_NO_CHANGE)
    if random_addresses == -1 or _personality(random_addresses | _ADDR_NO_RANDOMIZE) == -1:
        yield
        return
    try:
        yield
    finally:
        _personality(random_addresses)


def _let_jobs_go_first() -> None:
    """Jobs keep the priority that the fork server was started with; this process, which tracks them, steps back. A step
    that computes on every core waits for the one that is taken from it: tracking a tiny MLP on 2 cores took a tenth of
    its speed. At this priority a process still gets about a tenth of a core that is wanted elsewhere.
    """
    if sys.platform != "win32" and os.getpriority(os.PRIO_PROCESS, 0) < _TRACKING_NICENESS:
        os.setpriority(os.PRIO_PROCESS, 0, _TRACKING_NICENESS)


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """multiprocessing imports the parent's main module into each child. A job does not need it: it costs time, makes
    the job's memory depend on which program started it, and a script without the usual guard would start itself.

    Relies on `multiprocessing.spawn.get_preparation_data` looking it up in `sys.modules`; else it is imported again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _personality(persona: int) -> int:
    """Linux's personality(2), which a program passes on to those it starts; -1 where there is none."""
    if sys.platform != "linux":
        return -1
    return int(ctypes.CDLL(None).personality(ctypes.c_ulong(persona)))
