"""The jobs of a max-batch study: what one runs, and what the finished ones show."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState
from pydantic import TypeAdapter

from amp_track.batch_search.recommended_batch import READINGS
from amp_track.batch_search.search import Limit, MaxBatch, Probe, explore
from amp_track.records.result import JobResult, JobStatus
from amp_track.study import storage

CLAIM = "amp_track:claim"
"""The system attribute of a trial that has its job."""
TYPICAL, EVAL = "typical", "eval"
_FULL = (JobStatus.OOM, JobStatus.KERNEL_LIMIT)


@dataclass(frozen=True)
class Proposal:
    """One job of the max-batch study.

    `kind` is one of: `probe`; `multiple`, a probe of the largest multiple up to the max batch; `beyond`, a probe above
    the first failing batch; `confirm`, the confirmation run; `repeat`, another probe of a confirmed max batch;
    `headroom`, a probe, within a smaller budget, of a batch that may leave the recommended headroom; `timing`, a probe
    of a batch that may be recommended, for its speed; `typical`, a probe with batches as they are drawn, where all
    others have the largest samples; `eval`, a probe at the max batch whose evaluation has batches of `batch_size`.
    """

    precision: str
    batch_size: int
    kind: str
    reason: str
    predicted_bytes: int | None = None
    should_fit: bool = True
    is_planned: bool = False
    """Whether a memory plan chose it, before any batch fitted."""
    larger_fail_too: bool = False
    """Whether the next larger batches fail if this one does: a simulated allocator needs no less memory for them."""
    training_batch_size: int = 0
    """The batch of the training before an evaluation whose batch is probed."""

    @property
    def includes_the_end(self) -> bool:
        """Whether it runs the end of an epoch, also if the probes leave it to the confirmation run."""
        return self.kind not in ("probe", "repeat", "timing")


_PROPOSAL = TypeAdapter(Proposal)


@dataclass(frozen=True)
class Done(Proposal):
    """A finished job with its result and its trial."""

    job_result: JobResult = dataclasses.field(kw_only=True)
    trial: FrozenTrial = dataclasses.field(kw_only=True)

    @property
    def fits(self) -> bool:
        return self.job_result.fits


def read_claim(trial: FrozenTrial) -> Proposal | None:
    """Return the job that a trial has claimed; None before that."""
    claim = trial.system_attrs.get(CLAIM)
    return storage.read(_PROPOSAL, claim, f"trial {trial.number}", "a job") if claim is not None else None


def done_jobs(trials: Iterable[FrozenTrial]) -> list[Done]:
    """Return every finished job, in the order of the trials."""
    return [
        Done(**vars(proposal), job_result=job_result, trial=trial)
        for trial in trials
        if trial.state is TrialState.COMPLETE
        and (proposal := read_claim(trial)) is not None
        and (job_result := storage.job_result_of(trial)) is not None
    ]


def by_precision(done: Sequence[Done], kind: str | None = None) -> defaultdict[str, list[Done]]:
    """Return the jobs of each precision: those of one kind, or those that prove or disprove its max batch."""
    jobs = defaultdict[str, list[Done]](list)
    for job in done:
        fails_in_less = job.kind == "headroom" and not job.fits  # in a smaller budget than the max batch has
        if job.kind == kind or (kind is None and job.kind not in (TYPICAL, EVAL) and not fails_in_less):
            jobs[job.precision].append(job)
    if kind is None:
        for precision, typical in by_precision(done, TYPICAL).items():
            jobs[precision] += _disproving(typical)
    return jobs


def _disproving(typical: list[Done]) -> list[Done]:
    """Return the jobs that ran out of memory with batches as drawn: the max batch must be smaller.

    Return none before the search for their own max batch is complete.
    """
    step = explore(as_probes(typical, (TYPICAL,)), Limit(sys.maxsize, "dataset"))
    is_complete = isinstance(step, MaxBatch)
    return [job for job in typical if is_complete and not job.fits and job.job_result.status in _FULL]


def size_ratio(done: Iterable[Done]) -> float | None:
    """Return the size of the largest samples relative to the mean; None if samples do not differ in size."""
    return next((job.job_result.size_ratio for job in done if job.job_result.size_ratio is not None), None)


def best_speed(done: Iterable[Done], kinds: Sequence[str]) -> float | None:
    """Return the best samples per second of jobs of these kinds; None if none was timed."""
    timed = (job.job_result for job in done if job.fits and job.kind in kinds)
    return max((each.samples_per_second for each in timed if each.samples_per_second is not None), default=None)


def speed_readings(done: Iterable[Done]) -> dict[int, list[float]]:
    """Return the readings of samples per second in the short probes that fit, by batch size, in ascending order.

    A confirmation run's speed includes data loading and smaller last batches, a probe's does not. A training that is
    too short for a speed has readings of 0 once it was to be timed, so that it is not timed again.
    """
    readings = defaultdict[int, list[float]](list)
    for job in done:
        if not job.fits or job.kind == "confirm":
            continue
        if (speed := job.job_result.samples_per_second) is not None:
            readings[job.batch_size] += job.job_result.speed_readings or (speed,)
        elif job.kind == "timing":
            readings[job.batch_size] += [0.0] * READINGS
        elif job.kind == "multiple" or job.job_result.cold_samples_per_second is None:
            readings[job.batch_size].append(0.0)
    return dict(sorted(readings.items()))


def largest_with_headroom(done: Iterable[Done], max_batch: int, most_bytes: int | None) -> int:
    """Return the largest batch up to the max batch whose runs took at most `most_bytes`; 0 if there is none.

    Timings do not count: they may have no evaluation.
    """
    if most_bytes is None:
        return max_batch
    runs = (job for job in done if job.fits and job.kind != "timing" and job.batch_size <= max_batch)
    return max((job.batch_size for job in runs if (job.job_result.peak_bytes or math.inf) <= most_bytes), default=0)


def was_refuted(done: Iterable[Done]) -> bool:
    """Return whether a confirmation run did not fit although a short probe did."""
    done = list(done)
    largest = max((job.batch_size for job in done if job.fits and job.kind != "confirm"), default=0)
    return any(job.kind == "confirm" and not job.fits and job.batch_size <= largest for job in done)


def as_probes(done: Iterable[Done], kinds: Sequence[str]) -> list[Probe]:
    """Return the results of the jobs of these kinds as probes."""
    return [
        Probe(
            job.batch_size,
            job.job_result.status,
            job.job_result.peak_bytes,
            job.job_result.peak_allocated_bytes,
            job.job_result.first_step_peak_bytes,
        )
        if job.fits
        # Every batch above the size of the data set ends in the same way.
        else Probe(
            min(job.job_result.training_samples or job.batch_size, job.batch_size - 1) + 1, JobStatus.OVER_DATASET
        )
        if job.job_result.status is JobStatus.OVER_DATASET
        else Probe(
            job.batch_size,
            job.job_result.status,
            job.job_result.wanted_bytes,
            first_step_bytes=job.job_result.first_step_peak_bytes,
        )
        for job in done
        if job.kind in kinds
    ]
