"""Start, listen to and end the fresh processes of a job."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Protocol

import psutil

from amp_track.config.inspection import Inspection
from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import AmpTrackError
from amp_track.records.events import Event
from amp_track.records.plan import Forecasts, PlanReport
from amp_track.records.result import JobResult
from amp_track.runner import fork_server, ranks
from amp_track.workers import interrupts

_TRACKING_NICENESS = 10
_EXIT_SECONDS = 10
"""How long a process whose pipe is closed may take to exit; one that holds much memory takes a while."""
_REPORTED_EXIT_SECONDS = 2
"""The same for one that has reported: nothing is lost if it is killed."""
_GONE_SECONDS = 0.05
_CHECK_SECONDS = 1
"""How long a wait may last before it checks for an interrupt: Python may swallow what a signal's handler raises."""
_PEERS_SECONDS = 2
"""How long the others may still report once one has failed: one of them may be the cause."""

Result = JobResult | Inspection | DtypesReport | PlanReport | Forecasts


class Source(Protocol):
    """What reports to this process while a job runs: a process of the job, or another command that has one."""

    result: Result | None
    has_died: bool
    is_waited_for: bool
    """Whether the job goes on until it is over."""

    @property
    def ends(self) -> Sequence[Any]:
        """What becomes ready, for `multiprocessing.connection.wait`, when there is something to read."""

    @property
    def is_over(self) -> bool:
        """True if nothing more comes."""

    def read(self, on_event: Callable[[Event], None]) -> None:
        """Receive one message, if one of its ends is ready. An exception that it sends is raised."""


@dataclass
class Child:
    """A running process of a job, and its result once there is one."""

    process: ForkServerProcess
    connection: Connection[Any, Any]
    result: Result | None = None
    has_died: bool = False
    """Whether it has ended without a result, or can no longer report one."""
    is_waited_for: bool = True

    @property
    def ends(self) -> Sequence[Any]:
        """What becomes ready when it has sent something, or has died."""
        return self.connection, self.process.sentinel

    @property
    def is_over(self) -> bool:
        """True if it has reported or died."""
        return self.result is not None or self.has_died

    @property
    def exit_code(self) -> int | None:
        """The exit code of one that has died, or minus the number of a signal; None if it goes on without its pipe."""
        return None if _is_running(self.process) else self.process.exitcode

    @property
    def has_lost_its_server(self) -> bool:
        """True if it goes on although multiprocessing takes it for dead, since the fork server is."""
        return self.process.exitcode is not None and _is_running(self.process)

    def read(self, on_event: Callable[[Event], None]) -> None:
        """Receive one message, or note that it has died. An exception that the process sends is raised."""
        if not self.connection.poll():
            self.has_died = True
            return
        try:
            with interrupts.waiting():
                message = self.connection.recv()
        except Exception:  # the pipe is closed, in the middle of a message perhaps, or something else was written to it
            with interrupts.waiting():
                wait([self.process.sentinel], _EXIT_SECONDS)  # the pipe closes a moment before the process is gone
            self.has_died = True
            return
        match message:
            case JobResult() | Inspection() | DtypesReport() | PlanReport() | Forecasts():
                self.result = message
            case AmpTrackError():
                raise message
            case _:
                on_event(message)


def _is_running(process: ForkServerProcess) -> bool:
    """Return whether there is such a process, whatever multiprocessing knows of it."""
    assert process.pid is not None
    try:
        return psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def started(
    context: ForkServerContext,
    target: Callable[..., None],
    *arguments: Any,
    environment: Mapping[str, str],
    import_seconds: float | None = None,
    steps_back: bool = False,
    duplex: bool = False,
) -> Iterator[Child]:
    """Start a process that calls `target` with the arguments and its end of a pipe. It does not outlive the block.

    Neither does what it has started, unless that has left its process group.

    Args:
        context: of multiprocessing.
        target: a function of a module, which the process imports.
        *arguments: pickled.
        environment: of the fork server, should it not run yet; see `fork_server.start`.
        import_seconds: how long the fork server's imports may take; None for as long as they do.
        steps_back: lower this process's own priority, which cannot be undone.
        duplex: let this process write to the pipe, too.
    """
    with fork_server.held(environment):  # started at this process's priority so far
        if steps_back:
            _lower_own_priority()
        connection, childs_end = context.Pipe(duplex)
        process = context.Process(target=target, args=(*arguments, childs_end))
        try:  # from the start on: Ctrl-C may come at any time, and multiprocessing waits at exit for a child that runs
            fork_server.start_process(process, environment, import_seconds)
            childs_end.close()  # so that the child's death closes the pipe
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
    """Kill a process, if it runs, and what is left of its group, and wait until it is gone.

    The group bears the process's number, which Linux gives to no other process as long as the group has members.
    """
    if process.pid is None:
        return
    process.kill()  # it may not lead its group yet
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses it where only zombies are left
        os.killpg(process.pid, signal.SIGKILL)
    while True:
        process.join(_EXIT_SECONDS)  # much memory takes a while
        if process.exitcode is not None:
            break
        fork_server.kill_if_stopped()  # it is the server that says whether a process is gone
    while _is_running(process):  # though a server that was killed has not said so
        time.sleep(_GONE_SECONDS)


def listen(sources: Sequence[Source], on_event: Callable[[Event], None], deadline: float | None) -> None:
    """Pass on events until the job is decided.

    That is when all processes are over, when one has failed and the others have had time to report, or when the
    deadline has passed.

    Args:
        sources: the processes of one job, and what else is to be heard meanwhile.
        on_event: called with every message that is not a result.
        deadline: a time of `time.monotonic`, in seconds; None for no deadline.

    Raises:
        AmpTrackError: one of the processes sent it: BadInput, or a fork server that is not what it should be.
    """
    while any(not source.is_over for source in sources if source.is_waited_for):
        listening = [source for source in sources if not source.is_over]
        left = math.inf if deadline is None else max(deadline - time.monotonic(), 0)
        with interrupts.waiting():
            ends = {end for source in listening for end in source.ends}  # ranks of other commands share one
            ready = wait(list(ends), min(left, _CHECK_SECONDS))
        if not ready:
            if left > _CHECK_SECONDS:
                continue
            return
        for source in listening:
            if any(end in ready for end in source.ends):
                source.read(on_event)
        if any(isinstance(source.result, JobResult) and ranks.is_conclusive(source.result) for source in sources):
            return
        if any(each.has_died or (isinstance(each.result, JobResult) and not each.result.fits) for each in sources):
            soon = time.monotonic() + _PEERS_SECONDS
            deadline = soon if deadline is None else min(deadline, soon)


def _lower_own_priority() -> None:
    """Lower the priority of this process, which tracks jobs; they keep the one that the fork server was started with.

    A step that computes on every core waits for a core that is taken from it: tracking a tiny MLP on 2 cores took a
    tenth of its speed. At this priority a process still gets about a tenth of a core that is wanted elsewhere.
    """
    if sys.platform != "win32" and os.getpriority(os.PRIO_PROCESS, 0) < _TRACKING_NICENESS:
        os.setpriority(os.PRIO_PROCESS, 0, _TRACKING_NICENESS)
