"""train, fit, search and dtypes: from a request to a result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from amp_track.commands.request import Request
from amp_track.commands.session import checks
from amp_track.commands.session.session import Session
from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import BadInput, NothingFits, WorkloadFailed
from amp_track.records.job import Job
from amp_track.records.outcome import Outcome, Verdict
from amp_track.records.values import format_bytes
from amp_track.report import progress
from amp_track.results.fit import FitResult, PrecisionFit
from amp_track.results.search import SearchResult, TrialResult
from amp_track.results.seeds import SeedResult, SeedsResult
from amp_track.results.train import TrainResult
from amp_track.workers import processes

if TYPE_CHECKING:
    import optuna

    from amp_track.study.edge_sampler import EdgeSampler, Task
    from amp_track.tracking import Run, Tracker


def train(request: Request) -> TrainResult:
    """One tracked job.

    Raises:
        BadInput: before anything is written.
        WorkloadFailed, NothingFits, KeyboardInterrupt: after the run has been ended accordingly.
    """
    if request.resumption.resume is not None:
        return _resume(request, request.resumption.resume)
    request.check_edge_options()
    session = Session.prepare(request, (request.job.precision,))
    job = session.job
    if request.find_batch_size:
        session.check_study_settings(training=False)
    else:
        job = _accumulating(job, request.fit_options.effective_batch_size)
        checks.data_has_a_batch(job, session.inspection)
    from amp_track import tracking

    tracker = session.open_tracker()
    if request.find_batch_size:
        job = _at_the_edge(job, _fit(session, tracker, given=None))
    name = f"{session.inspection.workload_name} {job.precision}"
    with tracker.run(name, tags={"amp_track.kind": "train"}, run_id=tracking.run_id_of_environment()) as run:
        return _train(session, job, run, title=name)


def _train(session: Session, job: Job, run: Run, *, title: str, resume_from: Path | None = None) -> TrainResult:
    try:
        outcome = session.run_tracked(
            job, run, kind="train", title=title, epoch_lines=True, resume_from=resume_from, keep_weights=True
        )
    except KeyboardInterrupt:
        if run.has_checkpoint:
            progress.say(f"go on with: amp-track train --resume {run.run_id}")
        raise
    result = TrainResult(run_id=run.run_id, job=job, outcome=outcome, inspection=session.inspection)
    _raise_on_crash(job, outcome)
    if not outcome.fits:
        raise NothingFits(_why_it_does_not_fit(session, job, outcome), result.as_json())
    return result


def _resume(request: Request, run_id: str) -> TrainResult:
    from amp_track import tracking
    from amp_track.commands import resume as resuming

    tracker, resumable, request = resuming.open_run(request, run_id)
    session = Session.prepare(request, (request.job.precision,))
    resuming.warn_of_changes(session, resumable)
    name = f"{session.inspection.workload_name} {session.job.precision}"
    with processes.scratch_folder() as folder:
        checkpoint = tracker.fetch_checkpoint(run_id, folder)
        given = tracking.run_id_of_environment()
        if given is not None and given != run_id:
            with tracker.run(f"goes on with {run_id}", run_id=given, tags={"amp_track.continues": run_id}):
                pass
        with tracker.run(name, tags=tracking.resumed_tags(session.job), run_id=run_id) as run:
            run.resume(session.inspection.quality_name)
            return _train(session, session.job, run, title=name, resume_from=checkpoint)


def _accumulating(job: Job, effective_batch_size: int | None) -> Job:
    """With as many batches to an optimizer step as give the effective one."""
    if effective_batch_size is None:
        return job
    assert job.batch_size is not None
    accumulate, rest = divmod(effective_batch_size, job.batch_size * job.processes)
    if rest or not accumulate:
        times = f" × {job.processes} processes" if job.processes > 1 else ""
        raise BadInput(
            f"--effective-batch-size: got {effective_batch_size}, expected a multiple of the batch size "
            f"{job.batch_size}{times}; change one of the two, or give --batch-size auto"
        )
    return dataclasses.replace(job, accumulate=accumulate)


def _at_the_edge(job: Job, fitted: FitResult) -> Job:
    """With the batch that was found: the edge, its largest multiple, or what accumulates to the effective batch."""
    found = fitted.precisions[job.precision]
    if fitted.effective_batch_size is not None:
        parts = fitted.accumulation(job.precision)
        if parts is None:
            raise NothingFits(
                f"no multiple of {fitted.multiple_of} up to {found.edge.largest_batch}, the largest batch that fits, "
                f"divides --effective-batch-size {fitted.effective_batch_size}; give another one"
            )
        return dataclasses.replace(job, batch_size=parts[0], accumulate=parts[1])
    if fitted.multiple_of == 1:
        return dataclasses.replace(job, batch_size=found.edge.largest_batch)
    if found.largest_multiple is None:
        raise NothingFits(
            f"no multiple of {fitted.multiple_of} fits: the largest batch is {found.edge.largest_batch}; "
            "give a smaller --multiple-of"
        )
    return dataclasses.replace(job, batch_size=found.largest_multiple)


def fit(request: Request) -> FitResult:
    """The edge at every precision. Raises as `train` does."""
    session = Session.prepare(request, request.fit_options.precisions)
    session.check_study_settings(training=False)
    from amp_track import tracking

    return _fit(session, session.open_tracker(), given=tracking.run_id_of_environment())


def _fit(session: Session, tracker: Tracker, *, given: str | None) -> FitResult:
    study, sampler = session.open_fit_study()
    with hint_on_interrupt(), session.study_run(tracker, study, given=given) as parent:
        return _find_edges(session, tracker, parent, study, sampler)


def search(request: Request) -> SearchResult:
    """Edges, then trainings inside them, under one MLflow run. Raises as `train` does."""
    if request.job.synthetic:
        raise BadInput("--synthetic: got it on search, which compares quality, expected real data; use fit --synthetic")
    session = Session.prepare(request, request.fit_options.precisions)
    if request.search_options.seeds > 1:
        _check_seeds(session)
    session.check_study_settings(training=True)
    from amp_track import tracking
    from amp_track.commands.session import keep

    tracker = session.open_tracker()
    study, sampler = session.open_fit_study()
    with hint_on_interrupt(), session.study_run(tracker, study, given=tracking.run_id_of_environment()) as parent:
        fitted = _find_edges(session, tracker, parent, study, sampler)
        trials, pareto = _train_inside(session, tracker, parent, fitted)
        seeds = _train_seeds(session, tracker, parent, fitted) if request.search_options.seeds > 1 else None
        result = SearchResult(
            fit=fitted,
            seeds=seeds,
            quality_name=session.inspection.quality_name,
            higher_is_better=session.inspection.higher_is_better,
            workload_batch_size=session.inspection.batch_size,
            trials=tuple(trials),
            pareto=tuple(pareto),
        )
        return dataclasses.replace(result, report=keep.log(result, parent))


def dtypes(request: Request) -> DtypesReport:
    """Which operation of the model runs in which dtype. Writes nothing; raises as `train` does."""
    session = Session.prepare_readonly(request, (request.job.precision,))
    with progress.working("watching one batch forward and backward"):
        found = session.sandbox.dtypes(session.job)
    if isinstance(found, DtypesReport):
        return found
    _raise_on_crash(session.job, found)
    raise NothingFits(_why_it_does_not_fit(session, session.job, found))


@contextmanager
def hint_on_interrupt() -> Iterator[None]:
    """Say so when it is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        progress.say("the same command goes on where it stopped")
        raise


