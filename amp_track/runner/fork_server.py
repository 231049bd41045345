"""Control the fork server: a process that has imported torch, from which a job process is forked in 50 ms."""

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
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType

import psutil

from amp_track.records.errors import AmpTrackError, BadInput
from amp_track.runner import leading_imports
from amp_track.workers import interrupts, processes

SOCKETS_VARIABLE = "AMP_TRACK_SOCKETS"
"""Environment variable that passes to the fork server the process that started it and the folder of its socket."""
SELF_CONTAINED_VARIABLE = "AMP_TRACK_SELF_CONTAINED"
"""Set for a workload that imports nothing else, so that a server with more imports may serve it."""
PRELOAD_VARIABLE = "AMP_TRACK_PRELOAD"
"""Environment variable that passes the leading import statements of the workload to the fork server, one per line."""
PACKAGE_FOLDER = str(Path(__file__).parents[2])
"""The folder of this package, first on the path of the server: `mlflow run` starts a command in the project folder
while the environment may contain another copy, which jobs would run instead."""
SAFE_PATH_VARIABLE, SAFE_PATH = "PYTHONSAFEPATH", "amp_track"
"""The variable that keeps the working folder off Python's path, and the value that marks it as set by amp_track."""
_ADDR_NO_RANDOMIZE, _NO_CHANGE = 0x0040000, 0xFFFFFFFF
"""Arguments of personality(2), from Linux's sys/personality.h."""
_SERVERS = 3
"""A job fails after this many fork servers have died."""
_LONGEST_TMPDIR = 70
"""Linux allows 107 bytes for a socket path; `/amp_track-xxxxxxxx/listener-xxxxxxxx` uses 37 of them."""

_ONE_AT_A_TIME = threading.Condition()
"""Held while a start changes the environment, personality and main module, which all threads share."""


class ImportsTakeTooLong(Exception):
    """A fork server did not finish its imports in time and was killed."""


@dataclass
class _Server:
    """The fork server that this module started last."""

    pid: int | None = None
    preload: str = ""
    """Its import statements."""
    users: int = 0
    """The number of `held` blocks that use it."""


_server = _Server()


# The user does not need to know that the tracker was killed; nothing leaks.
warnings.filterwarnings("ignore", "resource_tracker: process died", UserWarning)


def start(environment: Mapping[str, str]) -> None:
    """Start the fork server unless it runs. Do not wait for its imports.

    A running server whose imports may change the behavior of this workload is replaced, after its processes have ended.

    Args:
        environment: additional variables of the server.

    Raises:
        BadInput: the path of the temporary folder is too long for a socket.
    """
    _keep_sockets_in_scratch_folder()
    preload = environment.get(PRELOAD_VARIABLE, "")
    with _ONE_AT_A_TIME:
        is_ours = _server.pid is not None and _server.pid == _pid()
        running, wanted = _server.preload.splitlines(), preload.splitlines()
        is_self_contained = bool(environment.get(SELF_CONTAINED_VARIABLE))
        if is_ours and not leading_imports.may_share_server(running, wanted, is_self_contained=is_self_contained):
            with interrupts.waiting():
                _ONE_AT_A_TIME.wait_for(lambda: _server.users == 0)
            stop()
        before = _pid()
        _ensure_running(environment)
        _note_server(before, preload)


@contextlib.contextmanager
def held(environment: Mapping[str, str]) -> Iterator[None]:
    """Start the fork server as `start` does, and keep other workloads from replacing it within the block."""
    with _ONE_AT_A_TIME:
        start(environment)
        _server.users += 1
    try:
        yield
    finally:
        with _ONE_AT_A_TIME:
            _server.users -= 1
            _ONE_AT_A_TIME.notify_all()


def _note_server(before: int | None, preload: str) -> None:
    """Record the imports of the running server if it is a new one."""
    if _pid() != before:
        _server.pid, _server.preload = _pid(), preload


