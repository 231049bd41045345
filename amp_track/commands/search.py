"""search: the edges, then trainings inside them, and over several seeds where that is asked for."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from amp_track.commands import fit
from amp_track.commands.request import Request
from amp_track.commands.session import keep
from amp_track.commands.session.session import JobRunner, Session, interrupted_safely
from amp_track.commands.session.studies import Studies, TrackedStudy, tracked
from amp_track.commands.session.trial import run_trial
from amp_track.records.errors import BadInput
from amp_track.records.job import Job
from amp_track.records.outcome import Outcome
from amp_track.report import progress
from amp_track.results.fit import FitResult
from amp_track.results.search import SearchResult, TrialResult
from amp_track.results.seeds import SeedResult, SeedsResult

if TYPE_CHECKING:
    from amp_track.study import grid
    from amp_track.study.types import Trial

_FEWEST_SEEDS = 2
"""Fewer say nothing about noise."""


@interrupted_safely
def search(request: Request, *, sandbox: JobRunner | None = None) -> SearchResult:
    """Find the edges, then train inside them, all under one MLflow run. Arguments and errors are those of `fit`."""
    if request.job.synthetic:
        raise BadInput("--synthetic: got it on search, which compares quality, expected real data; use fit --synthetic")
    minutes = request.search_options.minutes
    deadline = time.monotonic() + 60 * minutes if minutes is not None else math.inf

    def is_time_up() -> bool:
        return time.monotonic() > deadline

    session = Session.prepare(request, request.fit_options.precisions, sandbox=sandbox)
    compares_seeds = request.search_options.seeds > 1
    if compares_seeds:
        _check_seeds(session)
    studies = Studies(session)
    studies.check("fit", "train", "seeds")
    from amp_track import tracking

    tracker = session.open_tracker()
    study, sampler = fit.open_study(studies)
    with tracked(studies, study, tracker, given_run_id=tracking.run_id_of_environment()) as tracked_study:
        fitted = fit.find_edges(tracked_study, sampler)
        trials, pareto = _train_inside(tracked_study, studies, fitted, is_time_up)
        seeds = _train_seeds(tracked_study, studies, fitted, is_time_up) if compares_seeds else None
        tracker.settle()
        trials = [dataclasses.replace(trial, run_id=tracker.id_of(trial.run_id)) for trial in trials]
        result = SearchResult(
            fit=fitted,
            seeds=seeds,
            quality_name=session.inspection.quality_name,
            higher_is_better=session.inspection.higher_is_better,
            workload_batch_size=session.inspection.batch_size,
            trials=tuple(trials),
            pareto=tuple(pareto),
            trials_wanted=request.search_options.trials,
            seeds_wanted=request.search_options.seeds,
        )
        return dataclasses.replace(result, report=keep.keep_search(result, tracked_study.parent))


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


def _train_inside(
    fit_study: TrackedStudy, studies: Studies, fitted: FitResult, is_time_up: Callable[[], bool]
) -> tuple[list[TrialResult], list[int]]:
    """Train at batches and precisions inside the edges; return the trainings and the numbers of the Pareto front."""
    from amp_track.study import search

    session, options = fit_study.session, fit_study.session.request.search_options
    space = search.Space(
        edges=fitted.edges,
        reference_batch_size=session.inspection.batch_size,
        learning_rates=options.learning_rates,
        emulated=frozenset(session.cautions),
    )
    tracked_study = fit_study.beside(studies.open("train"))
    progress.say(f"training inside the edges: {options.trials} trials in all")

    def run_training(trial: Trial, job: Job) -> tuple[Outcome, str]:
        return run_trial(tracked_study, trial, job)

    return search.train_inside(
        tracked_study.study,
        space,
        session.job,
        trials=options.trials,
        higher_is_better=session.inspection.higher_is_better,
        run_training=run_training,
        is_time_up=is_time_up,
    )


def _train_seeds(
    fit_study: TrackedStudy, studies: Studies, fitted: FitResult, is_time_up: Callable[[], bool]
) -> SeedsResult | None:
    """Train at one batch size, so that precision alone differs: the workload's own, or the largest that fits all.

    Where time is up, the seeds count that every precision was trained with; None if there are fewer than two.
    """
    from amp_track.study import grid
    from amp_track.study.types import CategoricalDistribution, IntDistribution

    session, options = fit_study.session, fit_study.session.request.search_options
    job = dataclasses.replace(session.job, batch_size=min(session.inspection.batch_size, *fitted.edges.values()))
    tracked_study = fit_study.beside(studies.open("seeds"))
    progress.say(f"comparing {', '.join(fitted.edges)} over {options.seeds} seeds at batch {job.batch_size}")

    def run_training(trial: Trial, point: grid.Point) -> tuple[Outcome, str]:
        chosen = dataclasses.replace(job, **point)
        return run_trial(tracked_study, trial, chosen, note=f"seed {chosen.seed}")

    seeds = range(job.seed, job.seed + options.seeds)
    trained = grid.train_grid(
        tracked_study.study,
        [{"precision": precision, "seed": seed} for seed in seeds for precision in fitted.edges],
        distributions={
            "precision": CategoricalDistribution(tuple(fitted.edges)),
            "seed": IntDistribution(seeds[0], seeds[-1]),
        },
        run_training=run_training,
        value=lambda outcome: outcome.quality if outcome.quality is not None else math.nan,
        is_time_up=is_time_up,
    )
    made = Counter(training.point["seed"] for training in trained)
    whole = [seed for seed in seeds if made[seed] == len(fitted.edges)]
    if len(whole) < _FEWEST_SEEDS:
        return None
    trained = [training for training in trained if training.point["seed"] in whole]
    trainings = [
        SeedResult(**training.point, outcome=training.outcome, run_id=fit_study.tracker.id_of(training.run_id))
        for training in trained
    ]
    return SeedsResult(job=job, seeds=len(whole), margin=options.margin, trainings=tuple(trainings))