def _find_edges(
    session: Session, tracker: Tracker, parent: Run, study: optuna.Study, sampler: EdgeSampler
) -> FitResult:
    from amp_track.study import fit, storage
    from amp_track.study.edge_sampler import Task

    progress.say(f"finding the largest batch that fits {_limit(session.job)} at {', '.join(session.precisions)}")
    for name, reason in session.unsupported.items():
        progress.say(f"{name} skipped: {reason}")

    free_bytes = study.user_attrs[storage.FREE_BYTES]
    budget = session.fit_budget_bytes(free_bytes)

    def run_task(trial: optuna.Trial, task: Task) -> tuple[Outcome, str]:
        return run_trial(session, tracker, parent, study, trial, session.job_of(task, budget), task=task)

    fits = fit.find_edges(study, sampler, run_task=run_task)
    parent.table("probes.json", fit.table_of(study.get_trials(deepcopy=False)))
    for precision, fitted in fits.items():
        parent.metric(f"largest_batch/{precision}", fitted.edge.largest_batch)
        if fitted.efficient_batch is not None:
            parent.metric(f"efficient_batch/{precision}", fitted.efficient_batch[0])
        if fitted.edge.largest_batch == 0:
            one = session.job_of(Task(precision, 1, "probe", "to see what it takes"), budget)
            needed = max(session.bytes_needed(one) or 0, (fitted.failure and fitted.failure.wanted_bytes) or 0)
            fits[precision] = dataclasses.replace(fitted, bytes_needed=needed or None)
    edges = session.request.fit_options
    result = FitResult(
        study=session.study_name,
        run_id=parent.run_id,
        job=session.job,
        device_name=session.inspection.device_name,
        device_kind=session.inspection.device_kind,
        precisions=fits,
        skipped=session.skipped,
        headroom_bytes=(session.job.memory_budget_bytes or free_bytes) - sampler.goal.budget_bytes,
        multiple_of=edges.multiple_of,
        effective_batch_size=edges.effective_batch_size,
    )
    if all(fitted.edge.largest_batch == 0 for fitted in fits.values()):
        raise NothingFits(_why_nothing_fits(sampler.goal.budget_bytes, fits), result.as_json())
    return result


