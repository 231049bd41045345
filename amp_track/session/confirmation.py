"""The length of a confirmation run: several epochs, one, or a shortened epoch with all phases that take memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from amp_track.config.job import Job, steps_per_epoch, total_steps
from amp_track.records.result import JobResult

if TYPE_CHECKING:
    from amp_track.session.session import Session

_SECONDS, _TIMES_THE_PROBES = 60.0, 4.0
"""A confirmation run takes at most the larger of the two, unless `--confirm-steps` asks for more."""
MOST_EPOCHS, _EPOCHS_SECONDS = 3, 5.0
"""Number of epochs if they take at most this time: a batch of small samples may fit with less than a page to spare.
The digits within 32 MiB ran at batch 176 for two epochs, and ran out of memory in the third (AMD EPYC, 8 of 8)."""
_STEPS_AFTER_AN_EPOCH = 2
FEWEST_STEPS = 4
"""Two full steps, the epoch's smaller last step, and one after the evaluation. A shorter run has full steps only."""


def confirmation_of(session: Session, job: Job, probes: Sequence[JobResult]) -> Job:
    """Return the confirmation run of the max batch that `job` trains at.

    By default it is an epoch, its evaluation and the first steps after it, within 60 s or four times the duration of
    the probes. A shortened epoch has full steps, the epoch's smaller last step, an evaluation of as many batches, and
    the steps after it. If three epochs and the steps after them take at most 5 s, these are run, also with
    `--confirm-steps epoch`.

    It has no step that the job does not have: none after the evaluation of a job of one epoch, and no smaller last
    step if the job ends before it (`--steps`). Such a step may take more memory than the job itself: a transformer's
    steps after an evaluation ran in a fragmented heap, and rejected 193 samples although 222 train (bf16, 256 MiB, one
    epoch).

    Args:
        session: has `--confirm-steps`.
        job: the job at the max batch.
        probes: the job results of the probes at its precision, the one nearest to the max batch last.
    """
    samples = session.training_samples(job)
    of_epoch, in_all = steps_per_epoch(job, samples), total_steps(job, samples)
    # -1: the job ends before the smaller last step of its epoch, and so does the confirmation run.
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
    if steps >= whole or steps < FEWEST_STEPS:  # such a short run has full steps only, as any training has
        return long
    return dataclasses.replace(long, epoch_steps=steps - after_epoch)


def _most_seconds(probes: Sequence[JobResult]) -> float:
    """Return the longest time of a confirmation run in seconds."""
    return max(_SECONDS, _TIMES_THE_PROBES * sum(job_result.wall_seconds for job_result in probes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pace:
    """The duration of the parts of a training."""

    step_seconds: float
    eval_batch_seconds: float
    eval_batches: int

    def seconds(self, steps: int, of_epoch: int) -> float:
        """Return the duration of a training that evaluates after each epoch and at its end."""
        evaluations = math.ceil(steps / of_epoch)
        return steps * self.step_seconds + evaluations * self.eval_batches * self.eval_batch_seconds


def _pace(session: Session, job: Job, probes: Sequence[JobResult]) -> _Pace | None:
    """Return the pace of a training from the throughput of the probes; None if no probe has one."""
    fitting = [job_result for job_result in probes if job_result.samples_per_second]
    if not fitting:
        return None
    nearest = fitting[-1]
    eval_samples = 0 if job.synthetic else session.inspection.evaluation_samples
    eval_batches = math.ceil(eval_samples / _samples_at_once(job))
    if nearest.eval_samples_per_second:
        eval_batch_seconds = _samples_at_once(job) / nearest.eval_samples_per_second
    else:  # the probe had no evaluation: a training batch takes at least as long as an evaluation batch
        eval_batch_seconds = _batch_seconds(job, nearest) if eval_batches else 0.0
    return _Pace(
        step_seconds=job.grad_accum * _batch_seconds(job, nearest),
        eval_batch_seconds=eval_batch_seconds,
        eval_batches=eval_batches,
    )


def _steps_in_time(pace: _Pace, most_seconds: float, whole: int, of_epoch: int, after_epoch: int) -> int:
    """Return `whole`, or the number of optimizer steps of a shortened epoch, and after it, within `most_seconds`."""
    if pace.seconds(whole, of_epoch) <= most_seconds:
        return whole
    after = max(after_epoch, 0)
    left = most_seconds - after * pace.step_seconds
    # An evaluation of as many batches as the epoch has steps follows the epoch, and another follows the last steps.
    evaluating = (2 if after else 1) * pace.eval_batch_seconds
    in_epoch = max(left / (pace.step_seconds + evaluating), (left - pace.eval_batches * evaluating) / pace.step_seconds)
    return min(max(int(in_epoch) + after, FEWEST_STEPS), whole)


def _batch_seconds(job: Job, probe: JobResult) -> float:
    """Return the duration of one training batch; the throughput of a probe excludes data loading."""
    assert probe.samples_per_second is not None
    computing = _samples_at_once(job) / probe.samples_per_second
    loading = probe.load_seconds or 0.0
    return max(computing, loading / job.num_workers) if job.num_workers else computing + loading


def _samples_at_once(job: Job) -> int:
    assert job.batch_size is not None
    return job.batch_size * job.nproc
