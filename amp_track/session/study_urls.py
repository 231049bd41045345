"""Find the pages of a study: its parts in Optuna and its runs in MLflow. Write nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amp_track.config.options import Stores
from amp_track.records import masking
from amp_track.records.errors import BadInput
from amp_track.report import links, progress
from amp_track.results.pages import Page
from amp_track.stores import addresses
from amp_track.workers import interrupts

if TYPE_CHECKING:  # imported late: mlflow and optuna take two seconds, and bad arguments should not
    from amp_track.study.storage import Part
    from amp_track.tracking.lookup import Lookup

_TRAINS = ("train", "seeds", "compare")
"""The parts of a study whose trials are trainings."""


@dataclass(frozen=True)
class ShownRun:
    """The MLflow parent run of a study, or of the part that a command has made."""

    part: str
    experiment_id: str
    run_id: str
    has_trainings: bool
    has_view: bool
    """Whether MLflow has charts of the trainings."""


@dataclass(frozen=True)
class Found:
    """A study with its parts and runs, or the names of all studies."""

    study: str | None
    parts: tuple[Part, ...] = ()
    runs: tuple[ShownRun, ...] = ()
    others: tuple[str, ...] = ()
    """The studies to choose from if `study` is None."""
    experiment_id: str | None = None
    """The experiment of new runs, if there is no run to show."""

    def pages(self, mlflow: str, dashboard: str | None) -> tuple[Page, ...]:
        """Return the pages of MLflow's UI and of optuna-dashboard at these URLs; None if the dashboard is not shown."""
        pages = []
        for run in self.runs:
            name = self.study if len(self.runs) == 1 else run.part
            pages.append(Page(f"{name} in MLflow", links.run(mlflow, run.experiment_id, run.run_id)))
            pages.append(Page("… its page", links.page(mlflow, run.experiment_id, run.run_id)))
            if run.has_trainings:
                charted = links.trainings if run.has_view else links.filtered_trainings
                pages.append(Page("… its trainings, charted", charted(mlflow, run.experiment_id, run.run_id)))
        if not self.runs:
            address = links.experiment(mlflow, self.experiment_id) if self.experiment_id is not None else mlflow
            pages.append(Page("all runs in MLflow", address))
        if dashboard is None:
            return tuple(pages)
        for part in self.parts:
            pages.append(Page(f"{part.name} in optuna-dashboard", links.study(dashboard, part.study_id)))
        if not self.parts:
            pages.append(Page("all studies in optuna-dashboard", links.studies(dashboard)))
        return tuple(pages)


def find(stores: Stores, study: str | None) -> Found:
    """Return the parts and runs of a study; without a name those of the only study, or the names of all.

    Raises:
        BadInput: there is no such study, none of its trials is finished, or one of the two stores does not exist yet.
    """
    with progress.working("looking for the study"):
        with interrupts.nothing_to_end():
            from amp_track.study import storage
            from amp_track.tracking.lookup import Lookup
        known = storage.studies(stores.storage)
        if study is not None:
            study = storage.known_study(study, known, storage=masking.masked(stores.storage))
            if not storage.have_measured(stores.storage, known[study]):
                raise nothing_finished(study)
        elif len(known) == 1 and storage.have_measured(stores.storage, *known.values()):
            (study,) = known
        parts = known[study] if study is not None else ()
        with interrupts.waiting():  # for a server that may not answer
            lookup = Lookup(addresses.tracking_uri(stores.tracking_uri))
            runs = _runs(lookup, parts, stores)
            experiment_id = None if runs else lookup.experiment_of_new_runs()
    return Found(study, parts, runs, () if study is not None else tuple(known), experiment_id)


def find_runs(stores: Stores) -> Found:
    """Return the experiment of all runs, if there is no study. Raises BadInput if there are no runs either."""
    with progress.working("looking for the runs"):
        with interrupts.nothing_to_end():
            from amp_track.tracking.lookup import Lookup
        with interrupts.waiting():
            return Found(
                None, experiment_id=Lookup(addresses.tracking_uri(stores.tracking_uri)).experiment_of_new_runs()
            )


def nothing_finished(study: str) -> BadInput:
    """Return the error about a study without a finished trial."""
    return BadInput(f"Study {study} has no finished trial yet. Run its command again, or wait for its first trial.")


def _runs(lookup: Lookup, parts: Sequence[Part], stores: Stores) -> tuple[ShownRun, ...]:
    """Return the parent runs of the parts of a study. Print a line for a run that the store does not have."""
    kinds = {_kind(part) for part in parts}
    runs: dict[str, ShownRun] = {}
    for part in parts:
        if (run_id := part.parent_run_id) is None or run_id in runs:
            continue
        if (experiment_id := lookup.experiment_of(run_id)) is None:
            uri = masking.masked(addresses.tracking_uri(stores.tracking_uri))
            progress.say(f"{part.name}: its run {run_id} is not in {uri}; set --tracking-uri to the store that has it")
            continue
        of_its_run = {"compare"} if _kind(part) == "compare" else kinds - {"compare"}
        has_trainings = not of_its_run.isdisjoint(_TRAINS)
        has_view = has_trainings and lookup.has_view(experiment_id, run_id)
        runs[run_id] = ShownRun(part.name, experiment_id, run_id, has_trainings=has_trainings, has_view=has_view)
    return tuple(runs.values())


def _kind(part: Part) -> str:
    return part.name.split("/")[1]