def run_trial(
    session: Session,
    tracker: Tracker,
    parent: Run,
    study: optuna.Study,
    trial: optuna.Trial,
    job: Job,
    *,
    task: Task | None = None,
    note: str = "",
) -> tuple[Outcome, str]:
    """One job as an Optuna trial and an MLflow run under `parent`: a training, or a `task` of the fit study. `note` is
    what tells it from others like it."""
    from amp_track.study import storage

    kind = "train" if task is None else "confirm" if task.kind == "confirm" else "probe"
    title = f"{job.precision} batch {job.batch_size}" + (f" {kind}" if task else "") + (f" {note}" if note else "")
    tags = {"optuna.study": study.study_name, "optuna.trial": str(trial.number)}
    if task is not None:
        tags["amp_track.reason"] = task.reason
    with tracker.run(title, parent=parent, tags=tags) as run:
        trial.set_user_attr(storage.RUN_ID, run.run_id)
        predicted = task.predicted_bytes if task is not None else None
        outcome = session.run_tracked(job, run, kind=kind, title=title, predicted_bytes=predicted)
        if task is not None or outcome.verdict is not Verdict.TIMED_OUT:  # a slow training says something too
            _raise_on_crash(job, outcome)
    shown = session.inspection.quality_name if task is None else None  # a probe's few steps teach nothing
    progress.say(progress.outcome_line(job, outcome, quality_name=shown, why=task.reason if task else note))
    return outcome, run.run_id


def _train_inside(
    session: Session, tracker: Tracker, parent: Run, fitted: FitResult
) -> tuple[list[TrialResult], list[int]]:
    from amp_track.study import search as train

    trainings = session.request.search_options
    space = train.Space(
        edges=fitted.edges, reference_batch_size=session.inspection.batch_size, learning_rates=trainings.learning_rates
    )
    study = session.open_train_study()
    progress.say(f"training inside the edges: {trainings.trials} trials in all")

    def run_training(trial: optuna.Trial, job: Job) -> tuple[Outcome, str]:
        return run_trial(session, tracker, parent, study, trial, job)

    return train.train_inside(
        study,
        space,
        session.job,
        trials=trainings.trials,
        higher_is_better=session.inspection.higher_is_better,
        run_training=run_training,
    )


