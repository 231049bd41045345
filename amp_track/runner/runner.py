"""Run a Job in fresh processes under its budget, stream its events, and return a JobResult even if a process dies.

In a fresh process memory is clean and peaks belong to this job. A process that dies is a JobResult and does not end a
search. This module does not import torch: the processes are forked from a server that has imported it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import math
import multiprocessing
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, assert_never

from amp_track.config.inspection import Inspection
from amp_track.config.job import ALONE, Job, JobFolder, Rank, ranks_of_one_machine
from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import AmpTrackError, TargetFailed
from amp_track.records.events import Event, Noted
from amp_track.records.plan import Forecasts, ForecastTask, PlanReport, PlanTask
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner import crash_diagnosis, fork_server, job_processes, leading_imports, process_setup, ranks
from amp_track.runner.process_setup import Sender
from amp_track.targets import source
from amp_track.training.devices import cgroup
from amp_track.workers import processes

REQUIRED_MODULES = (
    "torch",
    "torch._dynamo",  # otherwise the first optimizer step of every process imports it, in 0.9 s
    "amp_track.runner.job_main",
    "amp_track.cli",
    "pydantic.type_adapter",
)
"""Modules that every job needs."""
_PRELOAD_MODULE = "amp_track.runner.preload"
"""The module that imports them in the fork server."""
_CANNOT_IMPORT = "The fork server cannot import a module that every job needs. Fix this import:\n{}"

Task = str | PlanTask | ForecastTask
"""The task of a job process: `run`, `measure`, `inspect`, `dtypes`, or a prediction."""
_FORECAST_SECONDS = 30.0
_IMPORT_SECONDS = 120.0
"""Time limit for the workload's imports in the fork server. After it, each job runs them."""

_log = logging.getLogger("amp_track.runner")


class CudaTouched(TargetFailed):
    """The fork server has initialized CUDA, so no process forked from it can use a GPU."""


def ignore(event: Event) -> None:
    """Ignore an event."""


