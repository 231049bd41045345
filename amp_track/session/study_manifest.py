"""The manifest of a study: the command that made it, enough to report the study from the stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Json, TypeAdapter

from amp_track.config.inspection import Inspection
from amp_track.config.job import Job
from amp_track.config.options import CompareOptions, MaxBatchOptions, Request, SearchOptions, Stores
from amp_track.config.precisions import PRECISIONS
from amp_track.records.errors import BadInput
from amp_track.runner.runner import JobRunner
from amp_track.session.session import Session
from amp_track.session.study_session import TrackedStudy

if TYPE_CHECKING:
    from amp_track.study.types import Storage, Study

Command = Literal["max-batch", "search", "compare"]


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """The manifest: the options of a command that worked on a study, without its stores, and the inspection."""

    command: Command
    job: Job
    max_batch_options: MaxBatchOptions
    search_options: SearchOptions
    compare_options: CompareOptions | None
    inspection: Inspection
    precisions: tuple[str, ...]
    datasets: tuple[tuple[str, str], ...] = ()
    """The digest of the data set for each value that a comparison varies."""
    experiment_id: str
    """Of the study's MLflow run."""
    experiment: str | None = None
    """The name that --experiment gave, for search workers: a study's run that was deleted is made again there."""

    def request(self, stores: Stores, *, owns_process: bool = False) -> Request:
        """Return the request of the command, with the stores of its study."""
        return Request(
            job=self.job,
            stores=stores,
            max_batch_options=self.max_batch_options,
            search_options=self.search_options,
            compare_options=self.compare_options,
            owns_process=owns_process,
        )

    def session(self, stores: Stores) -> Session:
        """Return the command's session for reading the study; its job runner is not started."""
        return Session(self.request(stores), JobRunner(self.job.workload), self.inspection, self.precisions)

    def compared(self, base: Session) -> dict[str, Session]:
        """Return the session of each value that a comparison varies."""
        inspections = {name: dataclasses.replace(self.inspection, dataset_digest=each) for name, each in self.datasets}
        return {name: Session(base.request, base.runner, each, base.precisions) for name, each in inspections.items()}


def keep(tracked_study: TrackedStudy, command: Command, *, compared: Mapping[str, Session] | None = None) -> Remembered:
    """Store the manifest of the command that works on a study, with the sessions of a comparison by value. Return it.

    `max-batch` on a known study adds its precisions. A search worker changes nothing.
    """
    from amp_track.study import storage

    session, known = tracked_study.session, stored(tracked_study.study)
    request = session.request
    new = Remembered(
        command=command,
        job=request.job,
        max_batch_options=request.max_batch_options,
        search_options=request.search_options,
        compare_options=request.compare_options,
        inspection=session.inspection,
        precisions=session.precisions,
        datasets=tuple((value, of_value.inspection.dataset_digest) for value, of_value in (compared or {}).items()),
        experiment_id=tracked_study.parent.experiment_id,
        experiment=request.stores.experiment or (known.experiment if known is not None else None),
    )
    if known is not None and request.joins:  # with a device and a file of this machine
        new = dataclasses.replace(known, experiment_id=new.experiment_id)
    elif known is not None and (known.command, command) == ("search", "max-batch"):
        new = dataclasses.replace(known, precisions=_either(known.precisions, new.precisions))
    elif known is not None and command == "max-batch":
        new = _with_precisions_of(known, new)
    if new != known:
        tracked_study.study.set_user_attr(storage.COMMAND, TypeAdapter(Remembered).dump_json(new).decode())
    return new


def _with_precisions_of(known: Remembered, new: Remembered) -> Remembered:
    """Return a new manifest with the precisions that only an earlier command has searched or left out."""
    asked, before = new.max_batch_options.precisions, known.max_batch_options.precisions
    supports = dict(known.inspection.precisions)
    for name, support in new.inspection.precisions:
        is_newer = name in asked if asked is not None else name in new.precisions or name not in known.precisions
        if is_newer:
            supports[name] = support
    both = _either(asked, before) if asked is not None and before is not None else None
    return dataclasses.replace(
        new,
        max_batch_options=dataclasses.replace(new.max_batch_options, precisions=both),
        inspection=dataclasses.replace(new.inspection, precisions=tuple(supports.items())),
        precisions=_either(known.precisions, new.precisions),
    )


def _either(some: Collection[str], others: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in PRECISIONS if name in some or name in others)


def stored(study: Study) -> Remembered | None:
    """Return the manifest of a study; None if it has none yet."""
    from amp_track.study import storage

    return storage.command_of(study, TypeAdapter(Json[Remembered]))


def load(stores: Stores, shared: Storage) -> tuple[str, str, Study, Remembered]:
    """Return the name of a study, the name of its part that has the manifest, that part for reading, and the manifest.

    Raises:
        BadInput: there is no such study, or none of its parts has a manifest.
    """
    from amp_track.study import opening, storage

    assert stores.study is not None
    known = storage.parts_by_study(opening.study_names(shared))
    name = storage.known_study(stores.study, known, storage=str(stores.optuna))
    preferred = ("compare", "max-batch") if stores.study.partition("/")[2] == "compare" else ("max-batch", "compare")
    part = next((part for part in preferred if f"{name}/{part}" in known[name]), None)
    if part is None:
        raise BadInput(
            f"Study {name} is incomplete: {stores.optuna} has only {', '.join(known[name])}, not {name}/max-batch. "
            "Run the command that created it again."
        )
    study = opening.load_study(f"{name}/{part}", shared)
    assert study is not None, "its name was just read"
    manifest = stored(study)
    if manifest is None:
        raise BadInput(
            f"Study {study.study_name} has no record of its command: it is just being created. Try again in a minute, "
            "or run its command again, which resumes the study."
        )
    return name, part, study, manifest


def nothing_finished(study: str) -> BadInput:
    """Return the error about a study without a finished trial."""
    return BadInput(f"Study {study} has no finished trial yet. Run its command again, or wait for its first trial.")