def _check_seeds(session: Session) -> None:
    asked = session.request.search_options.seeds
    if "fp32" not in session.precisions:
        raise BadInput(
            f"--seeds: got {asked} with --precision {','.join(session.precisions)}, expected fp32 among them, which "
            "the others are compared with; add it"
        )
    if not session.inspection.evaluation_samples:
        raise BadInput(
            f"--seeds: got {asked}, expected a workload with evaluation data, whose quality is compared; "
            f"{session.job.workload} has none"
        )


def _train_seeds(session: Session, tracker: Tracker, parent: Run, fitted: FitResult) -> SeedsResult:
    """At one batch size, so that precision alone differs: the workload's own, or the largest that fits everywhere."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    from amp_track.study import grid

    asked = session.request.search_options
    job = dataclasses.replace(session.job, batch_size=min(session.inspection.batch_size, *fitted.edges.values()))
    study = session.open_seeds_study()
    progress.say(f"comparing {', '.join(fitted.edges)} over {asked.seeds} seeds at batch {job.batch_size}")

    def run_training(trial: optuna.Trial, point: grid.Point) -> tuple[Outcome, str]:
        chosen = dataclasses.replace(job, **point)
        return run_trial(session, tracker, parent, study, trial, chosen, note=f"seed {chosen.seed}")

    seeds = range(job.seed, job.seed + asked.seeds)
    trained = grid.train_grid(
        study,
        [{"precision": precision, "seed": seed} for seed in seeds for precision in fitted.edges],
        distributions={
            "precision": CategoricalDistribution(tuple(fitted.edges)),
            "seed": IntDistribution(seeds[0], seeds[-1]),
        },
        run_training=run_training,
        value=lambda outcome: outcome.quality if outcome.quality is not None else math.nan,
    )
    trainings = [SeedResult(**training.point, outcome=training.outcome, run_id=training.run_id) for training in trained]
    return SeedsResult(job=job, seeds=asked.seeds, margin=asked.margin, trainings=tuple(trainings))


def _raise_on_crash(job: Job, outcome: Outcome) -> None:
    if outcome.verdict in (Verdict.CRASHED, Verdict.TIMED_OUT):
        raise WorkloadFailed(
            f"{job.workload}: {outcome.message} at {job.precision}, batch {job.batch_size}", detail=outcome.traceback
        )


def _why_it_does_not_fit(session: Session, job: Job, outcome: Outcome) -> str:
    if outcome.verdict is Verdict.OVER_DATASET:
        return outcome.message
    if outcome.verdict is Verdict.KERNEL_LIMIT:
        return f"batch {job.batch_size} is more than a kernel of this device takes: {outcome.message}"
    needed = session.bytes_needed(job)
    where = f" in {outcome.phase}" if outcome.phase else ""
    more = f"it needs {needed:,} bytes ({format_bytes(needed)})" if needed is not None else outcome.message
    return f"out of memory{where}: {job.precision} at batch {job.batch_size} does not fit {_limit(job)}; {more}"


def _why_nothing_fits(budget_bytes: int, fits: dict[str, PrecisionFit]) -> str:
    needs = ", ".join(
        f"{name} {fitted.bytes_needed:,} bytes, {fitted.bytes_needed - budget_bytes:,} more than there are"
        for name, fitted in fits.items()
        if fitted.bytes_needed is not None and fitted.bytes_needed > budget_bytes
    )
    return f"not even one sample fits {format_bytes(budget_bytes)}" + (f"; it needs: {needs}" if needs else "")


def _limit(job: Job) -> str:
    budget = job.memory_budget_bytes
    return f"the budget of {format_bytes(budget)}" if budget is not None else "the memory that is free"
