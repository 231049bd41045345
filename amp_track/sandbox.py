"""Run a Job in a fresh process under its budget and stream its events back -> Outcome, whatever happens to it.

Memory is clean, peaks are this job's own, and a child that dies is an Outcome, not the end of a search. This side
imports no torch: the children are forked from a server that has.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any, assert_never

from amp_track.dtypes_report import DtypesReport
from amp_track.errors import BadInput, WorkloadFailed
from amp_track.events import Event
from amp_track.job import Inspection, Job, JobFolder
from amp_track.outcome import Outcome, Verdict
from amp_track.values import format_bytes

PRELOAD_VARIABLE = "AMP_TRACK_PRELOAD"
"""Environment variable that tells the fork server which modules the workload imports, comma-separated."""
_ADDR_NO_RANDOMIZE, _NO_CHANGE = 0x0040000, 0xFFFFFFFF
"""Of Linux's sys/personality.h."""
_NEARLY_THE_BUDGET = 0.95
"""Part of a budget from which on a job that runs without it, and crashes within it, is taken to have run out."""
_TRACKING_NICENESS = 10
_EXIT_SECONDS = 10
"""How long a child that has reported may take to exit."""


def _ignore(event: Event) -> None:
    pass


class Sandbox:
    """Fresh processes for the jobs of one workload.

    Args:
        workload: its file or module; the installed packages it imports are imported once for all its jobs.
    """

    def __init__(self, workload: str) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["amp_track.preload"])
        # The fork server inherits the environment when the first job starts it. With a fixed hash seed, the same job
        # allocates the same blocks in every command, not only within one.
        os.environ.setdefault("PYTHONHASHSEED", "0")
        os.environ[PRELOAD_VARIABLE] = ",".join(_imported_modules(workload))

    def inspect(self, job: Job) -> Inspection:
        """What the device can do and what the workload says of itself.

        Raises:
            BadInput: the device is not here or the workload cannot be loaded.
            WorkloadFailed: loading its data failed.
        """
        # Not under the job's timeout: the first process waits until torch is imported.
        found = self._in_fresh_process("inspect", dataclasses.replace(job, timeout_seconds=None), _ignore)
        if isinstance(found, Inspection):
            return found
        assert isinstance(found, Outcome)
        raise WorkloadFailed(f"{job.workload}: {found.message}", detail=found.traceback)

    def run(
        self,
        job: Job,
        on_event: Callable[[Event], None] = _ignore,
        *,
        folder: JobFolder | None = None,
    ) -> Outcome:
        """Run a resolved job. Calls `on_event` in this process as events arrive. Files for its MLflow run are left in
        `folder`, for whoever gets the event to move them.

        Raises:
            KeyboardInterrupt: passed on once the job's process is dead.
            BadInput: the workload cannot be loaded (it was changed since it was inspected).
        """
        outcome = self._in_fresh_process("run", job, on_event, folder)
        assert isinstance(outcome, Outcome)
        if job.memory_budget_bytes is not None and outcome.verdict is Verdict.CRASHED and _may_be_the_budget(outcome):
            return self._second_opinion(job, outcome, job.memory_budget_bytes)
        return outcome

    def measure(self, job: Job) -> Outcome:
        """Probe a job's batch, counting as under its budget but limiting nothing: what it would take."""
        outcome = self._in_fresh_process("measure", dataclasses.replace(job, probe=True), _ignore)
        assert isinstance(outcome, Outcome)
        return outcome

    def dtypes(self, job: Job) -> DtypesReport | Outcome:
        """Which operation of a resolved job's model runs in which dtype; or what went wrong."""
        found = self._in_fresh_process("dtypes", job, _ignore)
        assert not isinstance(found, Inspection)
        return found

    def _second_opinion(self, job: Job, crash: Outcome, budget_bytes: int) -> Outcome:
        """Some libraries do not check their allocations and die of a null pointer where they should report (two of 75
        jobs over a CPU budget ended in SIGSEGV). Such a death is the budget's doing if, and only if, the same batch
        runs whole without a limit and takes the budget or nearly as much (such a library may ask for more at once when
        it can), or is out of memory there too."""
        second = self.measure(job)
        needed = second.max_memory_bytes
        if second.verdict is Verdict.OOM:  # not even all the memory there is will do
            return second
        if second.fits and needed is not None and needed > _NEARLY_THE_BUDGET * budget_bytes:
            reason = f"{crash.message} within the budget; without it the job runs and takes {format_bytes(needed)}"
            return dataclasses.replace(
                crash, verdict=Verdict.OOM, message=reason, max_allocated_bytes=needed, max_memory_bytes=needed
            )
        return crash

    def _in_fresh_process(
        self,
        task: str,
        job: Job,
        on_event: Callable[[Event], None],
        folder: JobFolder | None = None,
    ) -> Outcome | Inspection | DtypesReport:
        started = time.monotonic()
        oom_kills = _kernel_oom_kills()
        with _fixed_addresses():
            forkserver.ensure_running()
        _let_jobs_go_first()
        connection, childs_end = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(task, job, childs_end, folder))
        with _no_main_module():
            process.start()
        childs_end.close()  # so that the child's death closes the pipe
        try:
            result = _receive(connection, process.sentinel, on_event, _deadline(started, job.timeout_seconds))
            if result is not None:
                process.join(_EXIT_SECONDS)
                return result
            if process.is_alive():  # the pipe is still open: it was the deadline
                return Outcome(
                    verdict=Verdict.TIMED_OUT,
                    message=f"gave up after {job.timeout_seconds:g} s (--timeout)",
                    wall_seconds=time.monotonic() - started,
                )
            process.join()
            return _outcome_of_death(process.exitcode, _kernel_oom_kills() - oom_kills, time.monotonic() - started)
        finally:
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
            process.close()


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