class JobRunner:
    """Runs the jobs of one workload in fresh processes.

    Args:
        workload: the file or module of the workload. The installed packages that it imports are imported once for all
            jobs.
        steps_back: lower the priority of this process permanently, so that its jobs run first.
    """

    def __init__(self, workload: str, *, steps_back: bool = False) -> None:
        self._steps_back = steps_back
        self._has_killed = False
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([_PRELOAD_MODULE])
        self._notes: list[str] = []
        self._has_logged_notes = False
        leading = leading_imports.leading_imports(workload)
        # The environment of the fork server. With a fixed hash seed, the same job allocates the same blocks in every
        # command.
        self._environment = {
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
            fork_server.PRELOAD_VARIABLE: "\n".join(leading.statements),
            fork_server.SELF_CONTAINED_VARIABLE: "yes" if leading.is_self_contained else "",
            # Otherwise torch.cuda.is_available(), which packages call at import, initializes CUDA.
            "PYTORCH_NVML_BASED_CUDA_CHECK": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),
        }

    def start(self) -> None:
        """Start to import torch in the fork server, ahead of the first job. Do not wait."""
        fork_server.start(self._environment)

    def inspect(self, job: Job) -> Inspection:
        """Return what the device supports and what the workload declares.

        Raises:
            BadInput: this machine has no such device, or the workload cannot be loaded.
            TargetFailed: the data of the workload cannot be loaded, or importing the workload and loading its data
                exceeded the timeout of the job.
        """
        rank = Rank(count=job.nproc, local_count=job.nproc)
        (result,) = self.in_fresh_processes("inspect", job, [rank], self._note)
        inspection = inspection_of(job, result)
        self._log_notes()
        return inspection

    def _note(self, event: Event) -> None:
        if isinstance(event, Noted):
            self._notes.append(event.text)

    def _log_notes(self) -> None:
        """Log the notes of the first successful inspection."""
        if self._notes and not self._has_logged_notes:
            _log.warning("%s", self._notes[-1])
            self._has_logged_notes = True

    def run(
        self, job: Job, on_event: Callable[[Event], None] = ignore, *, folder: JobFolder | None = None
    ) -> JobResult:
        """Run a resolved job and return its result.

        Args:
            job: the resolved job.
            on_event: called in this process as events arrive.
            folder: the folder for files of its MLflow run. The receiver of a file's event moves the file.

        Raises:
            KeyboardInterrupt: re-raised after the job processes have ended.
            BadInput: the workload cannot be loaded, because it was changed after its inspection.
        """
        return crash_diagnosis.second_opinion(job, self._run_all_ranks("run", job, on_event, folder), self.measure)

    def measure(self, job: Job) -> JobResult:
        """Probe the batch size of a job without a limit, and return the result, measured by the meter of its budget."""
        return self._run_all_ranks("measure", dataclasses.replace(job, probe=True))

    def dtypes(self, job: Job) -> DtypesReport | JobResult:
        """Return the dtypes of the operations in the model of a resolved job, or the JobResult of a failure."""
        result = self.in_fresh_processes("dtypes", job)[0]
        assert isinstance(result, DtypesReport | JobResult)
        return result

    def plan(self, job: Job, task: PlanTask, *, processes: int = 1) -> PlanReport:
        """Predict the memory of the training step of a resolved job, in `processes` parallel processes.

        Raises:
            BadInput: the step cannot run on fake tensors.
        """
        results = self.in_fresh_processes(task, job, ranks_of_one_machine(processes))
        for result in results:
            if isinstance(result, JobResult):
                raise failure(job, result)
        plans = {plan.precision: plan for part in results if isinstance(part, PlanReport) for plan in part.precisions}
        return PlanReport(workload=job.workload, precisions=tuple(plans[name] for name in task.precisions))

    def forecast(self, job: Job, task: ForecastTask) -> Forecasts:
        """Predict the max batch at each precision, or return the reason why not. Takes at most half a minute."""
        job = dataclasses.replace(job, job_timeout_seconds=_FORECAST_SECONDS)
        result = self.in_fresh_processes(task, job)[0]
        if isinstance(result, Forecasts):
            return result
        if isinstance(result, JobResult) and result.status is not JobStatus.TIMED_OUT:
            return Forecasts(reason=result.message)
        return Forecasts(reason=f"the prediction took longer than {_FORECAST_SECONDS:g} s")

    def _import_seconds(self) -> float | None:
        """Return the time limit for imports of the fork server; None if jobs cannot run any of them instead."""
        statements = self._environment[fork_server.PRELOAD_VARIABLE].splitlines()
        return None if all(map(leading_imports.is_of_required_package, statements)) else _IMPORT_SECONDS

    def _run_all_ranks(
        self, task: str, job: Job, on_event: Callable[[Event], None] = ignore, folder: JobFolder | None = None
    ) -> JobResult:
        """Run a job on all its ranks and merge their results. Only rank 0 sends events."""
        with processes.scratch_folder() if job.nproc > 1 else nullcontext() as scratch:
            rendezvous = f"file://{scratch}/rendezvous" if scratch is not None else ""
            all_ranks = ranks_of_one_machine(job.nproc, rendezvous)
            results = self.in_fresh_processes(task, job, all_ranks, on_event, folder)
        return ranks.merge_job_results([result for result in results if isinstance(result, JobResult | None)])

    def in_fresh_processes(
        self,
        task: Task,
        job: Job,
        all_ranks: Sequence[Rank] = (ALONE,),
        on_event: Callable[[Event], None] = ignore,
        folder: JobFolder | None = None,
        beside: Sequence[job_processes.Source] = (),
    ) -> list[job_processes.Result | None]:
        """Return the result of each process, followed by the results of ranks in other commands.

        The result is None for a process that was killed because another one had failed.

        If a package initialized CUDA at import, the fork server is useless for jobs on a GPU. If an import does not
        finish, it is useless for all. Both are replaced by a server that leaves those imports to the jobs.
        """
        run = functools.partial(self._in_processes_of_one_server, task, job, all_ranks, on_event, folder, beside)
        try:
            return run()
        except (CudaTouched, fork_server.ImportsTakeTooLong) as error:
            self._leave_imports_to_jobs(error)
        return run()

    def _leave_imports_to_jobs(self, error: CudaTouched | fork_server.ImportsTakeTooLong) -> None:
        """Make the next fork server skip modules that only the workload needs. Raise the error if there are none.

        Args:
            error: the fault of the running fork server.
        """
        statements = self._environment[fork_server.PRELOAD_VARIABLE].splitlines()
        kept = [statement for statement in statements if leading_imports.is_of_required_package(statement)]
        if kept == statements:
            raise error
        self._environment[fork_server.PRELOAD_VARIABLE] = "\n".join(kept)
        left = "; ".join(statement for statement in statements if statement not in kept)
        if isinstance(error, CudaTouched):
            _log.warning(
                "%s initializes CUDA, so each job runs this import, which takes seconds. Delay the first use of CUDA "
                "until after the import.", left,
            )  # fmt: skip
        else:
            _log.warning("%s did not finish within %g s, so each job runs it.", left, _IMPORT_SECONDS)
        fork_server.stop()

    def _in_processes_of_one_server(
        self,
        task: Task,
        job: Job,
        all_ranks: Sequence[Rank],
        on_event: Callable[[Event], None],
        folder: JobFolder | None,
        beside: Sequence[job_processes.Source],
    ) -> list[job_processes.Result | None]:
        started = time.monotonic()
        oom_kills = cgroup.oom_kills()  # to distinguish SIGKILL by the kernel from other senders
        with contextlib.ExitStack() as stack:
            running = [
                stack.enter_context(
                    job_processes.started(
                        self._context,
                        _child,
                        task,
                        job,
                        folder,
                        rank,
                        self._has_killed,
                        environment=self._environment,
                        import_seconds=self._import_seconds(),
                        steps_back=self._steps_back,
                    )
                )
                for rank in all_ranks
            ]
            self._has_killed = True  # in case an exception ends this block
            # The timeout does not start at `started`: the first process waits until torch is imported.
            seconds = math.inf if job.job_timeout_seconds is None else job.job_timeout_seconds
            job_processes.listen([*running, *beside], on_event, time.monotonic() + seconds)
            kills = cgroup.oom_kills() - oom_kills
            for child in running:
                if child.has_died:
                    child.result = crash_diagnosis.job_result_of_death(child, kills, time.monotonic() - started)
            self._has_killed = any(child.has_died or child.result is None for child in running)
            results = [crash_diagnosis.oom_if_its_loader_was_killed(child.result, kills) for child in running]
            results += [source.result for source in beside if source.is_waited_for]
        has_failed = any(isinstance(result, JobResult) and not result.fits for result in results)
        if None in results and not has_failed:
            what = "importing it and loading its data took longer than" if task == "inspect" else "gave up after"
            timed_out = JobResult(
                status=JobStatus.TIMED_OUT,
                message=f"{what} {job.job_timeout_seconds:g} s (--job-timeout)",
                wall_seconds=time.monotonic() - started,
            )
            return [timed_out] * len(results)
        return results