def _ensure_running(environment: Mapping[str, str]) -> None:
    with _as_a_server_is_started(environment):
        resource_tracker.ensure_running()  # before blocking signals, because it unblocks them
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the server ignores it
        try:
            forkserver.ensure_running()
        except OSError as error:
            if "AF_UNIX path too long" not in str(error):
                raise
            raise BadInput(
                f"TMPDIR: got {tempfile.gettempdir()}, expected a path of at most {_LONGEST_TMPDIR} characters. Set a "
                "shorter one, because it also holds sockets."
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _pid() -> int | None:
    """Return the process id of the fork server, whether or not amp_track started it; None if there is none.

    Reads a private field of multiprocessing; without it, this raises AttributeError.
    """
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def stop() -> None:
    """Kill the fork server; the next job starts a new one. Call it while no process forked from it runs.

    Uses a private method of multiprocessing, as the tests of CPython do; without it, this raises AttributeError.
    """
    with _ONE_AT_A_TIME:
        if (server_pid := _pid()) is not None:
            with contextlib.suppress(ProcessLookupError):  # without the kill, _stop waits until its imports end
                os.kill(server_pid, signal.SIGKILL)
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def kill_if_stopped() -> None:
    """Kill the fork server if it was stopped (SIGSTOP) and cannot answer; the next job starts a new one."""
    with _ONE_AT_A_TIME:
        if (server_pid := _pid()) is None:
            return
        try:
            if psutil.Process(server_pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return
        except psutil.NoSuchProcess:
            return
        stop()


def start_process(process: ForkServerProcess, environment: Mapping[str, str], seconds: float | None = None) -> None:
    """Start a process from the fork server, or from a new server if that died. Call it within a `held` block.

    Args:
        process: not yet started.
        environment: as for `start`.
        seconds: the time limit for the imports of the server; None for no limit.

    Raises:
        AmpTrackError: several fork servers died.
        ImportsTakeTooLong: the imports of the server exceeded the time limit.
    """
    for _ in range(_SERVERS):
        with _ONE_AT_A_TIME:
            before = _pid()
            try:
                _ensure_running(environment)
                # This restarts a server that has died since. Otherwise it waits seconds for the imports.
                with (
                    _as_a_server_is_started(environment),
                    _no_main_module(),
                    _killed_after(seconds),
                    interrupts.waiting(),
                ):
                    process.start()
                return
            except (EOFError, ConnectionError):
                stop()
            finally:
                _note_server(before, environment.get(PRELOAD_VARIABLE, ""))
    raise AmpTrackError(
        f"The fork server died {_SERVERS} times while it imported torch. Check that `import torch` works, and that "
        "nothing kills the process, such as the kernel when memory is low."
    )


@contextlib.contextmanager
def _killed_after(seconds: float | None) -> Iterator[None]:
    """Kill the fork server if the block exceeds the time limit, and raise ImportsTakeTooLong."""
    if seconds is None:
        yield
        return
    is_over = threading.Event()

    def kill() -> None:
        is_over.set()
        if (server_pid := _pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server_pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (EOFError, ConnectionError):
        if not is_over.is_set():
            raise
    finally:
        timer.cancel()
        timer.join()
    if is_over.is_set():
        raise ImportsTakeTooLong(f"the imports took longer than {seconds:g} s")


def _keep_sockets_in_scratch_folder() -> None:
    """Make multiprocessing create the socket of the fork server in a folder that is deleted even after a SIGKILL.

    Sets a private field of the current process. If multiprocessing no longer reads it, the socket lies in a folder that
    stays on disk after a SIGKILL.
    """
    configuration = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in configuration:
        folder = contextlib.ExitStack()
        configuration["tempdir"] = str(folder.enter_context(processes.scratch_folder()))
        util.Finalize(None, folder.close, exitpriority=-100)  # as late as multiprocessing deletes its folder


@contextlib.contextmanager
def _as_a_server_is_started(environment: Mapping[str, str]) -> Iterator[None]:
    """Set up the environment for a server that is started within the block.

    Args:
        environment: additional variables of the server.
    """
    path = os.pathsep.join(filter(None, [PACKAGE_FOLDER, os.environ.get("PYTHONPATH", "")]))
    environment = {**environment, "PYTHONPATH": path, SOCKETS_VARIABLE: f"{os.getpid()} {util.get_temp_dir()}"}
    if not os.environ.get(SAFE_PATH_VARIABLE):  # the server starts by `python -c`, which searches this folder first
        environment[SAFE_PATH_VARIABLE] = SAFE_PATH
    with _fixed_addresses(), processes.variables(environment):
        yield


@contextlib.contextmanager
def _fixed_addresses() -> Iterator[None]:
    """Disable address-space randomization for programs that are started within the block.

    Objects are then hashed, sorted and placed in the same way, and a job uses the same memory in every command. The
    peak of an LSTM's training in 12 commands was equal to the page; with random addresses it differed by up to 0.7 %.
    A container may forbid this; then addresses stay random.
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
    """Keep multiprocessing from importing the main module of this process into processes started within the block.

    A job does not need it: the import costs time, makes the memory of the job depend on the program that started it,
    and a script without a `__main__` guard would start itself.

    Relies on `multiprocessing.spawn.get_preparation_data` reading `sys.modules`. If that changes, the main module is
    imported again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _personality(persona: int) -> int:
    """Call Linux's personality(2), which child processes inherit. Return -1 on other systems, or if not permitted."""
    if sys.platform != "linux":
        return -1
    return int(ctypes.CDLL(None).personality(ctypes.c_ulong(persona)))
