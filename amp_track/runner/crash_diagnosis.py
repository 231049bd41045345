"""Say what a job came to whose process, or a loader process of it, has ended without a result."""

from __future__ import annotations

import dataclasses
import signal

from amp_track.records.result import JobResult, JobStatus
from amp_track.runner import job_processes


def job_result_of_death(child: job_processes.Child, oom_kills: int, wall_seconds: float) -> JobResult:
    """Return the outcome of a process that has died, or that can no longer report one.

    Args:
        child: the process.
        oom_kills: how many processes of this control group the kernel has killed for memory meanwhile.
        wall_seconds: how long it ran.
    """
    if child.has_lost_its_server:
        message = "the process that jobs are forked from was killed, and this job with it"
        return JobResult(status=JobStatus.CRASHED, message=message, wall_seconds=wall_seconds)
    exit_code = child.exit_code
    if exit_code is None:
        message = (
            "the job's process closed its connection to this command, or wrote something else to it, and went on; "
            "close only files that the workload has opened"
        )
        return JobResult(status=JobStatus.CRASHED, message=message, wall_seconds=wall_seconds)
    killed_by = _signal_name(-exit_code) if exit_code < 0 else ""
    if killed_by == "SIGKILL" and oom_kills > 0:
        status, message = JobStatus.OOM, "killed by the kernel for memory"
    else:
        how = f"was killed by {killed_by}" if killed_by else f"exited with code {exit_code}"
        status, message = JobStatus.CRASHED, f"the job's process {how}"
    return JobResult(status=status, message=message, signal=killed_by, wall_seconds=wall_seconds)


def _signal_name(number: int) -> str:
    """Return `SIGKILL` for 9, and the number of a signal that Python has no name for."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def oom_if_its_loader_was_killed(result: job_processes.Result | None, oom_kills: int) -> job_processes.Result | None:
    """Turn a crash into out of memory if the kernel killed one of the job's loader processes for memory.

    The job then reports an error of the DataLoader.
    """
    if (
        oom_kills
        and isinstance(result, JobResult)
        and result.message.startswith("RuntimeError: DataLoader worker (pid")
    ):
        message = f"killed by the kernel for memory: {result.message}"
        return dataclasses.replace(result, status=JobStatus.OOM, message=message)
    return result
