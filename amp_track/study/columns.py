"""What optuna-dashboard shows of a training beside its params and values: user attributes, which are its columns."""

from __future__ import annotations

import optuna

from amp_track.records.result import Outcome

_MEBIBYTE = 2**20


def show(trial: optuna.Trial, outcome: Outcome) -> None:
    """Set the columns of a training."""
    columns: dict[str, str | float | None] = {
        "verdict": outcome.ended,
        "wall seconds": round(outcome.wall_seconds, 1),
        "peak MiB": mebibytes(outcome.max_memory_bytes),
        "skipped steps": outcome.skipped_steps if outcome.scale is not None else None,
    }
    for name, value in columns.items():
        if value is not None:
            trial.set_user_attr(name, value)


def mebibytes(size_bytes: int | None) -> float | None:
    """Return a size as people read it in a column."""
    return round(size_bytes / _MEBIBYTE, 1) if size_bytes is not None else None
