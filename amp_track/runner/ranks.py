"""The outcomes of the processes that trained a job together are merged into one. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from amp_track.records.metrics import merged_fields
from amp_track.records.result import Outcome, Verdict

_LOST_A_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "connectFullMesh failed",
    "DistBackendError",
    "DistNetworkError",
    "/gloo/",
)
"""Parts of the messages of a process that fails because another one has left."""


def merge_outcomes(outcomes: Sequence[Outcome | None]) -> Outcome:
    """Return the outcome of a job from the outcomes of its processes.

    If all fit, it is the first one's with the fields that the table of metrics merges, such as the peaks of memory.
    Else it is the cause: running out of memory comes first, and a process that fails because it has lost another one
    comes last.

    Args:
        outcomes: by rank; None for a process that was ended before it had an outcome.
    """
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None and not outcome.fits]
    if failed:
        rank, cause = min(failed, key=lambda each: _blame_rank(each[1]))
        if len(outcomes) == 1 or cause.verdict is Verdict.TIMED_OUT:  # time ran out for all of them
            return cause
        return dataclasses.replace(cause, message=f"{cause.message} in process {rank} of {len(outcomes)}")
    whole = [outcome for outcome in outcomes if outcome is not None]
    assert len(whole) == len(outcomes), "a process is ended early only because another one has failed"

    return dataclasses.replace(whole[0], **merged_fields(whole))


def is_conclusive(outcome: Outcome) -> bool:
    """Return whether no outcome of another process could change the verdict."""
    return not outcome.fits and _blame_rank(outcome) == 0


def _blame_rank(outcome: Outcome) -> int:
    """Return how sure it is that this outcome is the cause of the others; 0 is the surest."""
    if outcome.verdict is not Verdict.CRASHED:
        return 0
    lost_a_peer = any(text in outcome.message for text in _LOST_A_PEER)
    return 2 if lost_a_peer else 1
