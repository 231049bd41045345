"""Decide what a crash really was that names no cause: too little memory, a kernel's limit, or a precision not possible.

Some libraries do not check their allocations and die of a null pointer; others report every failure, a failed
allocation among them, with the same words. The same job is then run again: without its limit, and with one sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from amp_track.config.job import Job
from amp_track.records.result import JobResult, JobStatus
from amp_track.records.units import format_bytes

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
