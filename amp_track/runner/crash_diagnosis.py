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
from amp_track.config.precisions import BY_NAME
from amp_track.records.result import JobResult, JobStatus
from amp_track.records.units import format_bytes
from amp_track.runner import job_processes

_NEARLY_THE_BUDGET = 0.95
"""A crash counts as out of memory if the job needs more than this fraction of its budget when nothing limits it.

Not the full budget, because without a limit such a library may allocate in larger pieces."""
_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGABRT")
"""An unchecked failed allocation ends in one of these: measured for 2 of 75 jobs over a CPU budget."""
_KERNEL_FAILURES = (
    # oneDNN reports every failure like this, including a failed allocation and a dtype without a kernel on this CPU.
    "could not create a primitive",
    "could not execute a primitive",
    "could not create a memory object",
    # cuDNN ignores the failed allocation of an engine and tries the next one (pytorch#108645).
    "was unable to find an engine",
    "CUDNN_STATUS_NOT_SUPPORTED",
    # Handles are created at first use, in memory outside of torch's allocator.
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    # Dtypes without a kernel on the device.
    "CUBLAS_STATUS_NOT_SUPPORTED",
    "not implemented for 'Half'",
    "not implemented for 'BFloat16'",
)
"""Messages of kernels that could not run, as the libraries spell them."""


def job_result_of_death(child: job_processes.Child, oom_kills: int, wall_seconds: float) -> JobResult:
    """Return the result of a process that died, or that can no longer report its result.

    `oom_kills` processes of this control group were killed by the kernel for memory during the job.
    """
    status, killed_by, exit_code = JobStatus.CRASHED, "", child.exit_code
    if child.has_lost_its_server:
        message = "the fork server was killed, which ended this job"
    elif exit_code is None:
        message = (
            "the job process closed or corrupted its pipe to this command and kept running; close only files that the "
            "workload opened"
        )
    elif exit_code >= 0:
        message = f"the job process exited with code {exit_code}"
    else:
        number = -exit_code
        killed_by = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        message = f"the job process was killed by {killed_by}"
        if killed_by == "SIGKILL" and oom_kills > 0:
            status, message = JobStatus.OOM, "killed by the kernel for memory"
    return JobResult(status=status, message=message, signal=killed_by, wall_seconds=wall_seconds)


def oom_if_its_loader_was_killed(result: job_processes.Result | None, oom_kills: int) -> job_processes.Result | None:
    """Turn a crash into out of memory if the kernel killed a loader process of the job for memory.

    The job itself reports only an error of the DataLoader.
    """
    is_of_loader = isinstance(result, JobResult) and result.message.startswith("RuntimeError: DataLoader worker (pid")
    if not oom_kills or not is_of_loader:
        return result
    assert isinstance(result, JobResult)
    message = f"killed by the kernel for memory: {result.message}"
    return dataclasses.replace(result, status=JobStatus.OOM, message=message)


def second_opinion(job: Job, crash: JobResult, measure: Callable[[Job], JobResult]) -> JobResult:
    """Return the result of a resolved job, with a better status if it is a crash that the device may have caused.

    An exception of the workload, its exit and a SIGKILL keep their status. `measure` runs a short job without a limit.
    """
    is_kernel_failure = _is_kernel_failure(crash)
    if crash.status is not JobStatus.CRASHED or not (is_kernel_failure or crash.signal in _SIGNALS):
        return crash
    unlimited = None
    if job.memory_budget_bytes is not None:
        unlimited = measure(job)
        if unlimited.status is JobStatus.OOM:  # all memory of the device is not enough
            return unlimited
        if unlimited.fits:
            needed = unlimited.peak_bytes
            if needed is None or needed <= _NEARLY_THE_BUDGET * job.memory_budget_bytes:
                return crash
            message = (
                f"{crash.message} within the budget; without a budget the job runs and needs {format_bytes(needed)}"
            )
            return dataclasses.replace(
                crash, status=JobStatus.OOM, message=message, train_peak_allocated_bytes=needed, peak_bytes=needed
            )
        if unlimited.status is not JobStatus.CRASHED:  # it timed out, so the cause stays unknown
            return crash
    if not is_kernel_failure:  # without a budget, a null pointer may as well be a bug
        return crash
    return _with_few_samples(job, crash, unlimited, measure)


def _is_kernel_failure(job_result: JobResult) -> bool:
    return job_result.status is JobStatus.CRASHED and any(text in job_result.message for text in _KERNEL_FAILURES)


def _with_few_samples(
    job: Job, crash: JobResult, unlimited: JobResult | None, measure: Callable[[Job], JobResult]
) -> JobResult:
    """Distinguish a batch that is too large from a precision that is not supported: run one sample, or two.

    Two samples are for models that reject one, such as those with batch norm. If fewer samples run, a batch that fails
    without a limit is too large for a kernel; if the job had no budget, it is out of memory.
    """
    for batch_size in (1, 2):
        known = unlimited if batch_size == job.batch_size else None
        few = known or measure(dataclasses.replace(job, batch_size=batch_size))
        if few.fits:
            status = JobStatus.OOM if job.memory_budget_bytes is None else JobStatus.KERNEL_LIMIT
            samples = "one sample runs" if batch_size == 1 else f"{batch_size} samples run"
            return dataclasses.replace(crash, status=status, message=f"{crash.message}; {samples}")
        if _is_kernel_failure(few):
            if not BY_NAME[job.precision].autocasts:  # a float32 kernel exists: it is a bug of workload or machine
                return crash
            return dataclasses.replace(few, status=JobStatus.UNSUPPORTED)
    return crash
