"""Notes on studies and trials, which optuna-dashboard shows as Markdown."""

from __future__ import annotations

from collections.abc import Mapping

import optuna

from amp_track.records.result import Outcome
from amp_track.records.units import format_bytes
from amp_track.study import optuna_internals


def note_on(study: optuna.Study, text: str) -> None:
    """Replace the note on a study, unless it is the same."""
    optuna_internals.write_note(optuna_internals.storage_of(study), optuna_internals.study_id_of(study), None, text)


def show_pictures(study: optuna.Study, run_id: str, trials: Mapping[int, str]) -> None:
    """Show the picture of MLflow's run on a study, and on some of its trials.

    Args:
        study: a part of a study, whose trials are trainings.
        run_id: of the MLflow run that stands for the study; its pictures are kept there and not here.
        trials: the run ids of trials, by number.
    """
    storage, study_id = optuna_internals.storage_of(study), optuna_internals.study_id_of(study)
    optuna_internals.link_picture(storage, study_id, None, run_id)
    for trial in study.get_trials(deepcopy=False):
        if trial.number in trials:
            optuna_internals.link_picture(storage, study_id, optuna_internals.id_of(trial), trials[trial.number])


def note_failure(trial: optuna.Trial, outcome: Outcome) -> None:
    """Say on a trial that did not fit what happened to it."""
    optuna_internals.write_note(
        trial.storage, optuna_internals.study_id_of(trial.study), optuna_internals.id_of(trial), _failure(outcome)
    )


def _failure(outcome: Outcome) -> str:
    where = f" in {outcome.phase}" if outcome.phase else ""
    lines = [f"**{outcome.verdict}**{where}"]
    if outcome.peak_allocated_bytes and outcome.requested_bytes:
        had, asked = format_bytes(outcome.peak_allocated_bytes), format_bytes(outcome.requested_bytes)
        lines.append(f"It had {had}, and asked for {asked} more.")
    if outcome.message:
        lines.append("\n".join(f"    {line}" for line in outcome.message.splitlines()))
    return "\n\n".join(lines)
