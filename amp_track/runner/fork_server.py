"""Control the fork server: a process that has imported torch, from which a job process is forked in 50 ms."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import site
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import psutil

from amp_track.records.errors import AmpTrackError, BadInput
from amp_track.runner.leading_imports import LeadingImports, is_of_required_package, may_share_server
from amp_track.training.devices import heap
from amp_track.workers import interrupts, liveness, processes

if TYPE_CHECKING:
    from amp_track.config.job import Job

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD_MODULE = "amp_track.runner.preload"
"""The module that imports the leading imports of the workload and the required modules in the server."""
REQUIRED_MODULES = (
    "torch",
    "amp_track.runner.job_main",
    "amp_track.runner.plan_main",
    "amp_track.targets.command",
    "amp_track.targets.function",
    "amp_track.targets.workload",
    "pydantic.type_adapter",
)
"""Modules that every job needs."""
STEP_MODULES = ("sympy", "torch._dynamo")
"""Modules that the first optimizer step of every process imports otherwise, in 0.9 s: the second imports the first. An
inspection has no step."""
INSPECTS_VARIABLE = "AMP_TRACK_INSPECTS"
"""Environment variable that tells the fork server that its first process is an inspection, so that it imports
`STEP_MODULES` only afterwards."""
PRELOAD_VARIABLE = "AMP_TRACK_PRELOAD"
"""Environment variable that passes the leading import statements of the workload to the fork server, one per line."""
PACKAGE_FOLDER = str(Path(__file__).parents[2])
"""The folder of this package, first on the path of the server: `mlflow run` starts a command in the project folder
while the environment may contain another copy, which jobs would run instead."""
IS_INSTALLED = PACKAGE_FOLDER in {*site.getsitepackages(), site.getusersitepackages()}
"""Whether Python searches that folder anyway. It then keeps its place, and the server imports the same torch as the
command."""
SAFE_PATH_VARIABLE, SAFE_PATH = "PYTHONSAFEPATH", "amp_track"
"""The variable that keeps the working folder off Python's path, and the value that marks it as set by amp_track."""
_ADDR_NO_RANDOMIZE, _NO_CHANGE = 0x0040000, 0xFFFFFFFF
"""Arguments of personality(2), from Linux's sys/personality.h."""
_SERVERS = 3
"""A job fails after this many fork servers have died."""
_LONGEST_TMPDIR = 70
"""Linux allows 107 bytes for a socket path; `/amp_track-xxxxxxxx/listener-xxxxxxxx` uses 37 of them."""


@dataclass(frozen=True)
class Setup:
    """How a fork server is started for a workload."""

    imports: LeadingImports
    huge_pages: bool = False
    """Whether malloc asks for huge pages in it and in its jobs: those within a CPU budget are faster with them."""


def asks_for_huge_pages(job: Job) -> bool:
    """Return whether malloc asks for huge pages in all jobs of a command with this job, so that they share a server."""
    return job.memory_budget_bytes is not None


_LOCK = threading.Condition()
"""Held while a start changes the environment, personality and main module, which all threads share."""
_started: tuple[int | None, Setup | None] = (None, None)
"""The process id and the setup of the server that this module started last."""
_users = 0
"""The number of `held` blocks that use it."""

# The user does not need to know that the tracker was killed; nothing leaks.
warnings.filterwarnings("ignore", "resource_tracker: process died", UserWarning)


def start(setup: Setup, *, inspects: bool = False) -> None:
    """Start the fork server unless it runs. Do not wait for its imports.

    A running server whose setup may change the behavior of this workload is replaced. With `inspects`, the first
    process of a new server is an inspection. Raises BadInput if the path of the temporary folder is too long for a
    socket.
    """
    _keep_sockets_in_scratch_folder()
    with _LOCK:
        pid, running = _started
        if running is not None and pid == _pid() and not _may_share(running, setup):
            with interrupts.waiting():
                _LOCK.wait_for(lambda: _users == 0)  # other threads run jobs of another workload
            stop()
        with _starting(setup, inspects=inspects):
            _ensure_running()


def _may_share(running: Setup, wanted: Setup) -> bool:
    has_imports = may_share_server(running.imports.statements, wanted.imports)
    return has_imports and running.huge_pages == wanted.huge_pages


@contextlib.contextmanager
def held(setup: Setup) -> Iterator[None]:
    """Start the fork server as `start` does, and keep other workloads from replacing it within the block."""
    global _users
    with _LOCK:
        start(setup)
        _users += 1
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            _LOCK.notify_all()


