"""Run a Job in fresh processes under its budget, stream its events, and return a JobResult even if a process dies.

In a fresh process memory is clean and peaks belong to this job. A process that dies is a JobResult and does not end a
search. This module does not import torch: the processes are forked from a server that has imported it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from amp_track.config.inspection import Inspection
from amp_track.config.job import ALONE, OUTPUT, Job, JobFolder, Rank, ranks_of_one_machine
from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import TargetFailed, printable, summary
from amp_track.records.events import Event, Launched, Noted
from amp_track.records.plan import Forecast, Forecasts, ForecastTask, ForecastTraces, PlanReport, PlanTask, StepTrace
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner import crash_diagnosis, fork_server, job_processes, leading_imports, ranks
from amp_track.runner.process_setup import CudaTouched, Task
from amp_track.training.devices import cgroup
from amp_track.workers import processes

_FORECAST_SECONDS = 30.0
_PLANNED_PRECISIONS = 3
"""The number of precisions that allocate differently."""
_LAST_LINES = 20
"""The lines of a failed command's output that are shown: it says there what is wrong, such as its usage."""

_log = logging.getLogger("amp_track.runner")


def _last_lines(file: Path) -> str:
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    return printable("\n".join(lines[-_LAST_LINES:]))


def ignore(event: Event) -> None:
    """Ignore an event."""


