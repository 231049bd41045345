"""List the studies of a storage. NAME is the name that a user gives; NAME/max-batch, NAME/train, … are its parts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from optuna.trial import TrialState

from amp_track.records.errors import BadInput
from amp_track.study import storage as storages
from amp_track.study.opening import reading

PARTS = ("max-batch", "train", "seeds", "compare")
"""The parts of a study, in the order in which they are created."""
_NEAREST = 3
"""How many names an error lists."""


def parts_by_study(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the parts of each study in Optuna, in the order of `PARTS`, by NAME.

    Args:
        names: the names of all studies of a storage; those of other programs are left out.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        study, _, part = name.partition("/")
        if part.partition("/")[0] in PARTS:
            found.setdefault(study, []).append(name)
    return {study: sorted(parts, key=_order) for study, parts in found.items()}


def known_study(asked: str, known: Iterable[str], *, storage: str, flag: str = "STUDY") -> str:
    """Return the name of an existing study; accept a part of it, such as NAME/max-batch.

    Args:
        asked: the name that the user typed.
        known: the names of the existing studies.
        storage: the storage address, without a password.
        flag: the flag or argument that the user typed it for.

    Raises:
        BadInput: there is no such study. The message lists the nearest names.
    """
    names = list(known)
    study = asked.partition("/")[0]
    if study in names:
        return study
    if not names:
        raise BadInput(f"{flag}: got {asked}, but {storage} holds no studies. Create one with amp-track max-batch.")
    nearest = difflib.get_close_matches(study, names, n=_NEAREST, cutoff=0.0)
    raise BadInput(
        f"{flag}: got {asked}, expected a study in {storage}, such as {', '.join(nearest)}. Use one of its studies, "
        "or another --storage."
    )


def _order(part: str) -> tuple[int, str]:
    return PARTS.index(part.split("/")[1]), part


_FINISHED = tuple(state for state in TrialState if state.is_finished())


@dataclass(frozen=True)
class Part:
    """A part of a study, such as NAME/max-batch, as Optuna knows it."""

    name: str
    study_id: int
    parent_run_id: str | None
    """The id of the study's MLflow parent run, if this part has stored it."""


def studies(url: str) -> dict[str, tuple[Part, ...]]:
    """Return the parts of each study of a storage, in the order in which they are created, by NAME. Write nothing.

    Args:
        url: the storage address, already checked.

    Raises:
        BadInput: there is no storage yet, or another version of Optuna created it.
    """
    with reading(url) as storage:
        attributes = {study.study_name: study.user_attrs for study in storage.get_all_studies()}
        return {
            name: tuple(
                Part(part, storage.get_study_id_from_name(part), storages.parent_run_id(part, attributes[part]))
                for part in parts
            )
            for name, parts in parts_by_study(attributes).items()
        }


def have_measured(url: str, parts: Iterable[Part]) -> bool:
    """Return whether any trial of these parts of a study has a job result. Raise BadInput if there is no storage."""
    with reading(url) as storage:
        return any(
            storages.job_result_of(trial) is not None
            for part in parts
            for trial in storage.get_all_trials(part.study_id, deepcopy=False, states=_FINISHED)
        )
