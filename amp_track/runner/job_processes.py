"""Start the fresh processes of a job, read their messages, and end them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from amp_track.config.inspection import Inspection
from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import AmpTrackError
from amp_track.records.events import Event
from amp_track.records.plan import ForecastTraces, PlanReport
from amp_track.records.result import JobResult
from amp_track.runner import fork_server, process_setup, ranks
from amp_track.workers import interrupts, liveness

_TRACKING_NICENESS = 10
_EXIT_SECONDS = 10
"""Time limit for the exit of a process whose pipe is closed. Freeing much memory takes a while."""
_REPORTED_EXIT_SECONDS = 2
"""Time limit for the exit of a process that has reported its result. Killing it then loses nothing."""
IMPORT_SECONDS = 120.0
"""Time limit for the workload's imports in the fork server. After it, each job runs them."""
_GONE_SECONDS = 0.05
_CHECK_SECONDS = 1
"""The longest wait before a check for interrupts: Python may swallow an exception raised in a signal handler."""
_PEERS_SECONDS = 2
"""How long other ranks may still report after one has failed: one of them may be the cause."""
Result = JobResult | Inspection | DtypesReport | PlanReport | ForecastTraces


class Source(ABC):
    """A sender of messages while a job runs: a job process, or the commands of other ranks."""

    results: Sequence[Result | None] = ()
    has_died = False
    """True if a job process ended without a result, or can no longer report one."""
    is_waited_for = True
    """True if the job waits until this source is over."""

    @property
    @abstractmethod
    def ends(self) -> Sequence[Any]:
        """Handles for `multiprocessing.connection.wait` that become ready when there is something to read."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """True if no more messages come."""

    @abstractmethod
    def read(self, on_event: Callable[[Event], None]) -> None:
        """Receive one message after one of `ends` became ready. Raise an exception that the source sends."""


class Child(Source):
    """A running job process, and its result if it has reported one."""

    result: Result | None = None

    def __init__(self, process: ForkServerProcess, connection: Connection[Any, Any]) -> None:
        self.process = process
        self.connection = connection

    @property
    def results(self) -> Sequence[Result | None]:  # type: ignore[override]
        return (self.result,)

    @property
    def ends(self) -> Sequence[Any]:
        return self.connection, self.process.sentinel

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.has_died

    @property
    def exit_code(self) -> int | None:
        """The exit code, or the negative number of a signal; None if the process still runs without its pipe."""
        return None if _is_running(self.process) else self.process.exitcode

    @property
    def has_lost_its_server(self) -> bool:
        """True if it still runs although multiprocessing considers it dead, because the fork server is."""
        return self.process.exitcode is not None and _is_running(self.process)

    def read(self, on_event: Callable[[Event], None]) -> None:
        if not self.connection.poll():
            self.has_died = True
            return
        try:
            with interrupts.waiting():
                message = self.connection.recv()
        except Exception:  # the pipe was closed, perhaps within a message, or other data was written to it
            with interrupts.waiting():
                wait([self.process.sentinel], _EXIT_SECONDS)  # the pipe closes a moment before the process ends
            self.has_died = True
            return
        if isinstance(message, Result):
            self.result = message
        elif isinstance(message, AmpTrackError):
            raise message
        else:
            on_event(message)


def _is_running(process: ForkServerProcess) -> bool:
    """Return whether the process runs. multiprocessing does not know if the fork server died."""
    assert process.pid is not None
    return liveness.running(process.pid) is not None


@contextlib.contextmanager
def started(setup: fork_server.Setup, *arguments: Any, steps_back: bool = False) -> Iterator[Child]:
    """Start a process with the arguments of `process_setup.main`, and kill it at the end of the block.

    Its children are killed with it, unless they have left its process group. `steps_back` lowers the priority of this
    process, which cannot be undone.
    """
    with fork_server.held(setup):  # before the priority is lowered, which the fork server would inherit
        if steps_back:
            _lower_own_priority()
        connection, childs_end = fork_server.CONTEXT.Pipe(duplex=False)
        process = fork_server.CONTEXT.Process(target=process_setup.main, args=(*arguments, childs_end))
        try:  # includes the start: after Ctrl-C, multiprocessing waits at exit for a child that runs
            fork_server.start_process(process, setup, IMPORT_SECONDS)
            childs_end.close()  # so that the pipe closes when the child dies
            child = Child(process, connection)
            yield child
            if child.is_over:
                with interrupts.waiting():
                    process.join(_REPORTED_EXIT_SECONDS)
        finally:
            _kill(process)
            connection.close()
            childs_end.close()
            process.close()


def _kill(process: ForkServerProcess) -> None:
    """Kill a process and the rest of its group, and wait until the process has ended.

    The group has the id of the process. Linux does not reuse the id while the group has members.
    """
    if process.pid is None:
        return
    process.kill()  # it may not lead its group yet
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS denies it for a group of zombies
        os.killpg(process.pid, signal.SIGKILL)
    while process.exitcode is None:
        process.join(_EXIT_SECONDS)  # freeing much memory takes a while
        if process.exitcode is None:
            fork_server.kill_if_stopped()  # the fork server reports the exit code
    while _is_running(process):  # a killed fork server reports an exit code too early
        time.sleep(_GONE_SECONDS)


def listen(sources: Sequence[Source], on_event: Callable[[Event], None], deadline: float) -> None:
    """Read the messages of a job's sources until its status is known. Raise an AmpTrackError that one of them sends.

    That is when all processes have ended, when one failed and the others have had time to report, or at the deadline,
    a time of `time.monotonic`. `on_event` is called with every message that is not a result.
    """
    while any(not source.is_over for source in sources if source.is_waited_for):
        listening = [source for source in sources if not source.is_over]
        left = max(deadline - time.monotonic(), 0)
        with interrupts.waiting():
            ready = wait([end for source in listening for end in source.ends], min(left, _CHECK_SECONDS))
        if not ready:
            if left > _CHECK_SECONDS:
                continue
            return
        for source in listening:
            if any(end in ready for end in source.ends):
                source.read(on_event)
        results = [result for source in sources for result in source.results if isinstance(result, JobResult)]
        if any(map(ranks.is_conclusive, results)):
            return
        if any(source.has_died for source in sources) or not all(result.fits for result in results):
            deadline = min(deadline, time.monotonic() + _PEERS_SECONDS)


def _lower_own_priority() -> None:
    """Lower the priority of this process, which tracks jobs. The jobs keep the priority of the fork server.

    A step that computes on every core waits for each of them: tracking slowed a tiny MLP on 2 cores by a tenth. At this
    priority the process still gets about a tenth of a busy core.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) < _TRACKING_NICENESS:
        os.setpriority(os.PRIO_PROCESS, 0, _TRACKING_NICENESS)