class JobRunner:
    """Runs the jobs of one workload in fresh processes.

    Args:
        workload: the file or module of the workload. The installed packages that it imports are imported once for all
            jobs.
        steps_back: lower the priority of this process permanently, after the inspection, so that its jobs run first.
        huge_pages: let malloc ask for huge pages, because the jobs have a memory budget.
    """

    def __init__(self, workload: str, *, steps_back: bool = False, huge_pages: bool = False) -> None:
        self._steps_back = steps_back
        self._has_killed = False
        self._server = fork_server.Setup(leading_imports.leading_imports(workload), huge_pages)
        self._has_logged_note = False

    def start(self, *, inspects: bool = False) -> None:
        """Start to import torch in the fork server, ahead of the first job, or of an inspection. Do not wait."""
        fork_server.start(self._server, inspects=inspects)

    def inspect(self, job: Job) -> Inspection:
        """Return what the device supports and what the workload declares.

        Raises:
            BadInput: this machine has no such device, or the workload cannot be loaded.
            TargetFailed: the data of the workload cannot be loaded, or importing the workload and loading its data
                exceeded the timeout of the job.
        """
        rank = Rank(count=job.nproc, local_count=job.nproc)
        events: list[Event] = []
        (result,) = self.in_fresh_processes("inspect", job, [rank], events.append)
        inspection = inspection_of(job, result)
        self._log_note(events)
        return inspection

    def _log_note(self, events: Sequence[Event]) -> None:
        """Log the note of the first successful inspection."""
        for event in events:
            if isinstance(event, Noted) and not self._has_logged_note:
                _log.warning("%s", event.text)
                self._has_logged_note = True

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
        """Run a job without a limit, and return the result, measured by the meter of its budget.

        Only a job with a number of steps runs as it is: memory may grow over its steps. Any other is probed.
        """
        return self._run_all_ranks("measure", dataclasses.replace(job, probe=job.probe or job.steps is None))

    def dtypes(self, job: Job) -> DtypesReport | JobResult:
        """Return the dtypes of the operations in the model of a resolved job, or the JobResult of a failure."""
        result = self.in_fresh_processes("dtypes", job)[0]
        assert isinstance(result, DtypesReport | JobResult)
        return result

    def plan(self, job: Job, task: PlanTask) -> PlanReport:
        """Predict the memory of a resolved job's training step, in parallel processes.

        Raises BadInput if the step cannot run on fake tensors.
        """
        results = self.in_fresh_processes(task, job, _ranks_of_a_plan(task.precisions))
        for result in results:
            if isinstance(result, JobResult):
                raise failure(job, result)
        plans = {plan.precision: plan for part in results if isinstance(part, PlanReport) for plan in part.precisions}
        return PlanReport(workload=job.workload, precisions=tuple(plans[name] for name in task.precisions))

    def forecast(self, job: Job, task: ForecastTask) -> Forecasts:
        """Predict the max batch at each precision, or return the reason why not.

        Parallel processes trace the step at two batch sizes, which takes at most half a minute.
        """
        from amp_track.memory_plan.predict import FORECAST_BATCHES, forecast_of  # late: of a search only

        job = dataclasses.replace(job, job_timeout_seconds=_FORECAST_SECONDS)
        traces: dict[tuple[str, ...], list[StepTrace]] = {}
        reasons: list[str] = []
        for result in self.in_fresh_processes(task, job, _ranks_of_a_plan(task.precisions, len(FORECAST_BATCHES))):
            if isinstance(result, ForecastTraces):
                for names, trace in result.by_precisions:
                    traces.setdefault(names, []).append(trace)
                reasons += filter(None, [result.reason])
            elif isinstance(result, JobResult):  # otherwise the process was killed because another one had failed
                late = f"the prediction took longer than {_FORECAST_SECONDS:g} s"
                reasons.append(late if result.status is JobStatus.TIMED_OUT else result.message)
        found: list[tuple[str, Forecast]] = []
        for names, of_one in traces.items():
            if len(of_one) < len(FORECAST_BATCHES):
                continue
            try:
                forecast = forecast_of(of_one, task)
            except Exception as error:  # a search does not need forecasts, so they cannot fail
                forecast = f"{names[0]}: {summary(error)}"
            if isinstance(forecast, Forecast):
                found += [(name, forecast) for name in names]
            else:
                reasons.append(forecast)
        return Forecasts(by_precision=tuple(found), reason=next(iter(reasons), ""))

    def _run_all_ranks(
        self, task: str, job: Job, on_event: Callable[[Event], None] = ignore, folder: JobFolder | None = None
    ) -> JobResult:
        """Run a job on all its ranks and merge their results. Only rank 0 sends events."""
        may_be_function = ":" in job.workload
        needs_folder = folder is None and bool(
            job.command or may_be_function
        )  # for files of a training that ends early
        with processes.scratch_folder() if job.nproc > 1 or needs_folder else nullcontext() as scratch:
            if needs_folder:
                folder = JobFolder(path=str(scratch), keep_plots=False)
            rendezvous = f"file://{scratch}/rendezvous" if scratch is not None else ""
            all_ranks = ranks_of_one_machine(job.nproc, rendezvous)
            results = self.in_fresh_processes(task, job, all_ranks, on_event, folder)
            merged = ranks.merge_job_results([result for result in results if isinstance(result, JobResult | None)])
            is_explained = merged.traceback or merged.status not in (JobStatus.CRASHED, JobStatus.TIMED_OUT)
            if job.command and folder is not None and not is_explained:
                merged = dataclasses.replace(merged, traceback=_last_lines(Path(folder.path) / OUTPUT))
        return merged

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
        """
        started = time.monotonic()
        oom_kills = cgroup.oom_kills()  # to distinguish SIGKILL by the kernel from other senders
        # Not yet for an inspection, after which another fork server may start: it would inherit the priority.
        steps_back = self._steps_back and task != "inspect"
        try:
            with contextlib.ExitStack() as stack:
                running = [
                    stack.enter_context(
                        job_processes.started(
                            self._server, task, job, folder, rank, self._has_killed, steps_back=steps_back
                        )
                    )
                    for rank in all_ranks
                ]
                self._has_killed = True  # in case an exception ends this block
                on_event(Launched())
                # The timeout does not start at `started`: the first process waits until torch is imported.
                seconds = math.inf if job.job_timeout_seconds is None else job.job_timeout_seconds
                job_processes.listen([*running, *beside], on_event, time.monotonic() + seconds)
                kills = cgroup.oom_kills() - oom_kills
                for child in running:
                    if child.has_died:
                        child.result = crash_diagnosis.job_result_of_death(child, kills, time.monotonic() - started)
                self._has_killed = any(child.has_died or child.result is None for child in running)
                results = [crash_diagnosis.oom_if_its_loader_was_killed(child.result, kills) for child in running]
                results += [result for source in beside for result in source.results]
        except (CudaTouched, fork_server.ImportsTakeTooLong) as error:
            self._leave_imports_to_jobs(error)
            return self.in_fresh_processes(task, job, all_ranks, on_event, folder, beside)
        has_failed = any(isinstance(result, JobResult) and not result.fits for result in results)
        if None in results and not has_failed:
            what = "importing it and loading its data took longer than" if task == "inspect" else "gave up after"
            timed_out = JobResult(
                status=JobStatus.TIMED_OUT,
                message=f"{what} {job.job_timeout_seconds:g} s (--job-timeout)",
                wall_seconds=time.monotonic() - started,
            )
            return [timed_out if result is None else result for result in results]
        return results

    def _leave_imports_to_jobs(self, error: Exception) -> None:
        """Replace a fork server in which a package initialized CUDA, so that no job can use a GPU, or does not end.

        The next one skips packages that only the workload needs. Raise the error if there are none.
        """
        imports = self._server.imports
        statements = imports.statements
        left = [each for each in statements if not leading_imports.is_of_required_package(each)]
        if not left:
            raise error
        if isinstance(error, CudaTouched):
            _log.warning(
                "%s initializes CUDA, so each job runs this import, which takes seconds. Delay the first use of CUDA "
                "until after the import.", "; ".join(left),
            )  # fmt: skip
        else:
            _log.warning("%s: %s, so each job runs it.", "; ".join(left), error)
        kept = tuple(each for each in statements if each not in left)
        self._server = dataclasses.replace(self._server, imports=dataclasses.replace(imports, statements=kept))
        fork_server.stop()


def _ranks_of_a_plan(precisions: Sequence[str], parts: int = 1) -> list[Rank]:
    """Return the processes of a memory plan with a number of parts per precision. Each uses a core for some seconds."""
    return ranks_of_one_machine(min(parts * min(len(precisions), _PLANNED_PRECISIONS), os.cpu_count() or 1))


def inspection_of(job: Job, result: job_processes.Result | None) -> Inspection:
    """Return the inspection. Raises TargetFailed if its process failed."""
    if isinstance(result, Inspection):
        return result
    assert isinstance(result, JobResult)
    raise failure(job, result)


def failure(job: Job, job_result: JobResult, where: str = "") -> TargetFailed:
    """Return the error for a failed result. `where` names its process and follows the message."""
    return TargetFailed(f"{job.workload}: {job_result.message}{where}", detail=job_result.traceback)
