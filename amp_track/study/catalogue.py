"""What a storage holds: the studies that amp_track has made, and where their pages are. Reads only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from optuna.trial import TrialState

from amp_track.study import storage as storages
from amp_track.study.names import parts_by_study
from amp_track.study.reading import reading

_FINISHED = tuple(state for state in TrialState if state.is_finished())


@dataclass(frozen=True)
class Part:
    """A part of a study, such as NAME/max-batch, as Optuna knows it."""

    name: str
    study_id: int
    parent_run_id: str | None
    """Of the MLflow run that stands for the study, where this part remembers it."""


def studies(url: str) -> dict[str, tuple[Part, ...]]:
    """Return the studies of a storage: by NAME its parts, in the order in which they are made.

    Args:
        url: the storage's address, which the command has checked.

    Raises:
        BadInput: there is no storage yet, or another version of Optuna has made it.
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
    """Return whether any trial of these parts of a study has an outcome. Raises BadInput if there is no storage."""
    with reading(url) as storage:
        return any(
            storages.job_result_of(trial) is not None
            for part in parts
            for trial in storage.get_all_trials(part.study_id, deepcopy=False, states=_FINISHED)
        )
