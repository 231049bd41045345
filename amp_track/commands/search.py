"""search: the edges, then trainings inside them, and over several seeds where that is asked for."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from typing import TYPE_CHECKING

from amp_track.commands import max_batch
from amp_track.config.job import Job
from amp_track.config.options import Request
from amp_track.records.errors import BadInput
from amp_track.records.result import Outcome
from amp_track.report import progress
from amp_track.report.pace import Pace
from amp_track.results.max_batch import FitResult
from amp_track.results.search import SearchResult
from amp_track.results.seeds import SeedResult, SeedsResult
from amp_track.session import publish, publish_notes, study_manifest
from amp_track.session.run_job import run_trial, seed_text
from amp_track.session.session import JobRunner, Session, interrupted_safely
from amp_track.session.study_session import Studies, StudyRun, TrackedStudy, tracked

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
    session = Session.prepare(request, request.fit_options.precisions, sandbox=sandbox)
    compares_seeds = request.search_options.seeds > 1
    if compares_seeds:
        _check_seeds(session)
    studies = Studies(session)
    studies.check("fit", "train", "seeds")
    from amp_track import tracking

    tracker = session.open_tracker()
    study, sampler = max_batch.open_study(studies)
    with tracked(studies, study, tracker, given_run_id=tracking.run_id_of_environment()) as tracked_study:
        study_manifest.keep(tracked_study, "search")
        tracked_study.parent.keep_view(batches_differ=True)
        fitted = max_batch.find_edges(tracked_study, studies, sampler)
        _train_inside(tracked_study, studies, fitted, deadline)
        if compares_seeds:
            _train_seeds(tracked_study, studies, fitted, deadline)
        studies.fail_dead_trials("fit", "train", "seeds")
        tracker.settle()
        result = result_of(studies, fitted, tracked_study.run)
        publish_notes.note_answer(studies, result, parts=("fit", "train", "seeds"))
        result = dataclasses.replace(result, report=publish.keep_search(result, tracked_study.parent, ui=session.ui))
        best = {trial.number: trial.run_id for trial in result.trials if trial.number in result.pareto}
        publish_notes.show_pictures(studies, "train", fitted.run_id, trials=best)
        return result


def result_of(studies: Studies, fitted: FitResult, run: StudyRun) -> SearchResult:
    """Return what the trainings of a study have found inside its edges."""
    from amp_track.study import search

    session, options = studies.session, studies.session.request.search_options
    trained = studies.existing("train")
    trials, pareto = search.trainings(trained) if trained is not None else ([], [])
    return SearchResult(
        fit=fitted,
        seeds=_seeds_of(studies, fitted, run) if options.seeds > 1 else None,
        quality_name=session.inspection.quality_name,
        higher_is_better=session.inspection.higher_is_better,
        workload_batch_size=session.inspection.batch_size,
        trials=tuple(dataclasses.replace(trial, run_id=run.id_of(trial.run_id)) for trial in trials),
        pareto=tuple(pareto),
        trials_wanted=options.trials,
        seeds_wanted=options.seeds,
        margin=options.margin,
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


def _train_inside(fit_study: TrackedStudy, studies: Studies, fitted: FitResult, deadline: float) -> None:
    """Train at batches and precisions inside the edges. None is begun after `deadline`, of the monotonic clock."""
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

    pace = Pace(deadline)

    def run_training(trial: Trial, job: Job, made: int) -> tuple[Outcome, str]:
        return run_trial(tracked_study, trial, job, where=pace.next(made, options.trials))

    search.train_inside(
        tracked_study.study,
        space,
        session.job,
        trials=options.trials,
        higher_is_better=session.inspection.higher_is_better,
        run_training=run_training,
        is_time_up=lambda: time.monotonic() > deadline,
    )


def _train_seeds(fit_study: TrackedStudy, studies: Studies, fitted: FitResult, deadline: float) -> None:
    """Train at one batch size, so that precision alone differs: the workload's own, or the largest that fits all.

    None is begun after `deadline`, of the monotonic clock.
    """
    from amp_track.study import grid
    from amp_track.study.types import CategoricalDistribution, IntDistribution

    job, seeds = _job_of_seeds(studies, fitted), _seeds_asked(studies)
    tracked_study = fit_study.beside(studies.open("seeds"))
    progress.say(f"comparing {', '.join(fitted.edges)} over {len(seeds)} seeds at batch {job.batch_size}")

    points, pace = _points_of_seeds(seeds, fitted), Pace(deadline)

    def run_training(trial: Trial, point: grid.Point) -> tuple[Outcome, str]:
        made = len(grid.trained(tracked_study.study, points, value=_quality_of))
        chosen, where = dataclasses.replace(job, **point), pace.next(made, len(points))
        return run_trial(tracked_study, trial, chosen, note=seed_text(chosen.seed, seeds), where=where)

    grid.train_grid(
        tracked_study.study,
        points,
        distributions={
            "precision": CategoricalDistribution(tuple(fitted.edges)),
            "seed": IntDistribution(seeds[0], seeds[-1]),
        },
        run_training=run_training,
        value=_quality_of,
        is_time_up=lambda: time.monotonic() > deadline,
    )


def _seeds_of(studies: Studies, fitted: FitResult, run: StudyRun) -> SeedsResult | None:
    """Return the seeds that every precision was trained with; None if there are fewer than two."""
    from amp_track.study import grid

    study, seeds = studies.existing("seeds"), _seeds_asked(studies)
    if study is None or not fitted.edges:
        return None
    trained = grid.trained(study, _points_of_seeds(seeds, fitted), value=_quality_of)
    made = Counter(training.point["seed"] for training in trained)
    whole = [seed for seed in seeds if made[seed] == len(fitted.edges)]
    if len(whole) < _FEWEST_SEEDS:
        return None
    return SeedsResult(
        job=_job_of_seeds(studies, fitted),
        seeds=len(whole),
        margin=studies.session.request.search_options.margin,
        trainings=tuple(
            SeedResult(**training.point, outcome=training.outcome, run_id=run.id_of(training.run_id))
            for training in trained
            if training.point["seed"] in whole
        ),
    )


def _quality_of(outcome: Outcome) -> float:
    return outcome.quality if outcome.quality is not None else math.nan


def _seeds_asked(studies: Studies) -> range:
    first = studies.session.job.seed
    return range(first, first + studies.session.request.search_options.seeds)


def _points_of_seeds(seeds: range, fitted: FitResult) -> list[dict[str, str | int]]:
    return [{"precision": precision, "seed": seed} for seed in seeds for precision in fitted.edges]


def _job_of_seeds(studies: Studies, fitted: FitResult) -> Job:
    session = studies.session
    return dataclasses.replace(session.job, batch_size=min(session.inspection.batch_size, *fitted.edges.values()))
