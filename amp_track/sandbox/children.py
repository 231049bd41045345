"""Start, listen to and end a job's fresh processes, which are forked from a server that has imported torch."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import AmpTrackError
from amp_track.records.events import Event
from amp_track.records.inspection import Inspection
from amp_track.records.outcome import Outcome
from amp_track.records.plan import Forecasts, PlanReport
from amp_track.sandbox import ranks
from amp_track.workers import interrupts

SOCKETS_VARIABLE = "AMP_TRACK_SOCKETS"
"""Environment variable that tells the fork server which process has started it, and in which folder its socket lies."""
_ADDR_NO_RANDOMIZE, _NO_CHANGE = 0x0040000, 0xFFFFFFFF
"""Arguments of personality(2), from Linux's sys/personality.h."""
_TRACKING_NICENESS = 10
_EXIT_SECONDS = 10
"""How long a process that has reported may take to exit."""
_CHECK_SECONDS = 1
"""How long a wait may last before it checks for an interrupt: Python may swallow what a signal's handler raises."""
_PEERS_SECONDS = 2
"""How long the others may still report once one has failed: one of them may be the cause."""

_ONE_AT_A_TIME = threading.Lock()
"""Held where a start changes what the whole process shares: its environment, personality and main module."""

Result = Outcome | Inspection | DtypesReport | PlanReport | Forecasts


@dataclass
class Child:
    """A running process of a job, and its result once there is one."""

    process: ForkServerProcess
    connection: Connection[Any, Any]
    result: Result | None = None
    has_died: bool = False
    """Whether it has ended without a result."""

    @property
    def is_over(self) -> bool:
        """True if it has reported or died."""
        return self.result is not None or self.has_died

    def read(self, on_event: Callable[[Event], None]) -> None:
        """Receive one message, or note that it has died. An exception that the process sends is raised."""
        if not self.connection.poll():
            self.has_died = True
            return
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionResetError):
            with interrupts.waiting():
                wait([self.process.sentinel])  # the pipe closes a moment before the process is gone
            self.has_died = True
            return
        match message:
            case Outcome() | Inspection() | DtypesReport() | PlanReport() | Forecasts():
                self.result = message
            case AmpTrackError():
                raise message
            case _:
                on_event(message)


def start_fork_server(environment: Mapping[str, str]) -> None:
    """Start the fork server unless it runs, and do not wait until it has imported torch.

    Args:
        environment: variables that it has besides this process's own.
    """
    environment = {**environment, SOCKETS_VARIABLE: f"{os.getpid()} {util.get_temp_dir()}"}
    with _ONE_AT_A_TIME, _fixed_addresses(), _variables(environment):
        resource_tracker.ensure_running()  # which unblocks signals
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the server ignores it itself
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def stop_fork_server() -> None:
    """Stop the fork server; the next job starts another one. Call it while no process forked from it runs.

    Uses a private method of multiprocessing, whose own tests do the same; without it, this raises AttributeError.
    """
    with _ONE_AT_A_TIME:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


@contextlib.contextmanager
def started(
    context: ForkServerContext,
    target: Callable[..., None],
    *arguments: Any,
    environment: Mapping[str, str],
    steps_back: bool = False,
) -> Iterator[Child]:
    """Start a process that calls `target` with the arguments and its end of a pipe. It does not outlive the block.

    Args:
        context: of multiprocessing.
        target: a function of a module, which the process imports.
        *arguments: pickled.
        environment: of the fork server, should it not run yet; see `start_fork_server`.
        steps_back: lower this process's own priority, which cannot be undone.
    """
    start_fork_server(environment)
    if steps_back:
        _lower_own_priority()
    connection, childs_end = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, childs_end))
    try:  # from the start on: Ctrl-C may come at any moment, and multiprocessing waits at exit for a child that runs
        with _ONE_AT_A_TIME, _no_main_module(), interrupts.waiting():  # seconds, while the server imports torch
            process.start()
        childs_end.close()  # so that the child's death closes the pipe
        child = Child(process, connection)
        yield child
        if child.is_over:
            with interrupts.waiting():
                process.join(_EXIT_SECONDS)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        connection.close()
        childs_end.close()
        process.close()


def listen(children: Sequence[Child], on_event: Callable[[Event], None], deadline: float | None) -> None:
    """Pass on events until the job is decided.

    That is when all processes are over, when one has failed and the others have had time to report, or when the
    deadline has passed.

    Args:
        children: the processes of one job.
        on_event: called with every message that is not a result.
        deadline: a time of `time.monotonic`, in seconds; None for no deadline.

    Raises:
        AmpTrackError: one of the processes sent it: BadInput, or a fork server that is not what it should be.
    """
    while listening := [child for child in children if not child.is_over]:
        left = math.inf if deadline is None else max(deadline - time.monotonic(), 0)
        with interrupts.waiting():
            ends = [end for child in listening for end in (child.connection, child.process.sentinel)]
            ready = wait(ends, min(left, _CHECK_SECONDS))
        if not ready:
            if left > _CHECK_SECONDS:
                continue
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
    """Give programs that are started within the block the same addresses each time.

    Objects are then hashed, sorted and placed alike, and a job takes the same memory in every command: the peak of an
    LSTM's training in 12 commands was the same to the page, and with random addresses differed by up to 0.7 %. Linux
    allows it, but a container may not; then addresses stay random.
    """
    random_addresses = _personality(_NO_CHANGE)
    if random_addresses == -1 or _personality(random_addresses | _ADDR_NO_RANDOMIZE) == -1:
        yield
        return
    try:
        yield
    finally:
        _personality(random_addresses)


def _lower_own_priority() -> None:
    """Lower the priority of this process, which tracks jobs; they keep the one that the fork server was started with.

    A step that computes on every core waits for a core that is taken from it: tracking a tiny MLP on 2 cores took a
    tenth of its speed. At this priority a process still gets about a tenth of a core that is wanted elsewhere.
    """
    if sys.platform != "win32" and os.getpriority(os.PRIO_PROCESS, 0) < _TRACKING_NICENESS:
        os.setpriority(os.PRIO_PROCESS, 0, _TRACKING_NICENESS)


@contextlib.contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a program that is started within the block."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep multiprocessing from importing the parent's main module into processes started within the block.

    A job does not need that module: it costs time, makes the job's memory depend on which program started it, and a
    script without the usual guard would start itself.

    Relies on `multiprocessing.spawn.get_preparation_data` looking it up in `sys.modules`; if that changes, the module
    is imported again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _personality(persona: int) -> int:
    """Call Linux's personality(2), which programs inherit; return -1 on other systems, and if it is refused."""
    if sys.platform != "linux":
        return -1
    return int(ctypes.CDLL(None).personality(ctypes.c_ulong(persona)))
