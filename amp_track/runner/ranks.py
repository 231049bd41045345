"""Merge the results of a job's ranks into one. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from amp_track.records.metrics import merged_fields
from amp_track.records.result import JobResult, JobStatus

_LOST_A_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "connectFullMesh failed",
    "DistBackendError",
    "DistNetworkError",
    "/gloo/",
)
"""Parts of the messages of a rank that fails because another rank ended."""


def merge_job_results(job_results: Sequence[JobResult | None]) -> JobResult:
    """Return the result of a job from the results of its ranks.

    If all fit, it is that of rank 0 with the merged fields of the metric table, such as peak memory. Otherwise it is
    the most likely cause: out of memory first, a rank that fails because it lost another one last.

    Args:
        job_results: by rank; None for a process that was killed before it had a result.
    """
    failed = [
        (rank, job_result)
        for rank, job_result in enumerate(job_results)
        if job_result is not None and not job_result.fits
    ]
    if failed:
        rank, cause = min(failed, key=lambda each: _blame_rank(each[1]))
        if len(job_results) == 1 or cause.status is JobStatus.TIMED_OUT:  # all ranks time out together
            return cause
        return dataclasses.replace(cause, message=f"{cause.message} in process {rank} of {len(job_results)}")
    complete = [job_result for job_result in job_results if job_result is not None]
    assert len(complete) == len(job_results), "a rank is killed early only if another one failed"
    return dataclasses.replace(complete[0], **merged_fields(complete))


def is_conclusive(job_result: JobResult) -> bool:
    """Return whether no result of another rank can change the status of the job."""
    return not job_result.fits and _blame_rank(job_result) == 0


def _blame_rank(job_result: JobResult) -> int:
    """Return the priority of this result as the cause of the failure; 0 is the most certain."""
    if job_result.status is not JobStatus.CRASHED:
        return 0
    lost_a_peer = any(text in job_result.message for text in _LOST_A_PEER)
    return 2 if lost_a_peer else 1