class ImportsTakeTooLong(Exception):
    """The fork server did not finish the imports of the workload in time, and was killed."""


def start_process(process: ForkServerProcess, setup: Setup, import_seconds: float) -> None:
    """Start a process from the fork server, or from a new server if that died.

    Raises ImportsTakeTooLong if the server's imports of packages that only the workload needs exceed the time limit.
    """
    statements = setup.imports.statements
    only_required = all(map(is_of_required_package, statements))  # jobs could not run any of them instead
    for _ in range(_SERVERS):
        with _starting(setup):
            try:
                _ensure_running()
                limit = contextlib.nullcontext() if only_required else _killed_after(import_seconds)
                with _no_main_module(), limit, interrupts.waiting():
                    process.start()  # starts a server if this one has died since; otherwise it waits for the imports
                return
            except (EOFError, ConnectionError):
                stop()
    raise AmpTrackError(
        f"The fork server died {_SERVERS} times while it imported torch. Check that `import torch` works, and that "
        "nothing kills the process, such as the kernel when memory is low."
    )


@contextlib.contextmanager
def _killed_after(seconds: float) -> Iterator[None]:
    """Kill the fork server if the block takes longer, and raise ImportsTakeTooLong."""
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
        raise ImportsTakeTooLong(f"it did not finish within {seconds:g} s")


def stop() -> None:
    """Kill the fork server; the next job starts a new one. Call it while no process forked from it runs.

    Uses a private method of multiprocessing, as the tests of CPython do; without it, this raises AttributeError.
    """
    with _LOCK:
        if (server_pid := _pid()) is not None:
            with contextlib.suppress(ProcessLookupError):  # without the kill, _stop waits until its imports end
                os.kill(server_pid, signal.SIGKILL)
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def kill_if_stopped() -> None:
    """Kill the fork server if it was stopped (SIGSTOP) and cannot answer; the next job starts a new one."""
    with _LOCK:
        if (server_pid := _pid()) is not None and (server := liveness.running(server_pid)) is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                if server.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    stop()


def _pid() -> int | None:
    """Return the process id of the fork server, whether or not amp_track started it; None if there is none.

    Reads a private field of multiprocessing; without it, this raises AttributeError.
    """
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def _ensure_running() -> None:
    CONTEXT.set_forkserver_preload([PRELOAD_MODULE])
    # A probe ends without deleting its semaphores, such as that of tqdm. The tracker deletes them, and need not say so.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")  # for its process
    try:
        resource_tracker.ensure_running()  # before blocking signals, because it unblocks them
    finally:
        sys.warnoptions.pop()
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
def _starting(setup: Setup, *, inspects: bool = False) -> Iterator[None]:
    """Set the environment of a server that is started within the block, and record its setup.

    Disable address-space randomization: objects are then hashed, sorted and placed in the same way, and a job uses the
    same memory in every command. The peak of an LSTM's training in 12 commands was equal to the page; with random
    addresses it differed by up to 0.7 %. A container may forbid this; then addresses stay random.
    """
    global _started
    environment = {
        PRELOAD_VARIABLE: "\n".join(setup.imports.statements),
        INSPECTS_VARIABLE: "1" if inspects and hasattr(os, "waitid") else "",  # macOS lacks it before Python 3.13
        # The server starts by `python -c`, which searches the working folder first.
        SAFE_PATH_VARIABLE: os.environ.get(SAFE_PATH_VARIABLE) or SAFE_PATH,
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        # Otherwise torch.cuda.is_available(), which packages call at import, initializes CUDA.
        "PYTORCH_NVML_BASED_CUDA_CHECK": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),
    }
    if setup.huge_pages:
        environment[heap.TUNABLES_VARIABLE] = heap.with_huge_pages(os.environ.get(heap.TUNABLES_VARIABLE, ""))
    if not IS_INSTALLED:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [PACKAGE_FOLDER, os.environ.get("PYTHONPATH", "")]))
    with _LOCK, processes.variables(environment):
        before, random_addresses = _pid(), _personality(_NO_CHANGE)
        if random_addresses != -1:
            _personality(random_addresses | _ADDR_NO_RANDOMIZE)
        try:
            yield
        finally:
            if random_addresses != -1:
                _personality(random_addresses)
            if _pid() != before:
                _started = _pid(), setup


def _personality(persona: int) -> int:
    """Call Linux's personality(2), which child processes inherit. Return -1 on other systems, or if not permitted."""
    if sys.platform != "linux":
        return -1
    return int(ctypes.CDLL(None).personality(ctypes.c_ulong(persona)))


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
