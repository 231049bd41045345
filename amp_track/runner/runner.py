"""Run a Job in fresh processes under its budget, stream its events back, and return its JobResult whatever happens.

Memory is clean, peaks are this job's own, and a process that dies is a JobResult, not the end of a search. This module
imports no torch: the processes are forked from a server that has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
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

from amp_track import workload_import
from amp_track.config.inspection import Inspection
from amp_track.config.job import ALONE, Job, JobFolder, Rank, ranks_of_one_machine
from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import AmpTrackError, TargetFailed
from amp_track.records.events import Event, Noted
from amp_track.records.plan import Forecasts, ForecastTask, PlanReport, PlanTask
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner import crash_diagnosis, fork_server, job_processes, leading_imports, process_setup, ranks
from amp_track.runner.crash_cause import second_opinion
from amp_track.runner.event_sender import Sender
from amp_track.training.devices import cgroup
from amp_track.workers import processes

REQUIRED_MODULES = (
    "torch",
    "torch._dynamo",  # else the first optimizer step of every process imports it, for 0.9 s
    "amp_track.runner.job_main",
    "amp_track.cli",
    "pydantic.type_adapter",
)
"""Modules that every job needs."""
_PRELOAD_MODULE = "amp_track.runner.preload"
"""The module that imports them in the fork server."""
_CANNOT_IMPORT = "got a fork server that cannot import what every job needs; fix this import:\n{}"

Task = str | PlanTask | ForecastTask
"""What a fresh process does: `run`, `measure`, `inspect`, `dtypes`, or a prediction."""
_FORECAST_SECONDS = 30.0
_IMPORT_SECONDS = 120.0
"""How long the fork server may import what the workload imports, before that is left to the jobs."""

_log = logging.getLogger("amp_track.runner")


class CudaTouched(TargetFailed):
    """The fork server has initialized CUDA: no process that is forked from it can use a GPU."""


def ignore(event: Event) -> None:
    """Do nothing with an event."""


class JobRunner:
    """Runs the jobs of one workload in fresh processes.

    Args:
        workload: the workload's file or module; the installed packages that it imports are imported once for all jobs.
        steps_back: lower the priority of this process for good, so that its jobs go first.
    """

    def __init__(self, workload: str, *, steps_back: bool = False) -> None:
        self._steps_back = steps_back
        self._has_killed = False
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([_PRELOAD_MODULE])
        self._notes: list[str] = []
        self._has_logged_notes = False
        leading = leading_imports.leading_imports(workload)
        # The first job starts the fork server, with these. With a fixed hash seed, the same job allocates the same
        # blocks in every command, not only within one.
        self._environment = {
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
            fork_server.PRELOAD_VARIABLE: "\n".join(leading.statements),
            fork_server.SELF_CONTAINED_VARIABLE: "yes" if leading.is_self_contained else "",
            # Else torch.cuda.is_available(), which packages call as they are imported, initializes CUDA.
            "PYTORCH_NVML_BASED_CUDA_CHECK": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),
        }

    def start(self) -> None:
        """Begin to import torch in another process, so that it is there when the first job needs it. Do not wait."""
        fork_server.start(self._environment)

    def inspect(self, job: Job) -> Inspection:
        """Return what the device supports and how the workload describes itself.

        Raises:
            BadInput: this machine has no such device, or the workload cannot be loaded.
            TargetFailed: loading the workload's data failed, or importing the workload and loading its data took
                longer than the job's timeout.
        """
        rank = Rank(count=job.nproc, local_count=job.nproc)
        (result,) = self._in_fresh_processes("inspect", job, [rank], self._note)
        inspection = inspection_of(job, result)
        self._log_notes()
        return inspection

    def _note(self, event: Event) -> None:
        if isinstance(event, Noted):
            self._notes.append(event.text)

    def _log_notes(self) -> None:
        """Log what the first inspection that succeeds has noted."""
        if self._notes and not self._has_logged_notes:
            _log.warning("%s", self._notes[-1])
            self._has_logged_notes = True

    def run(
        self,
        job: Job,
        on_event: Callable[[Event], None] = ignore,
        *,
        folder: JobFolder | None = None,
    ) -> JobResult:
        """Run a resolved job, and return its outcome.

        Args:
            job: the job, with nothing left open.
            on_event: called in this process as events arrive.
            folder: where the job writes files for its MLflow run; whoever gets their event moves them.

        Raises:
            KeyboardInterrupt: raised again once the job's processes are dead.
            BadInput: the workload cannot be loaded (it was changed since it was inspected).
        """
        return second_opinion(job, self._run_all_ranks("run", job, on_event, folder), self.measure)

    def measure(self, job: Job) -> JobResult:
        """Probe a job's batch without a limit, but with the meter of its budget, and return what it takes."""
        return self._run_all_ranks("measure", dataclasses.replace(job, probe=True))

    def dtypes(self, job: Job) -> DtypesReport | JobResult:
        """Return which operation of a resolved job's model runs in which dtype; or the JobResult of a failure."""
        result = self._in_fresh_processes("dtypes", job)[0]
        assert isinstance(result, DtypesReport | JobResult)
        return result

    def plan(self, job: Job, task: PlanTask, *, processes: int = 1) -> PlanReport:
        """Return the predicted memory of a resolved job's training step, from so many processes side by side.

        Raises:
            BadInput: the step cannot run on fake tensors.
        """
        results = self._in_fresh_processes(task, job, ranks_of_one_machine(processes))
        for result in results:
            if isinstance(result, JobResult):
                raise failure(job, result)
        plans = {plan.precision: plan for part in results if isinstance(part, PlanReport) for plan in part.precisions}
        return PlanReport(workload=job.workload, precisions=tuple(plans[name] for name in task.precisions))

    def forecast(self, job: Job, task: ForecastTask) -> Forecasts:
        """Return where memory is predicted to end, or why that cannot be said. Takes half a minute at most."""
        job = dataclasses.replace(job, job_timeout_seconds=_FORECAST_SECONDS)
        result = self._in_fresh_processes(task, job)[0]
        if isinstance(result, Forecasts):
            return result
        if isinstance(result, JobResult) and result.status is not JobStatus.TIMED_OUT:
            return Forecasts(reason=result.message)
        return Forecasts(reason=f"it was not made within {_FORECAST_SECONDS:g} s")

    def _import_seconds(self) -> float | None:
        """Return how long the fork server's imports may take: None where nothing could be left to the jobs."""
        statements = self._environment[fork_server.PRELOAD_VARIABLE].splitlines()
        return None if all(map(leading_imports.is_of_required_package, statements)) else _IMPORT_SECONDS

    def _run_all_ranks(
        self, task: str, job: Job, on_event: Callable[[Event], None] = ignore, folder: JobFolder | None = None
    ) -> JobResult:
        """Run a job in as many processes as it asks for, and merge their outcomes. Only the first one sends events."""
        with processes.scratch_folder() if job.nproc > 1 else nullcontext() as scratch:
            rendezvous = f"file://{scratch}/rendezvous" if scratch is not None else ""
            all_ranks = ranks_of_one_machine(job.nproc, rendezvous)
            results = self._in_fresh_processes(task, job, all_ranks, on_event, folder)
        job_results = [result for result in results if isinstance(result, JobResult | None)]
        return ranks.merge_job_results(job_results)

    def _in_fresh_processes(
        self,
        task: Task,
        job: Job,
        all_ranks: Sequence[Rank] = (ALONE,),
        on_event: Callable[[Event], None] = ignore,
        folder: JobFolder | None = None,
        beside: Sequence[job_processes.Source] = (),
    ) -> list[job_processes.Result | None]:
        """Return each process's result, and after them those of other commands that train the job with them.

        It is None for one that was ended because another had failed.

        A fork server that has touched CUDA, because a package does that when it is imported, is of no use to any job on
        a GPU: another one is started, which leaves those imports to the jobs. So is one whose imports do not end.
        """
        try:
            return self._in_processes_of_one_server(task, job, all_ranks, on_event, folder, beside)
        except (CudaTouched, fork_server.ImportsTakeTooLong) as error:
            self._leave_imports_to_jobs(error)
        return self._in_processes_of_one_server(task, job, all_ranks, on_event, folder, beside)

    def _leave_imports_to_jobs(self, error: CudaTouched | fork_server.ImportsTakeTooLong) -> None:
        """Have the next fork server import no module that only the workload needs, or raise the error if there is none.

        Args:
            error: what is wrong with the fork server that runs.
        """
        statements = self._environment[fork_server.PRELOAD_VARIABLE].splitlines()
        kept = [statement for statement in statements if leading_imports.is_of_required_package(statement)]
        if kept == statements:
            raise error
        self._environment[fork_server.PRELOAD_VARIABLE] = "\n".join(kept)
        left = "; ".join(statement for statement in statements if statement not in kept)
        if isinstance(error, CudaTouched):
            _log.warning(
                "%s initializes CUDA, after which no job on a GPU can be forked; each job imports that itself, "
                "which takes seconds each time: make it look for devices later, when it is used", left,
            )  # fmt: skip
        else:
            _log.warning("%s has not ended after %g s; each job runs that itself", left, _IMPORT_SECONDS)
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
        oom_kills = cgroup.oom_kills()  # tells the kernel's SIGKILL from anyone else's
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
            self._has_killed = True  # should this end by an exception
            # Not from `started` on: the first process waits until torch is imported.
            job_processes.listen([*running, *beside], on_event, _deadline(time.monotonic(), job.job_timeout_seconds))
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
    """Return an inspection. Raises TargetFailed if its process has failed."""
    if isinstance(result, Inspection):
        return result
    assert isinstance(result, JobResult)
    raise failure(job, result)


