"""The outcomes of the processes that trained a job together are merged into one. Pure."""

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
"""Parts of the messages of a process that fails because another one has left."""


def merge_job_results(job_results: Sequence[JobResult | None]) -> JobResult:
    """Return the outcome of a job from the outcomes of its processes.

    If all fit, it is the first one's with the fields that the table of metrics merges, such as the peaks of memory.
    Else it is the cause: running out of memory comes first, and a process that fails because it has lost another one
    comes last.

    Args:
        job_results: by rank; None for a process that was ended before it had one.
    """
    failed = [
        (rank, job_result)
        for rank, job_result in enumerate(job_results)
        if job_result is not None and not job_result.fits
    ]
    if failed:
        rank, cause = min(failed, key=lambda each: _blame_rank(each[1]))
        if len(job_results) == 1 or cause.status is JobStatus.TIMED_OUT:  # time ran out for all of them
            return cause
        return dataclasses.replace(cause, message=f"{cause.message} in process {rank} of {len(job_results)}")
    whole = [job_result for job_result in job_results if job_result is not None]
    assert len(whole) == len(job_results), "a process is ended early only because another one has failed"

    return dataclasses.replace(whole[0], **merged_fields(whole))


def is_conclusive(job_result: JobResult) -> bool:
    """Return whether no outcome of another process could change the verdict."""
    return not job_result.fits and _blame_rank(job_result) == 0


def _blame_rank(job_result: JobResult) -> int:
    """Return how sure it is that this outcome is the cause of the others; 0 is the surest."""
    if job_result.status is not JobStatus.CRASHED:
        return 0
    lost_a_peer = any(text in job_result.message for text in _LOST_A_PEER)
    return 2 if lost_a_peer else 1
