"""train, fit and search: from a request to a result."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from amp_track import progress
from amp_track.errors import BadInput, NothingFits, WorkloadFailed
from amp_track.job import Inspection, Job, Outcome, Verdict
from amp_track.request import Request
from amp_track.results import FitResult, PrecisionFit, SearchResult, TrialResult
from amp_track.session import Session
from amp_track.values import format_bytes

if TYPE_CHECKING:
    import optuna

    from amp_track.tracking import Run, Tracker


def train(request: Request) -> tuple[str, Job, Outcome, Inspection]:
    """One tracked job. Returns its run's id, the job as it was run, what came of it, and what it ran on.

    Raises:
        BadInput: before anything is written.
        WorkloadFailed, NothingFits, KeyboardInterrupt: after the run has been ended accordingly.
    """
    session = Session.prepare(request, (request.job.precision,))
    job = session.job
    if request.find_batch_size:
        session.check_study_settings(training=False)
    from amp_track import tracking

    tracker = session.open_tracker()
    name = f"{session.found.workload_name} {job.precision}"
    with tracker.run(name, tags={"amp_track.kind": "train"}, run_id=tracking.run_id_of_environment()) as run:
        if request.find_batch_size:
            fitted = _find_edges(session, tracker, run, (job.precision,))[job.precision]
            if fitted.edge.largest_batch == 0:
                raise _nothing_fits(session, {job.precision: fitted})
            job = dataclasses.replace(job, batch_size=fitted.edge.largest_batch)
        outcome = session.run_tracked(job, run, kind="train", title=name, epoch_lines=True)
        _raise_on_crash(job, outcome)
        if not outcome.fits:
            raise _does_not_fit(session, job, outcome)
    return run.run_id, job, outcome, session.found


def fit(request: Request) -> FitResult:
    """The edge at every precision. Raises as `train` does."""
    session = Session.prepare(request, request.edges.precisions)
    session.check_study_settings(training=False)
    tracker = session.open_tracker()
    fit_study, _ = session.open_fit_study(session.precisions)
    with session.study_run(tracker, fit_study) as parent:
        return _fit(session, tracker, parent)


def search(request: Request) -> SearchResult:
    """Edges, then trainings inside them, under one MLflow run. Raises as `train` does."""
    if request.job.synthetic:
        raise BadInput("--synthetic: got it on search, which compares quality, expected real data; use fit --synthetic")
    session = Session.prepare(request, request.edges.precisions)
    session.check_study_settings(training=True)
    from amp_track import report

    tracker = session.open_tracker()
    fit_study, _ = session.open_fit_study(session.precisions)
    with session.study_run(tracker, fit_study) as parent:
        fitted = _fit(session, tracker, parent)
        trials, pareto = _train_inside(session, tracker, parent, fitted)
        result = SearchResult(
            fit=fitted,
            quality_name=session.found.quality_name,
            higher_is_better=session.found.higher_is_better,
            trials=tuple(trials),
            pareto=tuple(pareto),
        )
        return dataclasses.replace(result, report=report.log(result, parent))


def _fit(session: Session, tracker: Tracker, parent: Run) -> FitResult:
    fits = _find_edges(session, tracker, parent, session.precisions)
    result = FitResult(
        study=session.study_name,
        run_id=parent.run_id,
        job=session.job,
        device_name=session.found.device_name,
        device_kind=session.found.device_kind,
        precisions=fits,
        skipped=session.skipped,
    )
    for precision, fitted in fits.items():
        parent.metric(f"largest_batch/{precision}", fitted.edge.largest_batch)
    if all(fitted.edge.largest_batch == 0 for fitted in fits.values()):
        raise _nothing_fits(session, fits)
    return result


def _find_edges(
    session: Session, tracker: Tracker, parent: Run, precisions: tuple[str, ...]
) -> dict[str, PrecisionFit]:
    from amp_track.study import fit, storage

    study, sampler = session.open_fit_study(precisions)
    budget = session.job.memory_budget_bytes
    within = f"within {format_bytes(budget)}" if budget is not None else "in the memory that is free"
    progress.say(f"finding the largest batch that fits {within} at {', '.join(precisions)}")
    for name, reason in session.skipped.items():
        progress.say(f"{name} skipped: {reason}")

    def run_probe(trial: optuna.Trial, job: Job) -> tuple[Outcome, str]:
        title = f"probe {job.precision} batch {job.batch_size}"
        with tracker.run(title, parent=parent, tags=_trial_tags(study, trial)) as run:
            trial.set_user_attr(storage.RUN_ID, run.run_id)
            outcome = session.run_tracked(job, run, kind="probe", title=title)
            _raise_on_crash(job, outcome)
        progress.say(progress.outcome_line(job, outcome))
        return outcome, run.run_id

    fits = fit.find_edges(study, sampler, precisions, session.job, run_probe)
    for precision, fitted in fits.items():
        if fitted.edge.largest_batch == 0:
            one = dataclasses.replace(session.job, precision=precision, batch_size=1)
            fits[precision] = dataclasses.replace(fitted, bytes_needed=session.bytes_needed(one))
    return fits


def _train_inside(
    session: Session, tracker: Tracker, parent: Run, fitted: FitResult
) -> tuple[list[TrialResult], list[int]]:
    from amp_track.study import storage, train

    trainings = session.request.trainings
    edges = {name: found.edge.largest_batch for name, found in fitted.precisions.items() if found.edge.largest_batch}
    space = train.Space(
        edges=edges, reference_batch_size=session.found.batch_size, learning_rates=trainings.learning_rates
    )
    study = session.open_train_study()
    progress.say(f"training inside the edges: {trainings.trials} trials in all")

    def run_training(trial: optuna.Trial, job: Job) -> tuple[Outcome, str]:
        title = f"{job.precision} batch {job.batch_size}"
        with tracker.run(title, parent=parent, tags=_trial_tags(study, trial)) as run:
            trial.set_user_attr(storage.RUN_ID, run.run_id)
            outcome = session.run_tracked(job, run, kind="train", title=title)
            _raise_on_crash(job, outcome)
        progress.say(progress.outcome_line(job, outcome, quality_name=session.found.quality_name))
        return outcome, run.run_id

    return train.train_inside(
        study,
        space,
        session.job,
        trainings.trials,
        higher_is_better=session.found.higher_is_better,
        run_training=run_training,
    )


def _trial_tags(study: optuna.Study, trial: optuna.Trial) -> dict[str, str]:
    return {"optuna.study": study.study_name, "optuna.trial": str(trial.number)}


def _raise_on_crash(job: Job, outcome: Outcome) -> None:
    if outcome.verdict in (Verdict.CRASHED, Verdict.TIMED_OUT):
        raise WorkloadFailed(
            f"{job.workload}: {outcome.message} at {job.precision}, batch {job.batch_size}", detail=outcome.traceback
        )


def _does_not_fit(session: Session, job: Job, outcome: Outcome) -> NothingFits | BadInput:
    match outcome.verdict:
        case Verdict.OVER_DATASET:
            return BadInput(
                f"--batch-size: got {job.batch_size}, expected at most the training samples; {outcome.message}"
            )
        case Verdict.KERNEL_LIMIT:
            return NothingFits(f"batch {job.batch_size} is more than a kernel of this device takes: {outcome.message}")
    needed = session.bytes_needed(job)
    budget = job.memory_budget_bytes
    where = f" in {outcome.phase}" if outcome.phase else ""
    more = f"it needs {needed:,} bytes ({format_bytes(needed)})" if needed is not None else outcome.message
    limit = f"the budget of {format_bytes(budget)}" if budget is not None else "the memory that is free"
    return NothingFits(f"out of memory{where}: {job.precision} at batch {job.batch_size} does not fit {limit}; {more}")


def _nothing_fits(session: Session, fits: dict[str, PrecisionFit]) -> NothingFits:
    budget = session.job.memory_budget_bytes
    limit = f"the budget of {format_bytes(budget)}" if budget is not None else "the memory that is free"
    needs = ", ".join(
        f"{name} {fitted.bytes_needed:,} bytes ({format_bytes(fitted.bytes_needed)})"
        for name, fitted in fits.items()
        if fitted.bytes_needed is not None
    )
    return NothingFits(f"not even one sample fits {limit}" + (f"; it needs: {needs}" if needs else ""))
