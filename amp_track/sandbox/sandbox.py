"""Run a Job in a fresh process under its budget and stream its events back -> Outcome, whatever happens to it.

Memory is clean, peaks are this job's own, and a child that dies is an Outcome, not the end of a search. This side
imports no torch: the children are forked from a server that has.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, assert_never

from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import WorkloadFailed
from amp_track.records.events import Event
from amp_track.records.inspection import Inspection
from amp_track.records.job import ALONE, Job, JobFolder, Rank
from amp_track.records.outcome import Outcome, Verdict
from amp_track.records.values import format_bytes
from amp_track.sandbox import children, ranks
from amp_track.workers import processes

PRELOAD_VARIABLE = "AMP_TRACK_PRELOAD"
"""Environment variable that tells the fork server which modules the workload imports, comma-separated."""
_NEARLY_THE_BUDGET = 0.95
"""Part of a budget from which on a job that runs without it, and crashes within it, is taken to have run out."""


def _ignore(event: Event) -> None:
    pass


class Sandbox:
    """Fresh processes for the jobs of one workload.

    Args:
        workload: its file or module; the installed packages it imports are imported once for all its jobs.
    """

    def __init__(self, workload: str) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["amp_track.sandbox.preload"])
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
        found = self._in_fresh_processes("inspect", dataclasses.replace(job, timeout_seconds=None), [ALONE])[0]
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
        outcome = self._run_all_ranks("run", job, on_event, folder)
        if job.memory_budget_bytes is not None and outcome.verdict is Verdict.CRASHED and _may_be_the_budget(outcome):
            return self._second_opinion(job, outcome, job.memory_budget_bytes)
        return outcome

    def measure(self, job: Job) -> Outcome:
        """Probe a job's batch, counting as under its budget but limiting nothing: what it would take."""
        return self._run_all_ranks("measure", dataclasses.replace(job, probe=True))

    def dtypes(self, job: Job) -> DtypesReport | Outcome:
        """Which operation of a resolved job's model runs in which dtype; or what went wrong."""
        found = self._in_fresh_processes("dtypes", job)[0]
        assert isinstance(found, DtypesReport | Outcome)
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

    def _run_all_ranks(
        self, task: str, job: Job, on_event: Callable[[Event], None] = _ignore, folder: JobFolder | None = None
    ) -> Outcome:
        """What came of a job in all its processes. The first one's events are passed on."""
        with processes.scratch_folder() if job.processes > 1 else nullcontext() as place:
            rendezvous = str(place / "rendezvous") if place is not None else ""
            everyone = [Rank(index=index, count=job.processes, rendezvous=rendezvous) for index in range(job.processes)]
            results = self._in_fresh_processes(task, job, everyone, on_event, folder)
        outcomes = [result for result in results if not isinstance(result, Inspection | DtypesReport)]
        return ranks.merge_outcomes(outcomes)

    def _in_fresh_processes(
        self,
        task: str,
        job: Job,
        everyone: Sequence[Rank] = (ALONE,),
        on_event: Callable[[Event], None] = _ignore,
        folder: JobFolder | None = None,
    ) -> list[children.Result | None]:
        """What each came to; None of one that was ended because another had failed."""
        started = time.monotonic()
        oom_kills = _kernel_oom_kills()
        with contextlib.ExitStack() as stack:
            running = [
                stack.enter_context(children.started(self._context, _child, task, job, folder, rank))
                for rank in everyone
            ]
            children.listen(running, on_event, _deadline(started, job.timeout_seconds))
            for child in running:
                if child.has_died:
                    child.process.join()
            kills = _kernel_oom_kills() - oom_kills
            for child in running:
                if child.has_died:
                    child.result = _outcome_of_death(child.process.exitcode, kills, time.monotonic() - started)
            results = [_if_its_loader_was_killed(child.result, kills) for child in running]
        has_failed = any(isinstance(result, Outcome) and not result.fits for result in results)
        if None in results and not has_failed:
            timed_out = Outcome(
                verdict=Verdict.TIMED_OUT,
                message=f"gave up after {job.timeout_seconds:g} s (--timeout)",
                wall_seconds=time.monotonic() - started,
            )
            return [timed_out] * len(results)
        return results


def _deadline(started: float, timeout_seconds: float | None) -> float | None:
    return None if timeout_seconds is None else started + timeout_seconds


def _may_be_the_budget(crash: Outcome) -> bool:
    """Deaths and errors that a failed allocation is known to cause without naming it. A workload's own exception, exit
    or SIGKILL is none of them."""
    died = re.match(r"the job's process was killed by (SIGSEGV|SIGBUS|SIGABRT)\b", crash.message)
    # oneDNN: it reports every failure so, a failed allocation among them.
    errors = ("could not create a primitive", "could not execute a primitive", "could not create a memory object")
    return died is not None or any(text in crash.message for text in errors)


def _outcome_of_death(exit_code: int | None, oom_kills: int, wall_seconds: float) -> Outcome:
    """A process that ended without a word."""
    assert exit_code is not None
    if exit_code == -signal.SIGKILL and oom_kills > 0:
        return Outcome(verdict=Verdict.OOM, message="killed by the kernel for memory", wall_seconds=wall_seconds)
    how = f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exited with code {exit_code}"
    return Outcome(verdict=Verdict.CRASHED, message=f"the job's process {how}", wall_seconds=wall_seconds)


def _if_its_loader_was_killed(result: children.Result | None, oom_kills: int) -> children.Result | None:
    """The kernel may take a job's loader processes for its memory: the job then meets an error of the DataLoader."""
    if oom_kills and isinstance(result, Outcome) and result.message.startswith("RuntimeError: DataLoader worker (pid"):
        message = f"killed by the kernel for memory: {result.message}"
        return dataclasses.replace(result, verdict=Verdict.OOM, message=message)
    return result


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


def _child(task: str, job: Job, folder: JobFolder | None, rank: Rank, connection: Connection[Any, Any]) -> None:
    """Runs in the fresh process, where torch is already imported."""
    from amp_track.sandbox import job_process as worker

    match task:
        case "run":
            worker.run(job, connection, folder, rank, enforce_budget=True)
        case "measure":
            worker.run(job, connection, None, rank, enforce_budget=False)
        case "inspect":
            worker.inspect(job, connection)
        case "dtypes":
            worker.dtypes(job, connection)
        case _:
            assert_never(task)  # type: ignore[arg-type]