def inspection_of(job: Job, result: job_processes.Result | None) -> Inspection:
    """Return the inspection. Raises TargetFailed if its process failed."""
    if isinstance(result, Inspection):
        return result
    assert isinstance(result, JobResult)
    raise failure(job, result)


def failure(job: Job, job_result: JobResult, where: str = "") -> TargetFailed:
    """Return the error for a failed result. `where` names its process and follows the message."""
    return TargetFailed(f"{job.workload}: {job_result.message}{where}", detail=job_result.traceback)


def missing_preload() -> str:
    """Return why the fork server could not import the required modules, or "".

    multiprocessing ignores an ImportError in the fork server. Without this check a renamed module would silently cost
    seconds in each process. A process has only one fork server: if the program of the user started it before, each job
    imports the modules.
    """
    if fork_server.PRELOAD_VARIABLE not in os.environ:
        importlib.import_module(_PRELOAD_MODULE)
    preload = sys.modules.get(_PRELOAD_MODULE)
    if preload is None:
        return (
            f"The fork server did not import {_PRELOAD_MODULE}. Install amp_track so that a new Python process can "
            "import it."
        )
    if preload.failure:
        return _CANNOT_IMPORT.format(preload.failure)
    return ""


def _import_before_torch(job: Job, task: Task, sender: Sender) -> str:
    """Import the workload, then the modules that every job needs. Return the traceback of a failure, or ""."""
    started = time.monotonic()
    source.import_ahead(job.workload)
    failure: str = sys.modules[_PRELOAD_MODULE].import_required()
    if task != "inspect":
        return failure
    leading = leading_imports.leading_imports(job.workload)
    is_why = os.environ.get(fork_server.PRELOAD_VARIABLE) == "\n".join(leading.statements)
    if is_why and leading.stopped_at:
        sender.send(
            Noted(
                text=f"{leading.stopped_at} runs before torch is imported, so each job imports torch itself, which "
                f"took {time.monotonic() - started:.1f} s. Import torch above that line if the order does not matter."
            )
        )
    return failure


def _child(
    task: Task, job: Job, folder: JobFolder | None, rank: Rank, after_a_kill: bool, connection: Connection[Any, Any]
) -> None:
    """Run a task in the fresh process, where torch is already imported, and exit immediately."""
    _do(task, job, folder, rank, after_a_kill, Sender(connection))
    # The normal exit of Python waits for threads and processes of the workload. The finalizers remove shared memory,
    # which multiprocessing would otherwise complain about.
    try:
        multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
        sys.stdout.flush()  # raises if the workload closed it
        sys.stderr.flush()
    finally:
        os._exit(0)


def _do(task: Task, job: Job, folder: JobFolder | None, rank: Rank, after_a_kill: bool, sender: Sender) -> None:
    if missing := missing_preload():
        sender.send(AmpTrackError(missing))
        return
    process_setup.set_up_process()
    if task in ("run", "measure"):
        process_setup.announce(rank)
    if sys.modules[_PRELOAD_MODULE].is_left_to_jobs and (missing := _import_before_torch(job, task, sender)):
        sender.send(AmpTrackError(_CANNOT_IMPORT.format(missing)))
        return
    from amp_track.runner import job_main

    if job.device != "cpu" and job_main.cannot_use_cuda():
        sender.send(
            CudaTouched(
                "The fork server has initialized CUDA, so no job can use a GPU. Find and remove the code that uses "
                "CUDA when Python starts or when torch is imported."
            )
        )
        return
    match task:
        case "run" | "measure":
            job_main.run(job, sender, folder, rank, enforce_budget=task == "run", after_a_kill=after_a_kill)
        case "inspect":
            job_main.inspect(job, sender, rank)
        case "dtypes":
            job_main.dtypes(job, sender)
        case PlanTask() | ForecastTask():
            from amp_track.runner import plan_main

            plan_main.predict(job, task, rank, sender)
        case _:
            assert_never(task)  # type: ignore[arg-type]
