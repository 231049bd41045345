"""Write what optuna-dashboard shows of studies and trials: Markdown notes, plots and columns."""

from __future__ import annotations

from collections.abc import Mapping

import optuna

from amp_track.records.result import JobResult
from amp_track.records.units import format_bytes
from amp_track.study import optuna_internals


def note_on(study: optuna.Study, text: str) -> None:
    """Replace the note on a study, unless it is unchanged."""
    optuna_internals.write_note(optuna_internals.storage_of(study), optuna_internals.study_id_of(study), None, text)


def show_plots(study: optuna.Study, run_id: str, trials: Mapping[int, str]) -> None:
    """Link the plots of MLflow runs to a study and to some of its trials.

    Args:
        study: a part of a study whose trials are trainings.
        run_id: the id of the study's MLflow run, which holds the plots.
        trials: the run ids of trials, by number.
    """
    storage, study_id = optuna_internals.storage_of(study), optuna_internals.study_id_of(study)
    optuna_internals.link_plot(storage, study_id, None, run_id)
    for trial in study.get_trials(deepcopy=False):
        if trial.number in trials:
            optuna_internals.link_plot(storage, study_id, optuna_internals.id_of(trial), trials[trial.number])


def note_failure(trial: optuna.Trial, job_result: JobResult) -> None:
    """Write a note on a trial that did not fit: the status, the phase and the memory."""
    optuna_internals.write_note(
        trial.storage, optuna_internals.study_id_of(trial.study), optuna_internals.id_of(trial), _failure(job_result)
    )


def _failure(job_result: JobResult) -> str:
    where = f" in {job_result.phase}" if job_result.phase else ""
    lines = [f"**{job_result.status}**{where}"]
    if job_result.peak_allocated_bytes and job_result.requested_bytes:
        had, asked = format_bytes(job_result.peak_allocated_bytes), format_bytes(job_result.requested_bytes)
        lines.append(f"{had} were allocated when a request for {asked} more failed.")
    if job_result.message:
        lines.append("\n".join(f"    {line}" for line in job_result.message.splitlines()))
    return "\n\n".join(lines)


_MEBIBYTE = 2**20


def show_columns(trial: optuna.Trial, job_result: JobResult) -> None:
    """Set user attributes of a training, which optuna-dashboard shows as columns."""
    columns: dict[str, str | float | None] = {
        "status": job_result.ended,
        "wall seconds": round(job_result.wall_seconds, 1),
        "peak MiB": mebibytes(job_result.peak_bytes),
        "skipped steps": job_result.skipped_steps if job_result.scale is not None else None,
    }
    for name, value in columns.items():
        if value is not None:
            trial.set_user_attr(name, value)


def mebibytes(size_bytes: int | None) -> float | None:
    """Return a size in MiB, rounded for display."""
    return round(size_bytes / _MEBIBYTE, 1) if size_bytes is not None else None
