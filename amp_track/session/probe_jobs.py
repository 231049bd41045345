"""The goal of a max-batch study, and the jobs of its probes and confirmation runs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from amp_track.batch_search.search import Limit
from amp_track.config.job import Job, loads_in_its_own_process
from amp_track.memory_plan import gpus
from amp_track.records.plan import Forecast, ForecastTask
from amp_track.records.result import JobResult
from amp_track.report import progress
from amp_track.session.confirmation import FEWEST_STEPS, confirmation_of
from amp_track.session.session import Session

if TYPE_CHECKING:
    from amp_track.study.batch_sampler import Goal, Proposal

_LARGEST_SYNTHETIC_BATCH = 2**20
_BEYOND = 3
_ACCUMULATED_BATCHES = 2
"""Two are enough to measure accumulation: gradients stay in memory while the next batch runs."""


def goal_of(session: Session, free_bytes: int) -> Goal:
    """Return the goal of a command's max-batch study; `free_bytes` were free when the study began."""
    from amp_track.study.batch_sampler import Goal

    options = session.request.max_batch_options
    budget_bytes = budget_of(session, free_bytes)
    budget_bytes = budget_bytes if budget_bytes is not None else free_bytes
    return Goal(
        precisions=session.precisions,
        limit=limit_of(session),
        budget_bytes=budget_bytes,
        first_batch=session.inspection.batch_size,
        multiple_of=options.multiple_of,
        confirm=options.confirm_steps != 0,
        whole_probes=probes_are_whole(session),
        forecasts=Plans(
            session,
            dataclasses.replace(session.job, grad_accum=accumulation_of(session)),
            budget_bytes=budget_bytes,
            max_batch_size=limit_of(session).batch_size,
        ),
        beyond=0 if session.inspection.hardware.kind == "cpu" else _BEYOND,
    )


def probes_are_whole(session: Session) -> bool:
    """Return whether a probe runs every phase of a training that takes memory, including the end of its only epoch.

    Otherwise the confirmation run does.
    """
    steps = session.request.max_batch_options.confirm_steps
    confirms_the_end = steps is None or isinstance(steps, str) or steps >= FEWEST_STEPS
    return not confirms_the_end or session.job.epochs not in (1, None)  # None: maybe less than an epoch


def limit_of(session: Session) -> Limit:
    """Return the largest batch size to probe. The size of the data set does not limit synthetic batches."""
    job, limits = session.job, []
    if not job.synthetic:
        limits.append(Limit(max(session.inspection.training_samples // job.nproc, 1), "dataset"))
    if (most := session.request.max_batch_options.max_batch_size) is not None:
        limits.append(Limit(most, "max_batch_size"))
    return min(limits or [Limit(_LARGEST_SYNTHETIC_BATCH, "max_batch_size")], key=lambda limit: limit.batch_size)


def budget_of(session: Session, free_bytes: int) -> int | None:
    """Return the memory budget of a probe in bytes, without the headroom; None for the device's limit."""
    headroom, budget = session.request.max_batch_options.headroom, session.job.memory_budget_bytes
    if headroom is None:
        return budget
    budget = budget if budget is not None else free_bytes
    return budget - headroom.of(budget)


def accumulation_of(session: Session) -> int:
    """Return the number of batches that an optimizer step of the max-batch study accumulates."""
    will_accumulate = session.request.max_batch_options.effective_batch_size is not None
    return _ACCUMULATED_BATCHES if will_accumulate else session.job.grad_accum


def _steps(session: Session, batch_size: int) -> int | None:
    """Return the number of steps after which a job of the study has seen as many samples as the requested job."""
    effective, steps = session.request.max_batch_options.effective_batch_size, session.job.steps
    if steps is None or effective is None:
        return steps
    return max(round(steps * effective / (batch_size * session.job.nproc * _ACCUMULATED_BATCHES)), 1)


def job_of(session: Session, proposal: Proposal, budget_bytes: int | None, probes: Sequence[JobResult] = ()) -> Job:
    """Return the job of one proposal within `budget_bytes`; the pace of a training comes from `probes`."""
    loads_alone = loads_in_its_own_process(session.inspection.hardware.kind, budget_bytes)
    job = dataclasses.replace(
        session.job,
        steps=_steps(session, proposal.batch_size),
        precision=proposal.precision,
        batch_size=proposal.batch_size,
        memory_budget_bytes=budget_bytes,
        grad_accum=accumulation_of(session),
        probe=proposal.kind != "confirm",
        probe_to_the_end=proposal.kind != "probe" or probes_are_whole(session),
        num_workers=0 if loads_alone else session.job.num_workers,
    )
    return dataclasses.replace(job, checkpoint_every=None) if job.probe else confirmation_of(session, job, probes)


class Plans:
    """The memory plans of a max-batch study: made on the first call, returned by precision.

    They are empty, and a line is printed, if the memory cannot be predicted.

    Args:
        session: the command.
        job: a job of the study, at any precision and batch size.
        budget_bytes: the memory budget of a probe.
        max_batch_size: the largest batch size to probe.
    """

    def __init__(self, session: Session, job: Job, *, budget_bytes: int, max_batch_size: int) -> None:
        self._session = session
        self._job = job
        self._task = ForecastTask(
            precisions=session.precisions,
            budget_bytes=budget_bytes,
            max_batch_size=max_batch_size,
            on_cuda=session.inspection.hardware.kind == "cuda",
            blas_workspace_bytes=gpus.blas_workspace_of(session.inspection.hardware),
        )
        self._made: Mapping[str, Forecast] | None = None
        self.seconds: float | None = None
        """The duration of the prediction; None if it was not needed."""

    def __call__(self) -> Mapping[str, Forecast]:
        if self._made is None:
            started = time.perf_counter()
            with progress.working("predicting memory"):
                forecasts = self._session.runner.forecast(self._job, self._task)
            self.seconds = time.perf_counter() - started
            if forecasts.reason:
                progress.say(f"no memory plan ({forecasts.reason}); the search starts without one")
            self._made = dict(forecasts.by_precision)
        return self._made
