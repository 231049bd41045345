"""The fork server: a process that has imported torch, from which those of a job are forked in 50 ms."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerProcess
from types import ModuleType

import psutil

from amp_track.records.errors import AmpTrackError, BadInput
from amp_track.workers import interrupts, processes, programs

SOCKETS_VARIABLE = "AMP_TRACK_SOCKETS"
"""Environment variable that tells the fork server which process has started it, and in which folder its socket lies."""
SAFE_PATH_VARIABLE, SAFE_PATH = "PYTHONSAFEPATH", "amp_track"
"""The variable that keeps Python from importing modules of the working folder, and the value that says who set it."""
_ADDR_NO_RANDOMIZE, _NO_CHANGE = 0x0040000, 0xFFFFFFFF
"""Arguments of personality(2), from Linux's sys/personality.h."""
_SERVERS = 3
"""How many fork servers may die before a job is given up."""
_LONGEST_TMPDIR = 70
"""Linux allows 107 bytes: `/amp_track-xxxxxxxx/listener-xxxxxxxx` takes 37 of them."""

_ONE_AT_A_TIME = threading.Lock()
"""Held where a start changes what the whole process shares: its environment, personality and main module."""


# That it was killed is no news for users, and nothing leaks.
warnings.filterwarnings("ignore", "resource_tracker: process died", UserWarning)


def start(environment: Mapping[str, str]) -> None:
    """Start the fork server unless it runs, in place of one that was killed, and do not wait until it imports torch.

    Args:
        environment: variables that it has besides this process's own.

    Raises:
        BadInput: the temporary folder's path is too long for a socket.
    """
    _keep_sockets_in_scratch_folder()
    with _ONE_AT_A_TIME, _as_a_server_is_started(environment):
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


def stop() -> None:
    """Stop the fork server; the next job starts another one. Call it while no process forked from it runs.

    Uses a private method of multiprocessing, whose own tests do the same; without it, this raises AttributeError.
    """
    with _ONE_AT_A_TIME:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def kill_if_stopped() -> None:
    """Kill the fork server if it has been stopped (SIGSTOP) and so answers nobody; the next job starts another one.

    Uses private names of multiprocessing; without them, this raises AttributeError.
    """
    with _ONE_AT_A_TIME:
        server_pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if server_pid is None:
            return
        try:
            server = psutil.Process(server_pid)
            if server.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return
            server.kill()
        except psutil.NoSuchProcess:
            return
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def start_process(process: ForkServerProcess, environment: Mapping[str, str]) -> None:
    """Start a process from the fork server, or from another one if that has died.

    Raises:
        AmpTrackError: the fork servers die.
    """
    for _ in range(_SERVERS):
        start(environment)
        try:
            # A server that has died since is started once more by this. Else it waits until torch is imported: seconds.
            with _ONE_AT_A_TIME, _as_a_server_is_started(environment), _no_main_module(), interrupts.waiting():
                process.start()
            return
        except (EOFError, ConnectionError):
            stop()
    raise AmpTrackError(
        f"the process that jobs are forked from died {_SERVERS} times before it had imported torch, expected it to "
        "live; look for who kills it (the kernel, if memory is short), and whether `import torch` works"
    )


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
def _as_a_server_is_started(environment: Mapping[str, str]) -> Iterator[None]:
    """Give a server that is started within the block what it needs of this process.

    Args:
        environment: variables that it has besides this process's own.
    """
    environment = {**environment, SOCKETS_VARIABLE: f"{os.getpid()} {util.get_temp_dir()}"}
    if not os.environ.get(SAFE_PATH_VARIABLE):  # else `python -c`, by which it is started, looks in this folder first
        environment[SAFE_PATH_VARIABLE] = SAFE_PATH
    with _fixed_addresses(), programs.variables(environment):
        yield


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
