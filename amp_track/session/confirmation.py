"""How long the training is that confirms an edge: a few epochs, one, or as much of one as covers what takes memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from amp_track.config.job import Job
from amp_track.config.steps import steps_per_epoch, total_steps
from amp_track.records.result import JobResult

if TYPE_CHECKING:
    from amp_track.session.session import Session

_SECONDS, _TIMES_THE_PROBES = 60.0, 4.0
"""A confirmation takes no longer than the larger of the two, unless more is asked for."""
MOST_EPOCHS, _EPOCHS_SECONDS = 3, 5.0
"""So many epochs, where they take no longer: a batch of small samples may fit to the page, and their epochs are short.
The digits within 32 MiB ran at a batch of 176 for two epochs, and ran out of memory in the third (AMD EPYC, 8 of 8)."""
_STEPS_AFTER_AN_EPOCH = 2
FEWEST_STEPS = 4
"""Two full steps, the epoch's smaller last one, and one after the evaluation. Fewer steps are all full ones."""


def confirmation_of(session: Session, job: Job, probes: Sequence[JobResult]) -> Job:
    """Return the training that confirms the edge that `job` trains at.

    By default it is an epoch, its evaluation and the first steps after it, as far as there is time: 60 s, or four times
    what the probes took. An epoch that is cut short has full steps, its own smaller last one, an evaluation of as many
    batches, and the steps after it. Three epochs and the steps after them are made where they take 5 s at most, for
    `--confirm-steps epoch` too.

    It makes no step that the job does not make: none after the evaluation of a job of one epoch, and no smaller last
    step for a job that ends before it (`--steps`). Either may take more memory than all that the job does: a
    transformer's steps after an evaluation found a fragmented heap, and refuted 193 samples where 222 train (bf16,
    256 MiB, one epoch).

    Args:
        session: whose `--confirm-steps` says how long.
        job: the job at the edge.
        probes: the outcomes of the probes at its precision, the nearest to the edge last.
    """
    samples = session.training_samples(job)
    of_epoch, in_all = steps_per_epoch(job, samples), total_steps(job, samples)
    # -1: the job ends before the smaller last step of its epoch, and so does the confirmation.
    after_epoch = max(min(in_all - of_epoch, _STEPS_AFTER_AN_EPOCH), -1)
    whole = min(in_all, of_epoch + _STEPS_AFTER_AN_EPOCH)
    asked, pace = session.request.max_batch_options.confirm_steps, _pace(session, job, probes)
    if isinstance(asked, int):
        steps = min(asked, in_all)
    elif pace is None:
        steps = whole
    else:
        several = min(in_all, MOST_EPOCHS * of_epoch + _STEPS_AFTER_AN_EPOCH)
        is_short = pace.seconds(several, of_epoch) <= _EPOCHS_SECONDS
        most_seconds = math.inf if asked is not None else _most_seconds(probes)
        steps = several if is_short else _steps_in_time(pace, most_seconds, whole, of_epoch, after_epoch)
    every = job.checkpoint_every and min(job.checkpoint_every, steps)
    long = dataclasses.replace(job, epochs=None, steps=steps, checkpoint_every=every)
    if steps >= whole or steps < FEWEST_STEPS:  # so few are all full ones, as those of any training are
        return long
    return dataclasses.replace(long, epoch_steps=steps - after_epoch)


def _most_seconds(probes: Sequence[JobResult]) -> float:
    """Return how long a confirmation may take, in seconds."""
    return max(_SECONDS, _TIMES_THE_PROBES * sum(job_result.wall_seconds for job_result in probes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pace:
    """How long a training takes for its parts."""

    step_seconds: float
    eval_batch_seconds: float
    eval_batches: int

    def seconds(self, steps: int, of_epoch: int) -> float:
        """Return how long a training takes, which evaluates after each epoch and at its end."""
        evaluations = math.ceil(steps / of_epoch)
        return steps * self.step_seconds + evaluations * self.eval_batches * self.eval_batch_seconds


def _pace(session: Session, job: Job, probes: Sequence[JobResult]) -> _Pace | None:
    """Return the pace of a training, by the speeds of the probes; None where they tell none."""
    fitting = [job_result for job_result in probes if job_result.samples_per_second]
    if not fitting:
        return None
    nearest = fitting[-1]
    eval_samples = 0 if job.synthetic else session.inspection.evaluation_samples
    eval_batches = math.ceil(eval_samples / _samples_at_once(job))
    if nearest.eval_samples_per_second:
        eval_batch_seconds = _samples_at_once(job) / nearest.eval_samples_per_second
    else:  # that probe has not evaluated: no batch takes longer than one that is trained on
        eval_batch_seconds = _batch_seconds(job, nearest) if eval_batches else 0.0
    return _Pace(
        step_seconds=job.grad_accum * _batch_seconds(job, nearest),
        eval_batch_seconds=eval_batch_seconds,
        eval_batches=eval_batches,
    )


def _steps_in_time(pace: _Pace, most_seconds: float, whole: int, of_epoch: int, after_epoch: int) -> int:
    """Return `whole`, or the optimizer steps of a cut-short epoch and those after it that `most_seconds` allow."""
    if pace.seconds(whole, of_epoch) <= most_seconds:
        return whole
    after = max(after_epoch, 0)
    left = most_seconds - after * pace.step_seconds
    # An evaluation of as many batches as the epoch has steps follows the epoch, and another the steps after it.
    evaluating = (2 if after else 1) * pace.eval_batch_seconds
    in_epoch = max(left / (pace.step_seconds + evaluating), (left - pace.eval_batches * evaluating) / pace.step_seconds)
    return min(max(int(in_epoch) + after, FEWEST_STEPS), whole)


def _batch_seconds(job: Job, probe: JobResult) -> float:
    """Return how long a training takes for one batch: a probe's speed leaves out what loading costs it."""
    assert probe.samples_per_second is not None
    computing = _samples_at_once(job) / probe.samples_per_second
    loading = probe.load_seconds or 0.0
    return max(computing, loading / job.num_workers) if job.num_workers else computing + loading


def _samples_at_once(job: Job) -> int:
    assert job.batch_size is not None
    return job.batch_size * job.nproc
