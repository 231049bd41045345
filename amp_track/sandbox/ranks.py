"""Merge the outcomes of the processes that trained a job together into one. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from amp_track.records.outcome import Outcome, Verdict

_LOST_A_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "DistBackendError",
    "DistNetworkError",
    "/gloo/",
)
"""Texts in the messages of a process that fails because another one has ended."""


def merge_outcomes(outcomes: Sequence[Outcome | None]) -> Outcome:
    """Merge the outcomes of a job's processes, by rank; None stands for a process that was ended before it reported.

    If all succeeded, the result is the first process's outcome with the largest peaks of memory. Otherwise it is the
    cause of the failure: running out of memory before anything else, and a process that failed because it had lost
    another one last.
    """
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None and not outcome.fits]
    if failed:
        rank, cause = min(failed, key=lambda each: _blame_rank(each[1]))
        if len(outcomes) == 1 or cause.verdict is Verdict.TIMED_OUT:  # time ran out for all of them
            return cause
        return dataclasses.replace(cause, message=f"{cause.message} in process {rank} of {len(outcomes)}")
    whole = [outcome for outcome in outcomes if outcome is not None]
    assert len(whole) == len(outcomes), "a process is ended early only if another one has failed"
    return dataclasses.replace(
        whole[0],
        waited_seconds=max(outcome.waited_seconds or 0.0 for outcome in whole),
        max_allocated_bytes=max(outcome.max_allocated_bytes or 0 for outcome in whole) or None,
        max_memory_bytes=max(outcome.max_memory_bytes or 0 for outcome in whole) or None,
        eval_max_allocated_bytes=max(outcome.eval_max_allocated_bytes or 0 for outcome in whole) or None,
        max_resident_bytes=max(outcome.max_resident_bytes or 0 for outcome in whole) or None,
    )


def is_conclusive(outcome: Outcome) -> bool:
    """True if no other process could change the verdict."""
    return not outcome.fits and _blame_rank(outcome) == 0


def _blame_rank(outcome: Outcome) -> int:
    """Return how unlikely an outcome is to be the cause of the job's failure: 0 for the surest cause."""
    if outcome.verdict is not Verdict.CRASHED:
        return 0
    lost_a_peer = any(text in outcome.message for text in _LOST_A_PEER)
    return 2 if lost_a_peer else 1
