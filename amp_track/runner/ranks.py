"""Merge the results of a job's ranks into one. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from amp_track.records.metrics import merged_fields
from amp_track.records.result import JobResult, JobStatus

_LOST_A_PEER = (
    "Connection closed by peer", "Connection reset by peer", "connectFullMesh failed", "DistBackendError",
    "DistNetworkError", "/gloo/",
)  # fmt: skip
"""Parts of the messages of a rank that fails because another rank ended."""


def merge_job_results(job_results: Sequence[JobResult | None]) -> JobResult:
    """Return the result of a job from the results of its ranks; None for a process that was killed before it had one.

    If all fit, it is that of rank 0 with the merged fields of the metric table, such as peak memory. Otherwise it is
    the most likely cause: out of memory first, a rank that fails because it lost another one last.
    """
    complete = [job_result for job_result in job_results if job_result is not None]
    cause = min(complete, key=_blame_rank)
    if cause.fits:
        assert len(complete) == len(job_results), "a rank is killed early only if another one failed"
        return dataclasses.replace(complete[0], **merged_fields(complete))
    if len(job_results) == 1 or cause.status is JobStatus.TIMED_OUT:  # all ranks time out together
        return cause
    rank = next(rank for rank, job_result in enumerate(job_results) if job_result is cause)
    return dataclasses.replace(cause, message=f"{cause.message} in process {rank} of {len(job_results)}")


def is_conclusive(job_result: JobResult) -> bool:
    """Return whether no result of another rank can change the status of the job."""
    return _blame_rank(job_result) == 0


def _blame_rank(job_result: JobResult) -> int:
    """Return the priority of this result as the cause of a failure; 0 is the most certain, 3 is no failure."""
    if job_result.fits:
        return 3
    if job_result.status is not JobStatus.CRASHED:
        return 0
    lost_a_peer = any(text in job_result.message for text in _LOST_A_PEER)
    return 2 if lost_a_peer else 1