def _deadline(started: float, timeout_seconds: float | None) -> float | None:
    return None if timeout_seconds is None else started + timeout_seconds


def _receive(
    connection: Connection[Any, Any], sentinel: int, on_event: Callable[[Event], None], deadline: float | None
) -> Outcome | Inspection | DtypesReport | None:
    """Pass events on until the result comes; None when the child died or the deadline passed without one."""
    while True:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return None
        ready = wait([connection, sentinel], left)
        if connection not in ready and not connection.poll():  # dead, or out of time, with nothing left to read
            return None
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):
            wait([sentinel])  # the pipe closes a moment before the process is gone
            return None
        match message:
            case Outcome() | Inspection() | DtypesReport():
                return message
            case BadInput():
                raise message
            case _:
                on_event(message)


def _may_be_the_budget(crash: Outcome) -> bool:
    """Deaths and errors that a failed allocation is known to cause without naming it. A workload's own exception, exit
    or SIGKILL is none of them."""
    signals = ("SIGSEGV", "SIGBUS", "SIGABRT")
    # oneDNN: it reports every failure so, a failed allocation among them.
    errors = ("could not create a primitive", "could not execute a primitive", "could not create a memory object")
    return crash.message.endswith(signals) or any(text in crash.message for text in errors)


def _outcome_of_death(exit_code: int | None, oom_kills: int, wall_seconds: float) -> Outcome:
    """A process that ended without a word."""
    assert exit_code is not None
    if exit_code == -signal.SIGKILL and oom_kills > 0:
        return Outcome(verdict=Verdict.OOM, message="killed by the kernel for memory", wall_seconds=wall_seconds)
    how = f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exited with code {exit_code}"
    return Outcome(verdict=Verdict.CRASHED, message=f"the job's process {how}", wall_seconds=wall_seconds)


def _kernel_oom_kills() -> int:
    """How many processes the Linux kernel has killed for memory since it started; 0 where it does not count them. Tells
    its SIGKILL from anyone else's."""
    try:
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match.group(1)) if match else 0


def _imported_modules(workload: str) -> list[str]:
    """The modules a workload's file imports at its top level, read without running it."""
    module, colon, _ = workload.partition(":")
    files = [Path(folder, *module.split(".")).with_suffix(".py") for folder in ("", *sys.path)] if colon else [workload]
    file = next((file for file in files if Path(file).is_file()), workload)
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    modules = []
    for node in tree.body:
        match node:
            case ast.Import(names=names):
                modules += [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules.append(module)
    return modules


def _child(task: str, job: Job, connection: Connection[Any, Any], folder: JobFolder | None) -> None:
    """Runs in the fresh process, where torch is already imported."""
    from amp_track import worker

    match task:
        case "run":
            worker.run(job, connection, folder, enforce_budget=True)
        case "measure":
            worker.run(job, connection, None, enforce_budget=False)
        case "inspect":
            worker.inspect(job, connection)
        case "dtypes":
            worker.dtypes(job, connection)
        case _:
            assert_never(task)  # type: ignore[arg-type]
