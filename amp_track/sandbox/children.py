"""Start, listen to and end a job's fresh processes, which are forked from a server that has imported torch."""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

import psutil

from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import AmpTrackError, BadInput
from amp_track.records.events import Event
from amp_track.records.inspection import Inspection
from amp_track.records.outcome import Outcome
from amp_track.records.plan import Forecasts, PlanReport
from amp_track.sandbox import ranks
from amp_track.workers import interrupts, processes

SOCKETS_VARIABLE = "AMP_TRACK_SOCKETS"
"""Environment variable that tells the fork server which process has started it, and in which folder its socket lies."""
_ADDR_NO_RANDOMIZE, _NO_CHANGE = 0x0040000, 0xFFFFFFFF
"""Arguments of personality(2), from Linux's sys/personality.h."""
_TRACKING_NICENESS = 10
_EXIT_SECONDS = 10
"""How long a process whose pipe is closed may take to exit; one that holds much memory takes a while."""
_REPORTED_EXIT_SECONDS = 2
"""The same for one that has reported: nothing is lost if it is killed."""
_SERVERS = 3
"""How many fork servers may die before a job is given up."""
_LONGEST_TMPDIR = 70
"""Linux allows 107 bytes: `/amp_track-xxxxxxxx/listener-xxxxxxxx` takes 37 of them."""
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
    """Whether it has ended without a result, or can no longer report one."""

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
            case Outcome() | Inspection() | DtypesReport() | PlanReport() | Forecasts():
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


def start_fork_server(environment: Mapping[str, str]) -> None:
    """Start the fork server unless it runs, in place of one that was killed, and do not wait until it imports torch.

    Args:
        environment: variables that it has besides this process's own.

    Raises:
        BadInput: the temporary folder's path is too long for a socket.
    """
    _keep_sockets_in_scratch_folder()
    environment = {**environment, SOCKETS_VARIABLE: f"{os.getpid()} {util.get_temp_dir()}"}
    with _ONE_AT_A_TIME, _fixed_addresses(), _variables(environment):
        resource_tracker.ensure_running()  # which unblocks signals
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the server ignores it itself
        try:
            forkserver.ensure_running()
        except OSError as error:
            if "AF_UNIX path too long" not in str(error):
                raise
            raise BadInput(
                f"TMPDIR: got {tempfile.gettempdir()}, expected a path of at most {_LONGEST_TMPDIR} characters, so "
                "that a socket can lie there; set a shorter one"
            ) from error
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

    Neither does what it has started, unless that has left its process group.

    Args:
        context: of multiprocessing.
        target: a function of a module, which the process imports.
        *arguments: pickled.
        environment: of the fork server, should it not run yet; see `start_fork_server`.
        steps_back: lower this process's own priority, which cannot be undone.
    """
    start_fork_server(environment)  # at this process's priority so far
    if steps_back:
        _lower_own_priority()
    connection, childs_end = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, childs_end))
    try:  # from the start on: Ctrl-C may come at any moment, and multiprocessing waits at exit for a child that runs
        _start(process, environment)
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


def _start(process: ForkServerProcess, environment: Mapping[str, str]) -> None:
    """Start a process from the fork server, or from another one if that has died.

    Raises:
        AmpTrackError: the fork servers die.
    """
    for _ in range(_SERVERS):
        start_fork_server(environment)
        try:
            with _ONE_AT_A_TIME, _no_main_module(), interrupts.waiting():  # seconds, while the server imports torch
                process.start()
            return
        except (EOFError, ConnectionError):
            stop_fork_server()
    raise AmpTrackError(
        f"the process that jobs are forked from died {_SERVERS} times before it had imported torch, expected it to "
        "live; look for who kills it (the kernel, if memory is short), and whether `import torch` works"
    )


def _kill(process: ForkServerProcess) -> None:
    """Kill a process, if it runs, and what is left of its group, and wait until it is gone.

    The group bears the process's number, which Linux gives to no other process as long as the group has members.
    """
    if process.pid is None:
        return
    process.kill()  # it may not lead its group yet
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses it where only zombies are left
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


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


def _keep_sockets_in_scratch_folder() -> None:
    """Make multiprocessing put the fork server's socket where it is deleted even if this process is killed.

    It makes a folder in its own way, which then stays for ever, unless a private field of the current process names
    one. If that changes, it makes its own again.
    """
    configuration = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in configuration:
        folder = contextlib.ExitStack()
        configuration["tempdir"] = str(folder.enter_context(processes.scratch_folder()))
        util.Finalize(None, folder.close, exitpriority=-100)  # as late as multiprocessing deletes its own


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
