"""Read trials and runs from the two SQLite stores, without MLflow and Optuna."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CHECKPOINT = "amp_track.checkpoint.last"


@dataclass(frozen=True)
class Records:
    """The trials and runs of a folder's stores.

    Args:
        complete: by study and number, which job each COMPLETE trial has run.
        running: trials and runs that are RUNNING.
        uncounted: FINISHED child runs whose trial is not COMPLETE: whoever compares runs counts them twice.
        unrecorded: COMPLETE trials without a FINISHED run.
        roots: FINISHED runs at the top, by name.
        backwards: runs that end before they have started.
    """

    complete: Mapping[tuple[str, int], str] = field(default_factory=dict)
    running: int = 0
    uncounted: int = 0
    unrecorded: int = 0
    roots: Mapping[str, int] = field(default_factory=dict)
    backwards: int = 0

    def jobs(self) -> Counter[str]:
        """Return how often each job counts, without probes, whose batch sizes depend on earlier results."""
        trials = Counter(job for (study, _), job in self.complete.items() if not study.endswith("/max-batch"))
        return trials + Counter({f"run {name}": count for name, count in self.roots.items()})

    def probes(self) -> Counter[str]:
        """Return how often each probe ran, without intended repeats."""
        jobs = (job for (study, _), job in self.complete.items() if study.endswith("/max-batch"))
        return Counter(job for job in jobs if not job.endswith(('"repeat"', '"timing"')))


def read(folder: Path) -> Records:
    """Return the records in a folder; none for stores that do not exist yet."""
    trials = _rows(
        folder / "optuna.db",
        # NAME/max-batch/PRECISION contains copies of the trials of NAME/max-batch.
        "select t.trial_id, s.study_name, t.number, t.state from trials t join studies s using (study_id) "
        "where s.study_name not like '%/max-batch/%'",
    )
    params = _rows(folder / "optuna.db", "select trial_id, param_name, param_value from trial_params order by 2")
    (backwards,) = _rows(folder / "mlflow.db", "select count(*) from runs where end_time < start_time") or [(0,)]
    kinds = _rows(folder / "optuna.db", "select trial_id, value_json from trial_user_attributes where key = 'kind'")
    runs = _rows(folder / "mlflow.db", "select run_uuid, name, status from runs where lifecycle_stage = 'active'")
    tags = {
        (run, key): value for run, key, value in _rows(folder / "mlflow.db", "select run_uuid, key, value from tags")
    }
    complete = {
        (study, number): _job(study, [row for row in [*params, *kinds] if row[0] == trial])
        for trial, study, number, state in trials
        if state == "COMPLETE"
    }
    finished = {
        (tags[run, "optuna.study"], int(tags[run, "optuna.trial"]))
        for run, _, status in runs
        if status == "FINISHED" and (run, "optuna.trial") in tags
    }
    return Records(
        complete=complete,
        running=sum(state == "RUNNING" for *_, state in trials) + sum(status == "RUNNING" for *_, status in runs),
        uncounted=len(finished - complete.keys()),
        unrecorded=len(complete.keys() - finished),
        roots=Counter(
            name for run, name, status in runs if status == "FINISHED" and (run, "mlflow.parentRunId") not in tags
        ),
        backwards=backwards[0],
    )


def resumable_training(folder: Path) -> str | None:
    """Return the id of a training that has a checkpoint and did not finish; None if there is none."""
    query = (
        "select run_uuid from runs join tags using (run_uuid) "
        f"where key = '{_CHECKPOINT}' and status != 'FINISHED' order by start_time desc"
    )
    rows = _rows(folder / "mlflow.db", query)
    return str(rows[0][0]) if rows else None


def _job(study: str, described: list[Any]) -> str:
    """Return the job of a trial. Trainings of a search are random, so only their number counts."""
    if study.endswith("/train"):
        return study
    return " ".join([study, *(str(value) for row in described for value in row[1:])])


def _rows(file: Path, query: str) -> list[Any]:
    if not file.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=30)) as connection:
        try:
            return connection.execute(query).fetchall()
        except sqlite3.OperationalError:  # its tables do not exist yet
            return []