def failure(job: Job, job_result: JobResult, where: str = "") -> TargetFailed:
    """Return the error that a failed outcome is; `where` names its process, after what went wrong."""
    return TargetFailed(f"{job.workload}: {job_result.message}{where}", detail=job_result.traceback)


def _deadline(started: float, timeout_seconds: float | None) -> float | None:
    """Return when a job has to be over, by `time.monotonic`."""
    return None if timeout_seconds is None else started + timeout_seconds


def missing_preload() -> str:
    """Return what kept the fork server from importing the required modules, or "".

    multiprocessing ignores an ImportError there. Without this check a renamed module would cost seconds in each
    process, and nobody would know. A process has one fork server: where the user's own program has started it before,
    for something else, each job imports the modules itself.
    """
    if fork_server.PRELOAD_VARIABLE not in os.environ:
        importlib.import_module(_PRELOAD_MODULE)
    preload = sys.modules.get(_PRELOAD_MODULE)
    if preload is None:
        return (
            f"got a fork server without {_PRELOAD_MODULE}, expected one that has imported it; install amp_track, so "
            "that a new Python process can import it"
        )
    if preload.failure:
        return _CANNOT_IMPORT.format(preload.failure)
    return ""


def _import_before_torch(job: Job, task: Task, sender: Sender) -> str:
    """Import the workload, and then what every job needs; return why that fails, or ""."""
    started = time.monotonic()
    workload_import.import_ahead(job.workload)
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
    task: Task,
    job: Job,
    folder: JobFolder | None,
    rank: Rank,
    after_a_kill: bool,
    connection: Connection[Any, Any],
) -> None:
    """Do a task in the fresh process, where torch is already imported, and leave it at once."""
    _do(task, job, folder, rank, after_a_kill, Sender(connection))
    # Not as Python does, which waits for the threads and processes that the workload has left. What it shares between
    # processes is removed all the same, which multiprocessing complains of otherwise.
    try:
        multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
        sys.stdout.flush()  # which the workload may have closed
        sys.stderr.flush()
    finally:
        os._exit(0)


def _do(
    task: Task,
    job: Job,
    folder: JobFolder | None,
    rank: Rank,
    after_a_kill: bool,
    sender: Sender,
) -> None:
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
                "got a fork server that has initialized CUDA, expected one that has not, since no process forked from "
                "it can use a GPU; look for what does so when Python starts or when torch is imported"
            )
        )
        return
    match task:
        case "run":
            job_main.run(job, sender, folder, rank, enforce_budget=True, after_a_kill=after_a_kill)
        case "measure":
            job_main.run(job, sender, None, rank, enforce_budget=False, after_a_kill=after_a_kill)
        case "inspect":
            job_main.inspect(job, sender, rank)
        case "dtypes":
            job_main.dtypes(job, sender)
        case PlanTask():
            from amp_track.runner import plan_main

            plan_main.plan(job, task, rank, sender)
        case ForecastTask():
            from amp_track.runner import plan_main

            plan_main.forecast(job, task, sender)
        case _:
            assert_never(task)  # type: ignore[arg-type]
