"""What optuna-dashboard shows of a training beside its params and values: user attributes, which are its columns."""

from __future__ import annotations

import optuna

from amp_track.records.result import JobResult

_MEBIBYTE = 2**20


def show(trial: optuna.Trial, job_result: JobResult) -> None:
    """Set the columns of a training."""
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
    """Return a size as people read it in a column."""
    return round(size_bytes / _MEBIBYTE, 1) if size_bytes is not None else None
