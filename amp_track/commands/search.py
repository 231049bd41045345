"""search: find the max batches, then train inside them, and over several seeds with --seeds."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from typing import TYPE_CHECKING

from amp_track.commands import max_batch
from amp_track.config.job import Job
from amp_track.config.options import Request
from amp_track.config.precisions import REFERENCE
from amp_track.records.errors import BadInput
from amp_track.records.result import JobResult
from amp_track.report import progress
from amp_track.results.equivalence import SeedsResult
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow
from amp_track.session import publish, study_manifest
from amp_track.session.run_job import run_trial, seed_text
from amp_track.session.session import Runner, Session, interrupted_safely
from amp_track.session.study_session import Studies, StudyRun, TrackedStudy, tracked

if TYPE_CHECKING:
    from amp_track.study import grid
    from amp_track.study.types import Trial

_FEWEST_SEEDS = 2
"""Fewer seeds cannot estimate the noise."""


@interrupted_safely
def search(request: Request, *, runner: Runner | None = None) -> SearchResult:
    """Find the max batches and train inside them, in one MLflow run. Arguments and errors are those of `max_batch`."""
    if request.job.synthetic:
        raise BadInput("search compares the metric and needs real data. Use max-batch --synthetic.")
    limit_seconds = request.search_options.time_limit_seconds
    deadline = time.monotonic() + limit_seconds if limit_seconds is not None else math.inf
    session = Session.prepare(request, request.max_batch_options.precisions, runner=runner)
    compares_seeds = request.search_options.seeds > 1
    if compares_seeds:
        _check_seeds(session)
    studies = Studies(session)
    studies.check("max-batch", "train", "seeds")
    from amp_track import tracking

    tracker = session.open_tracker()
    study, sampler = max_batch.open_study(studies)
    with tracked(studies, study, tracker, given_run_id=tracking.run_id_of_environment()) as tracked_study:
        study_manifest.keep(tracked_study, "search")
        tracked_study.parent.keep_view(batches_differ=True)
        fitted = max_batch.find_max_batches(tracked_study, sampler)
        _train_inside(tracked_study, fitted, deadline)
        if compares_seeds:
            _train_seeds(tracked_study, fitted, deadline)
        studies.end_stale_trials("max-batch", "train", "seeds")
        tracker.settle()
        result = result_of(studies, fitted, tracked_study.run)
        publish.note_answer(studies, result, parts=("max-batch", "train", "seeds"))
        result = dataclasses.replace(result, report=publish.keep_search(result, tracked_study.parent, ui=session.ui))
        best = {trial.number: trial.run_id for trial in result.trials if trial.number in result.pareto}
        publish.show_plots(studies, "train", fitted.run_id, trials=best)
        return result


def result_of(studies: Studies, fitted: MaxBatchResult, run: StudyRun) -> SearchResult:
    """Return the result of the trainings inside the max batches of a study."""
    from amp_track.study import search

    session, options = studies.session, studies.session.request.search_options
    trained = studies.existing("train")
    trials, pareto = search.trainings(trained) if trained is not None else ([], [])
    return SearchResult(
        limits=fitted,
        seeds=_seeds_of(studies, fitted, run) if options.seeds > 1 else None,
        metric_name=session.inspection.metric_name,
        higher_is_better=session.inspection.higher_is_better,
        workload_batch_size=session.inspection.batch_size,
        trials=tuple(dataclasses.replace(trial, run_id=run.id_of(trial.run_id)) for trial in trials),
        pareto=tuple(pareto),
        trials_wanted=options.trials,
        seeds_wanted=options.seeds,
        tolerance=options.tolerance,
    )


def _check_seeds(session: Session) -> None:
    asked = session.request.search_options.seeds
    if REFERENCE not in session.precisions:
        raise BadInput(
            f"--seeds: got {asked} with --precision {','.join(session.precisions)}, expected fp32 among them: the "
            "others are compared with it."
        )
    if not session.inspection.evaluation_samples:
        raise BadInput(f"--seeds requires evaluation data to compare the metric; {session.job.workload} has none.")


def _train_inside(max_batch_study: TrackedStudy, fitted: MaxBatchResult, deadline: float) -> None:
    """Train at batches and precisions within the max batches. No training starts after `deadline` (monotonic clock)."""
    from amp_track.study import search

    session, options = max_batch_study.session, max_batch_study.session.request.search_options
    space = search.Space(
        max_batches=fitted.max_batch,
        reference_batch_size=session.inspection.batch_size,
        lr_range=options.lr_range,
        emulated=frozenset(session.cautions),
    )
    tracked_study = max_batch_study.open("train")
    progress.say(f"training within the max batches: up to {options.trials} trials")

    pace = progress.Pace(deadline)

    def run_training(trial: Trial, job: Job, made: int) -> tuple[JobResult, str]:
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


def _train_seeds(max_batch_study: TrackedStudy, fitted: MaxBatchResult, deadline: float) -> None:
    """Train at one batch size, so that only the precision differs: the workload's, or the largest that fits at all.

    No training starts after `deadline` of the monotonic clock.
    """
    from amp_track.study import grid
    from amp_track.study.types import CategoricalDistribution, IntDistribution

    job, seeds = _job_of_seeds(max_batch_study.studies, fitted), max_batch_study.session.seeds
    tracked_study = max_batch_study.open("seeds")
    progress.say(f"comparing {', '.join(fitted.max_batch)} over {len(seeds)} seeds at batch {job.batch_size}")

    points, pace = _points_of_seeds(seeds, fitted), progress.Pace(deadline)

    def run_training(trial: Trial, point: grid.Point) -> tuple[JobResult, str]:
        made = len(grid.trained(tracked_study.study, points, value=_metric_of))
        chosen, where = dataclasses.replace(job, **point), pace.next(made, len(points))
        return run_trial(tracked_study, trial, chosen, note=seed_text(chosen.seed, seeds), where=where)

    grid.train_grid(
        tracked_study.study,
        points,
        distributions={
            "precision": CategoricalDistribution(tuple(fitted.max_batch)),
            "seed": IntDistribution(seeds[0], seeds[-1]),
        },
        run_training=run_training,
        value=_metric_of,
        is_time_up=lambda: time.monotonic() > deadline,
    )


def _seeds_of(studies: Studies, fitted: MaxBatchResult, run: StudyRun) -> SeedsResult | None:
    """Return the results of the seeds that all precisions were trained with; None if fewer than two."""
    from amp_track.study import grid

    study, seeds = studies.existing("seeds"), studies.session.seeds
    if study is None or not fitted.max_batch:
        return None
    trained = grid.trained(study, _points_of_seeds(seeds, fitted), value=_metric_of)
    made = Counter(training.point["seed"] for training in trained)
    whole = [seed for seed in seeds if made[seed] == len(fitted.max_batch)]
    if len(whole) < _FEWEST_SEEDS:
        return None
    job = _job_of_seeds(studies, fitted)
    assert job.batch_size is not None
    return SeedsResult(
        job=job,
        seeds=len(whole),
        tolerance=studies.session.request.search_options.tolerance,
        trainings=tuple(
            TrialRow(
                **training.point,
                batch_size=job.batch_size,
                job_result=training.job_result,
                run_id=run.id_of(training.run_id),
            )
            for training in trained
            if training.point["seed"] in whole
        ),
    )


def _metric_of(job_result: JobResult) -> float:
    return job_result.metric if job_result.metric is not None else math.nan


def _points_of_seeds(seeds: range, fitted: MaxBatchResult) -> list[dict[str, str | int]]:
    return [{"precision": precision, "seed": seed} for seed in seeds for precision in fitted.max_batch]


def _job_of_seeds(studies: Studies, fitted: MaxBatchResult) -> Job:
    session = studies.session
    return dataclasses.replace(session.job, batch_size=min(session.inspection.batch_size, *fitted.max_batch.values()))
