"""The seconds of a max-batch command, by phase: before its trials, in each kind of trial, and after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

AFTER_THE_PROOF = ("beyond", "timing", "headroom", "typical", "eval")
"""Kinds of trials that run when the max batch is proven, to recommend a batch or to measure more."""
PHASES = ("start", "probes", "confirmation", "repeats", "timing", "end")
PARTS = ("process and stores", "model, data, end of epoch", "steps", "failing trials")


@dataclass(frozen=True, kw_only=True)
class TimedTrial:
    """A trial of a max-batch study, with its times in seconds since the epoch."""

    precision: str
    kind: str
    batch_size: int
    fits: bool
    started: float
    ended: float
    job_seconds: float  # measured in the job process, from its data to the end of its training
    train_seconds: float  # the part of `job_seconds` in training steps

    @property
    def phase(self) -> str:
        """The phase of the command. A confirmation run that rejects a max batch counts as a probe."""
        if self.kind in AFTER_THE_PROOF:
            return "timing"
        if self.kind == "confirm":
            return "confirmation" if self.fits else "probes"
        return "repeats" if self.kind == "repeat" else "probes"


def timed_trials(database: Path, study: str) -> list[TimedTrial]:
    """Return the finished trials of a max-batch study in an SQLite file, in the order in which they ran."""
    import optuna

    from amp_track.study.max_batch_jobs import done_jobs

    storage = optuna.storages.RDBStorage(f"sqlite:///{database}")
    trials = optuna.load_study(study_name=f"{study}/max-batch", storage=storage).get_trials()
    storage.engine.dispose()
    return [
        TimedTrial(
            precision=job.precision,
            kind=job.kind,
            batch_size=job.batch_size,
            fits=job.fits,
            started=job.trial.datetime_start.timestamp(),
            ended=job.trial.datetime_complete.timestamp(),
            job_seconds=job.job_result.wall_seconds,
            train_seconds=job.job_result.train_seconds or 0.0,
        )
        for job in done_jobs(trials)
        if job.trial.datetime_start is not None and job.trial.datetime_complete is not None
    ]


def end_of_proof(trials: Iterable[TimedTrial]) -> float:
    """Return when the last trial ended that a proof of the max batches needs."""
    return max(trial.ended for trial in trials if trial.kind not in AFTER_THE_PROOF)


def seconds_by_phase(trials: Sequence[TimedTrial]) -> dict[str, float]:
    """Return the seconds of the trials by phase. A trial begins when the previous one ends, the first when it starts.

    So the seconds between two trials, in which the next batch is chosen, count too.
    """
    seconds = dict.fromkeys(PHASES[1:-1], 0.0)
    for trial, began in _with_begin(trials):
        seconds[trial.phase] += trial.ended - began
    return seconds


def seconds_by_part(trials: Sequence[TimedTrial]) -> dict[str, float]:
    """Return the seconds up to the proof by what the trials spent them on. Failing trials do not report their parts."""
    seconds = defaultdict[str, float](float, dict.fromkeys(PARTS, 0.0))
    for trial, began in _with_begin(trials):
        if trial.kind in AFTER_THE_PROOF:
            continue
        if not trial.fits:
            seconds["failing trials"] += trial.ended - began
            continue
        seconds["process and stores"] += trial.ended - began - trial.job_seconds
        seconds["model, data, end of epoch"] += trial.job_seconds - trial.train_seconds
        seconds["steps"] += trial.train_seconds
    return dict(seconds)


def _with_begin(trials: Sequence[TimedTrial]) -> Iterable[tuple[TimedTrial, float]]:
    begins = [trial.started for trial in trials[:1]] + [trial.ended for trial in trials[:-1]]
    return zip(trials, begins, strict=True)
