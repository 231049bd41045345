"""The goal of a max-batch study, the jobs of its probes, and the length of its confirmation runs."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from amp_track.batch_search import recommended_batch
from amp_track.batch_search.search import Limit
from amp_track.config.job import Job, loads_in_its_own_process, steps_per_epoch, total_steps
from amp_track.config.precisions import Precision
from amp_track.memory_plan import gpus
from amp_track.memory_plan.allocator import SETTINGS_VARIABLES
from amp_track.records.plan import Forecast, ForecastTask
from amp_track.records.result import JobResult
from amp_track.report import progress
from amp_track.session.session import Session

if TYPE_CHECKING:
    from amp_track.study.batch_sampler import Goal
    from amp_track.study.max_batch_jobs import Proposal


_LARGEST_SYNTHETIC_BATCH = 2**20
_BEYOND = 3
_RECOMMENDED_PART = 0.95
"""The part of an accelerator's memory that a recommended batch may take, without --headroom. On a CPU the meter is
exact, so it may take all."""
_STEADY_BYTES = 32 * 4096
"""A max batch that leaves these pages of a CPU budget is not repeated. The jobs of a command are forks of one process,
so memory hardly varies: 65 of 65 jobs took the same memory to the byte in each of 2 to 12 processes, also beside two
busy loops (seven networks, AMD EPYC with avx512_bf16, 2 cores, torch 2.14.1, 2026-11-28).
"""
_ACCUMULATED_BATCHES = 2
"""Two are enough to measure accumulation: gradients stay in memory while the next batch runs."""
_LEAST_SECONDS = 5.0
"""A confirmation run takes at most this time or as long as the probes together, unless `--confirm-steps` asks for more.
"""
_LEAST_CPU_SECONDS = 3.0
"""The same within a CPU budget: at all ten max batches of docs/finders.md, shortened epochs of 4, 5, 6, 8, 12 and 24
steps had the same peak to the page; as the only epoch, 3 steps and all (AMD EPYC with avx512_bf16, 2 cores, torch
2.14.1, 2026-11-28).
"""
_LEAST_UNSHORTENED_SECONDS, _MOST_UNSHORTENED_SECONDS = 10.0, 60.0
"""The same for a function or a command, whose epoch is not shortened, and its upper limit: it may never end by itself.
"""
MOST_EPOCHS = 3
"""Number of epochs if they take at most `_LEAST_SECONDS`: a batch of small samples may fit with less than a page to
spare. The digits within 32 MiB ran at batch 176 for two epochs, and ran out of memory in the third (AMD EPYC, 8 of 8).
"""
_STEPS_AFTER_AN_EPOCH = 2
FEWEST_STEPS = 4
"""Two full steps, the epoch's smaller last step, and one after the evaluation. Within a CPU budget, a job of one epoch,
which ends with the evaluation, is confirmed by three; not under amp, which may skip the first. A shorter run that is
asked for has full steps only.
"""


def goal_of(session: Session, free_bytes: int, *, recommends: bool = False) -> Goal:
    """Return the goal of a command's max-batch study; `free_bytes` were free when the study began.

    With `recommends`, batches are timed to recommend one.
    """
    from amp_track.study.batch_sampler import Goal

    options, budget = session.request.max_batch_options, session.job.memory_budget_bytes
    effective = options.effective_batch_size
    limit = limit_of(session)
    total_bytes = budget if budget is not None else free_bytes
    headroom_bytes = options.headroom.of(total_bytes) if options.headroom is not None else 0
    budget_bytes = total_bytes - headroom_bytes
    leaves_headroom = options.headroom is None and session.inspection.hardware.kind != "cpu"
    return Goal(
        precisions=session.precisions,
        limit=limit,
        budget_bytes=budget_bytes,
        headroom_bytes=headroom_bytes,
        first_batch=session.inspection.batch_size,
        first_batch_reason="the workload's batch size" if session.inspection.kind == "workload" else "first batch",
        multiple_of=options.multiple_of,
        most_evaluated=_most_evaluated(session),
        confirm=options.confirm_steps != 0,
        # It is short, and what plans of a CPU's memory get wrong is known.
        confirms_soon=options.confirm_steps is None and session.inspection.hardware.kind == "cpu",
        recommends=recommends,
        effective_batch_size=effective // session.job.nproc if effective is not None else None,
        recommended_bytes=int(_RECOMMENDED_PART * total_bytes) if leaves_headroom else None,
        sure_bytes=budget_bytes - _STEADY_BYTES if _memory_is_steady(session) else None,
        whole_probes=_probes_are_whole(session),
        forecasts=Plans(session, budget_bytes=budget_bytes, max_batch_size=limit.batch_size)
        if session.inspection.kind == "workload"
        else None,
        beyond=0 if session.inspection.hardware.kind == "cpu" else _BEYOND,
    )


def _most_evaluated(session: Session) -> Limit | None:
    """Return the largest batch of an evaluation to probe; None if it has the training's or is given."""
    samples = math.ceil(session.inspection.evaluation_samples / session.job.nproc)
    if session.job.eval_batch_size != "auto" or session.job.synthetic or not samples:
        return None
    return Limit(samples, "dataset")


