"""Diagnose a job process that died without a result, and a crash that does not name its cause.

Some libraries do not check their allocations and die of a null pointer. Others report every failure with the same
words, a failed allocation included. Such a job runs again, without its budget and with one sample, to tell too little
memory, a kernel's limit and an unsupported precision apart.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable

from amp_track.config.job import Job
from amp_track.records.result import JobResult, JobStatus
from amp_track.records.units import format_bytes
from amp_track.runner import job_processes

_NEARLY_THE_BUDGET = 0.95
"""A job that crashes within its budget, and takes more than this fraction of it without a limit, ran out of memory."""
_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGABRT")
"""A failed allocation that nobody checks ends in one of these: two of 75 jobs over a CPU budget did."""
_KERNEL_FAILURES = (
    # oneDNN: it reports every failure so, a failed allocation and a dtype that the CPU has no kernel for among them.
    "could not create a primitive",
    "could not execute a primitive",
    "could not create a memory object",
    # cuDNN: each engine's failed allocation is swallowed, and the next one tried (pytorch#108645).
    "was unable to find an engine",
    "CUDNN_STATUS_NOT_SUPPORTED",
    # Handles are made when they are first needed, with memory that is not torch's.
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    # Dtypes that a device has no kernel for.
    "CUBLAS_STATUS_NOT_SUPPORTED",
    "not implemented for 'Half'",
    "not implemented for 'BFloat16'",
)
"""Messages of kernels that could not run, each as the library that raises it spells it."""
_ALWAYS_POSSIBLE = ("fp32", "tf32")
"""Modes without autocast: a kernel that fails in float32 at one sample is a bug of the workload or of the machine."""


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


def second_opinion(job: Job, crash: JobResult, measure: Callable[[Job], JobResult]) -> JobResult:
    """Return what an outcome really was: itself, unless it is a crash that the device may have caused.

    A workload's own exception, exit or SIGKILL stays what it is.

    Args:
        job: the resolved job.
        crash: its outcome.
        measure: runs a short job without a limit.
    """
    is_kernel_failure = _is_kernel_failure(crash)
    if crash.status is not JobStatus.CRASHED or not (is_kernel_failure or crash.signal in _SIGNALS):
        return crash
    unlimited = None
    if job.memory_budget_bytes is not None:
        unlimited = measure(job)
        if unlimited.status is JobStatus.OOM:  # not even the whole memory is enough
            return unlimited
        if unlimited.fits:
            return _with_and_without_the_budget(crash, unlimited, job.memory_budget_bytes)
        if unlimited.status is not JobStatus.CRASHED:  # it took too long to tell
            return crash
    if not is_kernel_failure:  # without a budget a null pointer is a bug as likely as a failed allocation
        return crash
    return _with_few_samples(job, crash, unlimited, measure)


def _is_kernel_failure(job_result: JobResult) -> bool:
    return job_result.status is JobStatus.CRASHED and any(text in job_result.message for text in _KERNEL_FAILURES)


def _with_and_without_the_budget(crash: JobResult, unlimited: JobResult, budget_bytes: int) -> JobResult:
    """Call it out of memory if the same batch takes the budget, or nearly as much, where nothing limits it.

    Nearly, because such a library may ask for more at once when it can.
    """
    needed = unlimited.peak_bytes
    if needed is None or needed <= _NEARLY_THE_BUDGET * budget_bytes:
        return crash
    reason = f"{crash.message} within the budget; without it the job runs and takes {format_bytes(needed)}"
    return dataclasses.replace(
        crash, status=JobStatus.OOM, message=reason, train_peak_allocated_bytes=needed, peak_bytes=needed
    )


def _with_few_samples(
    job: Job, crash: JobResult, unlimited: JobResult | None, measure: Callable[[Job], JobResult]
) -> JobResult:
    """Tell a batch that is too large from a precision that is not possible, by whether one sample runs, or two.

    Two where one is refused for another reason, as batch norm refuses it. A batch that fails under no limit while fewer
    samples run is too large for a kernel, unless the limit was the memory that is free.
    """
    for batch_size in (1, 2):
        known = unlimited if batch_size == job.batch_size else None
        few = known or measure(dataclasses.replace(job, batch_size=batch_size))
        if few.fits:
            status = JobStatus.OOM if job.memory_budget_bytes is None else JobStatus.KERNEL_LIMIT
            samples = "one sample runs" if batch_size == 1 else f"{batch_size} samples run"
            return dataclasses.replace(crash, status=status, message=f"{crash.message}; {samples}")
        if _is_kernel_failure(few):
            if job.precision in _ALWAYS_POSSIBLE:
                return crash
            return dataclasses.replace(few, status=JobStatus.UNSUPPORTED)
    return crash
