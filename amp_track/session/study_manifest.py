"""What a study remembers of the command that made it: enough to report it from the stores alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Json, TypeAdapter

from amp_track.config.inspection import Inspection
from amp_track.config.job import Job
from amp_track.config.options import CompareOptions, MaxBatchOptions, Request, SearchOptions, Stores
from amp_track.config.values import PRECISIONS
from amp_track.records import masking
from amp_track.records.errors import BadInput, StoreFailed
from amp_track.runner.runner import JobRunner
from amp_track.session.session import Session
from amp_track.session.study_session import TrackedStudy

if TYPE_CHECKING:
    from amp_track.study.types import Storage, Study


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """A command that has worked on a study: what it was asked for, but for its stores, and what it found there."""

    command: Literal["max-batch", "search", "compare"]
    job: Job
    max_batch_options: MaxBatchOptions
    search_options: SearchOptions
    compare_options: CompareOptions | None
    inspection: Inspection
    precisions: tuple[str, ...]
    datasets: tuple[tuple[str, str], ...] = ()
    """By value that a comparison varies, the digest of the data at it."""
    experiment_id: str
    """Of the study's MLflow run."""

    def request(self, stores: Stores, *, owns_process: bool = False) -> Request:
        """Return what the command was asked for, with stores that hold its study."""
        return Request(
            job=self.job,
            stores=stores,
            max_batch_options=self.max_batch_options,
            search_options=self.search_options,
            compare_options=self.compare_options,
            owns_process=owns_process,
        )

    def session(self, stores: Stores) -> Session:
        """Return the command's session, for what is read of the study: its job runner has not been started."""
        return Session(self.request(stores), JobRunner(self.job.workload), self.inspection, self.precisions)

    def compared(self, base: Session) -> dict[str, Session]:
        """Return a session for each value that a comparison varies."""
        return {
            value: Session(
                base.request,
                base.runner,
                dataclasses.replace(base.inspection, dataset_digest=digest),
                base.precisions,
            )
            for value, digest in self.datasets
        }


def keep(
    tracked_study: TrackedStudy,
    command: Literal["max-batch", "search", "compare"],
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
        max_batch_options=session.request.max_batch_options,
        search_options=session.request.search_options,
        compare_options=session.request.compare_options,
        inspection=session.inspection,
        precisions=session.precisions,
        datasets=tuple((value, of_value.inspection.dataset_digest) for value, of_value in (compared or {}).items()),
        experiment_id=tracked_study.parent.experiment_id,
    )
    known = _known(tracked_study.study)
    if known is not None and session.request.joins:  # a search worker may find the same file elsewhere
        new = dataclasses.replace(new, job=dataclasses.replace(new.job, workload=known.job.workload))
    if known is not None and (known.command, command) == ("search", "max-batch"):
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


def load(stores: Stores, shared: Storage) -> tuple[str, str, Study]:
    """Return the name of a study, and its part that remembers its command, by name and opened to be read.

    Args:
        stores: the name that was given, which may be that of a part.
        shared: the storage, opened.

    Raises:
        BadInput: there is no such study, or nothing of it that remembers a command.
    """
    from amp_track.study import names, reading

    name, part = _named(stores, names.parts_by_study(reading.study_names(shared)))
    study = reading.load_study(f"{name}/{part}", shared)
    assert study is not None, "its name has just been read"
    return name, part, study


def _named(stores: Stores, known: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """Return the name of a study, and of its part that remembers its command: that of its edges comes first."""
    from amp_track.study import names

    assert stores.study is not None
    storage = masking.masked(stores.storage)
    name = names.known_study(stores.study, known, storage=storage)
    asked = stores.study.partition("/")[2]
    parts = [part for part in ("max-batch", "compare") if f"{name}/{part}" in known[name]]
    if asked == "compare" or "max-batch" not in parts:
        parts = parts[::-1]
    if not parts:
        raise BadInput(
            f"STUDY: got {name}, of which {storage} holds {', '.join(known[name])}, expected {name}/max-batch too; "
            "give the command that made it again"
        )
    return name, parts[0]


def of(study: Study) -> Remembered:
    """Return what a study remembers. Raises BadInput if it does not remember its command."""
    from amp_track.study import storage

    known = storage.command_of(study, TypeAdapter(Json[Remembered]))
    if known is None:
        raise BadInput(
            f"STUDY: got {study.study_name}, which an older version of amp-track has made, or which is just being "
            "begun, expected one that remembers its command; try again in a minute, or give that command again, which "
            "resumes the study"
        )
    return known
