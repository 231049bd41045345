"""One-line messages about a failed job: a crash, a batch that does not fit, or no batch that fits."""

from __future__ import annotations

from collections.abc import Mapping

from amp_track.config.job import Job
from amp_track.records.errors import TargetFailed
from amp_track.records.result import JobResult, JobStatus
from amp_track.records.units import format_bytes
from amp_track.report.max_batch import impossible_precisions
from amp_track.report.wording import not_possible
from amp_track.results.max_batch import PrecisionResult
from amp_track.session.session import Session


def raise_on_crash(job: Job, job_result: JobResult) -> None:
    """Raise TargetFailed if the job crashed or timed out."""
    if job_result.status in (JobStatus.CRASHED, JobStatus.TIMED_OUT):
        raise TargetFailed(
            f"{job.workload}: {job_result.message} at {job.precision}, batch {job.batch_size}",
            detail=job_result.traceback,
        )


def why_it_does_not_fit(session: Session, job: Job, job_result: JobResult) -> str:
    """Return why a job did not fit, and how many bytes it needs. May run it again without its memory budget."""
    if job_result.status is JobStatus.OVER_DATASET:
        return job_result.message
    if job_result.status is JobStatus.KERNEL_LIMIT:
        return f"batch {job.batch_size} exceeds the limit of a kernel on this device: {job_result.message}"
    if job_result.status is JobStatus.UNSUPPORTED:
        return f"{not_possible(job.precision, job_result.message)}; choose another --precision"
    needed = session.bytes_needed(job)
    where = f" in {job_result.phase}" if job_result.phase else ""
    more = (
        f"{_it_needs(session)} {needed:,} bytes ({format_bytes(needed)})" if needed is not None else job_result.message
    )
    return f"out of memory{where}: {job.precision} at batch {job.batch_size} does not fit {limit_in_words(job)}; {more}"


def _it_needs(session: Session) -> str:
    """Return `it needs`, or `it needs at most` if an unlimited caching allocator keeps memory that it could free."""
    return "it needs" if session.inspection.hardware.kind == "cpu" else "it needs at most"


def why_nothing_fits(budget_bytes: int, fits: Mapping[str, PrecisionResult]) -> str:
    """Return that not even one sample fits, and how many bytes each precision lacks."""
    needs = ", ".join(
        f"{name} {fitted.bytes_needed:,} bytes ({fitted.bytes_needed - budget_bytes:,} over the limit)"
        for name, fitted in fits.items()
        if fitted.bytes_needed is not None and fitted.bytes_needed > budget_bytes
    )
    impossible = impossible_precisions(fits)
    if len(impossible) == len(fits):
        return "; ".join(impossible)
    nothing = f"not even one sample fits {format_bytes(budget_bytes)}" + (f"; it needs: {needs}" if needs else "")
    return "; ".join([nothing, *impossible])


def limit_in_words(job: Job) -> str:
    """Return `the budget of 64 MiB` or `the free memory`."""
    budget = job.memory_budget_bytes
    return f"the budget of {format_bytes(budget)}" if budget is not None else "the free memory"
