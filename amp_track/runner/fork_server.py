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
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType

import psutil

from amp_track.records.errors import AmpTrackError, BadInput
from amp_track.runner import leading_imports
from amp_track.workers import interrupts, processes, programs

SOCKETS_VARIABLE = "AMP_TRACK_SOCKETS"
"""Environment variable that tells the fork server which process has started it, and in which folder its socket lies."""
SELF_CONTAINED_VARIABLE = "AMP_TRACK_SELF_CONTAINED"
"""Set for a workload that imports nothing else, so that a server which has imported more may serve it."""
PRELOAD_VARIABLE = "AMP_TRACK_PRELOAD"
"""Environment variable that tells the fork server which import statements the workload begins with, one a line."""
PACKAGE_FOLDER = str(Path(__file__).parents[2])
"""Where this package lies. The server looks there first: `mlflow run` starts a command from the project's folder, while
another copy is installed in the environment, and jobs would run that one."""
SAFE_PATH_VARIABLE, SAFE_PATH = "PYTHONSAFEPATH", "amp_track"
"""The variable that keeps Python from importing modules of the working folder, and the value that says who set it."""
_ADDR_NO_RANDOMIZE, _NO_CHANGE = 0x0040000, 0xFFFFFFFF
"""Arguments of personality(2), from Linux's sys/personality.h."""
_SERVERS = 3
"""How many fork servers may die before a job is given up."""
_LONGEST_TMPDIR = 70
"""Linux allows 107 bytes: `/amp_track-xxxxxxxx/listener-xxxxxxxx` takes 37 of them."""

_ONE_AT_A_TIME = threading.Condition()
"""Held where a start changes what the whole process shares: its environment, personality and main module."""


class ImportsTakeTooLong(Exception):
    """A fork server had not done its imports in time, and was killed."""


@dataclass
class _Server:
    """The fork server that this module has started last."""

    pid: int | None = None
    preload: str = ""
    """The import statements that it runs."""
    users: int = 0
    """Blocks that need it to go on: see `held`."""


_server = _Server()


# That it was killed is no news for users, and nothing leaks.
warnings.filterwarnings("ignore", "resource_tracker: process died", UserWarning)


def start(environment: Mapping[str, str]) -> None:
    """Start the fork server unless it runs, in place of one that was killed, and do not wait until it imports torch.

    One whose imports may change what this workload does is replaced, once no process of it runs.

    Args:
        environment: variables that it has besides this process's own.

    Raises:
        BadInput: the temporary folder's path is too long for a socket.
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
    """Start the fork server as `start` does, and let no other workload replace it within the block."""
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
    """Note what the server that runs now has imported, if it was not running before."""
    if _pid() != before:
        _server.pid, _server.preload = _pid(), preload


def _ensure_running(environment: Mapping[str, str]) -> None:
    with _as_a_server_is_started(environment):
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


def _pid() -> int | None:
    """Return the number of the fork server, of whoever has started it, and None if there is none.

    A private field of multiprocessing; without it, this raises AttributeError.
    """
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def stop() -> None:
    """Kill the fork server; the next job starts another one. Call it while no process forked from it runs.

    Uses a private method of multiprocessing, whose own tests do the same; without it, this raises AttributeError.
    """
    with _ONE_AT_A_TIME:
        if (server_pid := _pid()) is not None:
            with contextlib.suppress(ProcessLookupError):  # else it is waited for until its imports end
                os.kill(server_pid, signal.SIGKILL)
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def kill_if_stopped() -> None:
    """Kill the fork server if it has been stopped (SIGSTOP) and so answers nobody; the next job starts another one."""
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
    """Start a process from the fork server, or from another one if that has died, within a `held` block.

    Args:
        process: not yet started.
        environment: of the server, as for `start`.
        seconds: how long the server's imports may take; None for as long as they do.

    Raises:
        AmpTrackError: the fork servers die.
        ImportsTakeTooLong: the server's imports took longer.
    """
    for _ in range(_SERVERS):
        with _ONE_AT_A_TIME:
            before = _pid()
            try:
                _ensure_running(environment)
                # A server that has died since is started once more by this. Else it waits for the imports: seconds.
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
        f"the process that jobs are forked from died {_SERVERS} times before it had imported torch, expected it to "
        "live; look for who kills it (the kernel, if memory is short), and whether `import torch` works"
    )


@contextlib.contextmanager
def _killed_after(seconds: float | None) -> Iterator[None]:
    """Kill the fork server if the block takes longer, and raise ImportsTakeTooLong."""
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
    path = os.pathsep.join(filter(None, [PACKAGE_FOLDER, os.environ.get("PYTHONPATH", "")]))
    environment = {**environment, "PYTHONPATH": path, SOCKETS_VARIABLE: f"{os.getpid()} {util.get_temp_dir()}"}
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
