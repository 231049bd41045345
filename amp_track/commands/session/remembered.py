"""What a study remembers of the command that made it: enough to report it from the stores alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Json, TypeAdapter

from amp_track.commands.request import CompareOptions, FitOptions, Request, SearchOptions, Stores
from amp_track.commands.session.session import Session
from amp_track.commands.session.studies import TrackedStudy
from amp_track.records.errors import BadInput, StoreFailed
from amp_track.records.inspection import Inspection
from amp_track.records.job import Job
from amp_track.records.values import PRECISIONS
from amp_track.sandbox.sandbox import Sandbox

if TYPE_CHECKING:
    from amp_track.study.types import Study


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """A command that has worked on a study: what it was asked for, but for its stores, and what it found there."""

    command: Literal["fit", "search", "compare"]
    job: Job
    fit_options: FitOptions
    search_options: SearchOptions
    compare_options: CompareOptions | None
    inspection: Inspection
    precisions: tuple[str, ...]
    datasets: tuple[tuple[str, str], ...] = ()
    """By value that a comparison varies, the digest of the data at it."""
    experiment_id: str
    """Of the study's MLflow run."""

    def session(self, stores: Stores) -> Session:
        """Return the command's session, for what is read of the study: its sandbox has not been started."""
        request = Request(
            job=self.job,
            stores=stores,
            fit_options=self.fit_options,
            search_options=self.search_options,
            compare_options=self.compare_options,
        )
        return Session(request, Sandbox(self.job.workload), self.inspection, self.precisions)

    def compared(self, base: Session) -> dict[str, Session]:
        """Return a session for each value that a comparison varies."""
        return {
            value: Session(
                base.request,
                base.sandbox,
                dataclasses.replace(base.inspection, dataset_digest=digest),
                base.precisions,
            )
            for value, digest in self.datasets
        }


def keep(
    tracked_study: TrackedStudy,
    command: Literal["fit", "search", "compare"],
    *,
    compared: Mapping[str, Session] | None = None,
) -> None:
    """Let a study remember the command that works on it now; a fit of what was searched adds its precisions.

    Args:
        tracked_study: the part of the study whose trials come first.
        compared: the sessions of a comparison, by value.
    """
    from amp_track.study import storage

    session = tracked_study.session
    new = Remembered(
        command=command,
        job=session.request.job,
        fit_options=session.request.fit_options,
        search_options=session.request.search_options,
        compare_options=session.request.compare_options,
        inspection=session.inspection,
        precisions=session.precisions,
        datasets=tuple((value, of_value.inspection.dataset_digest) for value, of_value in (compared or {}).items()),
        experiment_id=tracked_study.parent.experiment_id,
    )
    known = _known(tracked_study.study)
    if known is not None and (known.command, command) == ("search", "fit"):
        either = {*known.precisions, *new.precisions}
        new = dataclasses.replace(known, precisions=tuple(name for name in PRECISIONS if name in either))
    if new != known:
        storage.remember_command(tracked_study.study, TypeAdapter(Remembered).dump_json(new).decode())


def is_searched(study: Study) -> bool:
    """Return whether a search has worked on a study."""
    known = _known(study)
    return known is not None and known.command == "search"


def _known(study: Study) -> Remembered | None:
    """Return what a study remembers; None for what another version of amp_track has written."""
    from amp_track.study import storage

    try:
        return storage.command_of(study, TypeAdapter(Json[Remembered]))
    except StoreFailed:
        return None


def of(study: Study) -> Remembered:
    """Return what a study remembers. Raises BadInput if an older version has made it, which remembered nothing."""
    from amp_track.study import storage

    known = storage.command_of(study, TypeAdapter(Json[Remembered]))
    if known is None:
        raise BadInput(
            f"STUDY: got {study.study_name}, which an older version of amp-track has made, expected one that remembers "
            "its command; give that command again: it resumes the study, and makes its report"
        )
    return known