def _probes_are_whole(session: Session) -> bool:
    """Return whether a probe runs every phase of a training that takes memory, including the end of its only epoch.

    Otherwise the confirmation run does.
    """
    steps = session.request.max_batch_options.confirm_steps
    confirms_the_end = steps is None or isinstance(steps, str) or steps >= FEWEST_STEPS
    return not confirms_the_end or session.job.epochs not in (1, None)  # None: maybe less than an epoch


def _memory_is_steady(session: Session) -> bool:
    """Return whether all runs of a job take nearly the same memory.

    That of caching allocators, of autotuned kernels, of several ranks, and of trainings that amp_track has not written
    may vary.
    """
    inspection, job = session.inspection, session.job
    is_within_cpu_budget = inspection.hardware.kind == "cpu" and job.memory_budget_bytes is not None
    return inspection.kind == "workload" and is_within_cpu_budget and job.nproc == 1


def limit_of(session: Session) -> Limit:
    """Return the largest batch size to probe. The size of the data set does not limit synthetic batches."""
    job, limits = session.job, []
    if session.inspection.knows_samples(job):
        limits.append(Limit(max(session.inspection.training_samples // job.nproc, 1), "dataset"))
    if (most := session.request.max_batch_options.max_batch_size) is not None:
        limits.append(Limit(most, "max_batch_size"))
    return min(limits or [Limit(_LARGEST_SYNTHETIC_BATCH, "max_batch_size")], key=lambda limit: limit.batch_size)


def budget_of(session: Session, goal: Goal, kind: str = "probe") -> int | None:
    """Return the memory budget of a kind of probe in bytes, without the headroom; None for the device's limit.

    Whether a batch leaves headroom is shown by a smaller budget: a caching allocator reserves all that it may.
    """
    if kind == "headroom" and session.inspection.budget_support.supported:
        return goal.recommended_bytes
    has_one = session.job.memory_budget_bytes is not None or session.request.max_batch_options.headroom is not None
    return goal.budget_bytes if has_one else None


def accumulation_of(session: Session) -> int:
    """Return the number of batches that an optimizer step of the max-batch study accumulates."""
    will_accumulate = session.request.max_batch_options.effective_batch_size is not None
    return _ACCUMULATED_BATCHES if will_accumulate else session.job.grad_accum


def job_of(
    session: Session,
    proposal: Proposal,
    budget_bytes: int | None,
    probes: Sequence[JobResult] = (),
    *,
    recommends: bool = False,
) -> Job:
    """Return the job of one proposal within `budget_bytes`; the pace of a training comes from `probes`.

    With `recommends`, batches are timed when the max batches are proven.
    """
    loads_alone = loads_in_its_own_process(session.inspection.hardware.kind, budget_bytes)
    effective, steps = session.request.max_batch_options.effective_batch_size, session.job.steps
    if steps is not None and effective is not None:  # as many samples as the requested job
        steps = max(round(steps * effective / (proposal.batch_size * session.job.nproc * _ACCUMULATED_BATCHES)), 1)
    is_evaluation = proposal.kind == "eval"
    job = dataclasses.replace(
        session.job,
        steps=steps,
        precision=proposal.precision,
        batch_size=proposal.training_batch_size if is_evaluation else proposal.batch_size,
        eval_batch_size=proposal.batch_size if is_evaluation else session.job.eval_batch_size,
        memory_budget_bytes=budget_bytes,
        grad_accum=accumulation_of(session),
        probe=proposal.kind != "confirm",
        worst_batch=proposal.kind != "typical",
        probe_to_the_end=proposal.includes_the_end or _probes_are_whole(session),
        speed_readings=_readings_of(session, proposal, recommends=recommends),
        num_workers=0 if loads_alone else session.job.num_workers,
    )
    return dataclasses.replace(job, checkpoint_every=None) if job.probe else _confirmation_of(session, job, probes)


def _readings_of(session: Session, proposal: Proposal, *, recommends: bool) -> int:
    """Return how often a probe is timed. On an accelerator, whose clock must rise first, it takes longer than the steps
    that the peak needs, so probes are not timed if batches are timed later.

    A function or a script makes its own steps, which cannot be repeated, so some are timed.
    """
    if proposal.kind == "timing":
        return recommended_batch.READINGS  # in one process: its start takes longer than a reading
    on_accelerator = session.inspection.hardware.kind != "cpu" and session.inspection.kind == "workload"
    are_timed_later = recommends and session.request.max_batch_options.confirm_steps != 0
    return 0 if on_accelerator and are_timed_later and proposal.kind not in ("repeat", "multiple", "confirm") else 1


class Plans:
    """The memory plans of a max-batch study, for a job of it at any batch size: made on the first call, by precision.

    They are empty, and a line is printed, if the memory cannot be predicted.
    """

    seconds: float | None = None
    """The duration of the prediction; None if it was not needed."""

    def __init__(self, session: Session, *, budget_bytes: int, max_batch_size: int) -> None:
        self._session = session
        self._task = ForecastTask(
            precisions=session.precisions,
            budget_bytes=budget_bytes,
            max_batch_size=max_batch_size,
            on_cuda=session.inspection.hardware.kind == "cuda",
            kernels=gpus.device_kernels(session.inspection.hardware),
        )

    def __call__(self) -> Mapping[str, Forecast]:
        return self._by_precision

    @functools.cached_property
    def _by_precision(self) -> dict[str, Forecast]:
        job = dataclasses.replace(self._session.job, grad_accum=accumulation_of(self._session))
        started = time.perf_counter()
        with progress.working("predicting memory"):
            forecasts = self._session.runner.forecast(job, self._task)
        self.seconds = time.perf_counter() - started
        if forecasts.reason:
            progress.say(f"no memory plan ({forecasts.reason}); the search starts without one")
        if any(os.environ.get(name) for name in SETTINGS_VARIABLES):  # only their line remains of use
            return {name: dataclasses.replace(each, traces=None) for name, each in forecasts.by_precision}
        return dict(forecasts.by_precision)


def training_seconds(session: Session, job: Job, probe: JobResult) -> float | None:
    """Return the predicted duration of a training from a probe at its precision; None if the probe has no speed.

    It does not include the start of the process and the loading of the data set.
    """
    pace, of_epoch = _pace(session, job, [probe]), steps_per_epoch(job, session.training_samples(job))
    return pace.seconds(total_steps(job, of_epoch), of_epoch) if pace is not None else None


def _confirmation_of(session: Session, job: Job, probes: Sequence[JobResult]) -> Job:
    """Return the confirmation run of the max batch that `job` trains at.

    By default it is an epoch, its evaluation and the steps after it, within 5 s (one process within a CPU budget: 3 s)
    or the duration of the probes, and at least `FEWEST_STEPS`. A shortened epoch has full steps, the epoch's smaller
    last step, an evaluation of as many batches, and the steps after it. If three epochs and the steps after them take
    at most 5 s, these are run, also with `--confirm-steps epoch`.

    It has no step that the job does not have: none after the evaluation of a job of one epoch, and no smaller last
    step if the job ends before it (`--steps`). Such a step may take more memory than the job itself: a transformer's
    steps after an evaluation ran in a fragmented heap, and rejected 193 samples although 222 train (bf16, 256 MiB, one
    epoch).

    `probes` are the job results at its precision, the one nearest to the max batch last.
    """
    if session.inspection.kind != "workload":
        return _confirmation_by_time(session, job, probes)
    samples = session.training_samples(job)
    of_epoch = steps_per_epoch(job, samples)
    in_all = total_steps(job, of_epoch)
    # -1: the job ends before the smaller last step of its epoch, and so does the confirmation run.
    after_epoch = max(min(in_all - of_epoch, _STEPS_AFTER_AN_EPOCH), -1)
    whole = min(in_all, of_epoch + _STEPS_AFTER_AN_EPOCH)
    is_steady = _memory_is_steady(session)
    asked, pace = session.request.max_batch_options.confirm_steps, _pace(session, job, probes)
    ends_with_epoch, may_skip_steps = after_epoch == 0, Precision.named(job.precision).grad_scaler
    are_three_enough = is_steady and ends_with_epoch and not may_skip_steps and asked is None
    fewest = FEWEST_STEPS - 1 if are_three_enough else FEWEST_STEPS
    if isinstance(asked, int):
        steps = min(asked, in_all)
    elif pace is None:
        steps = whole
    else:
        several = min(in_all, MOST_EPOCHS * of_epoch + _STEPS_AFTER_AN_EPOCH)
        is_short = pace.seconds(several, of_epoch) <= _LEAST_SECONDS
        probes_seconds = sum(job_result.wall_seconds for job_result in probes)
        least_seconds = _LEAST_CPU_SECONDS if is_steady else _LEAST_SECONDS
        most_seconds = math.inf if asked is not None else max(least_seconds, probes_seconds)
        steps = several if is_short else _steps_in_time(pace, most_seconds, fewest, whole, of_epoch, after_epoch)
    every = job.checkpoint_every and min(job.checkpoint_every, steps)
    long = dataclasses.replace(job, epochs=None, steps=steps, checkpoint_every=every)
    if steps >= whole or steps < fewest:  # such a short run has full steps only, as any training has
        return long
    return dataclasses.replace(long, epoch_steps=steps - after_epoch)


def _confirmation_by_time(session: Session, job: Job, probes: Sequence[JobResult]) -> Job:
    """Return a confirmation run of a function or a script: unshortened, to its end or for a limited time."""
    asked = session.request.max_batch_options.confirm_steps
    if isinstance(asked, int):
        return dataclasses.replace(job, epochs=None, steps=asked)
    assert job.batch_size is not None
    speeds = [probe.samples_per_second for probe in probes if probe.fits and probe.samples_per_second]
    step_seconds = max(job.batch_size / speeds[-1], 1e-4) if speeds else 1.0
    probes_seconds = sum(probe.wall_seconds for probe in probes)
    most_seconds = min(max(_LEAST_UNSHORTENED_SECONDS, probes_seconds), _MOST_UNSHORTENED_SECONDS)
    steps = None if asked == "epoch" else max(int(most_seconds / step_seconds), FEWEST_STEPS)
    return dataclasses.replace(job, epochs=None, steps=steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pace:
    """The duration of the parts of a training."""

    step_seconds: float
    eval_batch_seconds: float
    eval_batches: int

    def seconds(self, steps: int, of_epoch: int) -> float:
        """Return the duration of a training that evaluates after each epoch and at its end."""
        return steps * self.step_seconds + math.ceil(steps / of_epoch) * self.eval_batches * self.eval_batch_seconds


def _pace(session: Session, job: Job, probes: Sequence[JobResult]) -> _Pace | None:
    """Return the pace of a training from the throughput of the probes; None if no probe has one."""
    speeds = ((probe.samples_per_second or probe.cold_samples_per_second, probe) for probe in reversed(probes))
    speed, nearest = next((each for each in speeds if each[0]), (None, None))
    if speed is None or nearest is None:
        return None
    assert job.batch_size is not None
    at_once = job.batch_size * job.nproc
    evaluated = (job.samples_per_evaluation_batch or 1) * job.nproc
    eval_batches = math.ceil((0 if job.synthetic else session.inspection.evaluation_samples) / evaluated)
    computing, loading = at_once / speed, nearest.load_seconds or 0.0
    # The throughput of a probe excludes data loading.
    batch_seconds = max(computing, loading / job.num_workers) if job.num_workers else computing + loading
    if nearest.eval_samples_per_second:
        eval_batch_seconds = evaluated / nearest.eval_samples_per_second
    else:  # the probe had no evaluation: a training batch takes at least as long as an evaluation batch
        eval_batch_seconds = batch_seconds * evaluated / at_once if eval_batches else 0.0
    return _Pace(
        step_seconds=job.grad_accum * batch_seconds, eval_batch_seconds=eval_batch_seconds, eval_batches=eval_batches
    )


def _steps_in_time(pace: _Pace, most_seconds: float, fewest: int, whole: int, of_epoch: int, after_epoch: int) -> int:
    """Return `whole`, or the number of optimizer steps of a shortened epoch, and after it, within `most_seconds`."""
    if pace.seconds(whole, of_epoch) <= most_seconds:
        return whole
    after = max(after_epoch, 0)
    left = most_seconds - after * pace.step_seconds
    # An evaluation of as many batches as the epoch has steps follows the epoch, and another follows the last steps.
    evaluating = (2 if after else 1) * pace.eval_batch_seconds
    in_epoch = max(left / (pace.step_seconds + evaluating), (left - pace.eval_batches * evaluating) / pace.step_seconds)
    return min(max(int(in_epoch) + after, fewest), whole)
