"""search: find the max batches, then train inside them, and over several seeds with --seeds."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from typing import TYPE_CHECKING

from amp_track.commands import interrupted_safely, max_batch
from amp_track.config.job import Job
from amp_track.config.options import Request, SearchOptions
from amp_track.config.precisions import REFERENCE
from amp_track.records.errors import BadInput
from amp_track.report import figures, progress
from amp_track.report.wording import counted, time_text
from amp_track.results.equivalence import SeedsResult
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow
from amp_track.session import checks, probe_jobs, publish, study_manifest
from amp_track.session.run_job import run_trial, seed_text
from amp_track.session.session import Runner, Session
from amp_track.session.study_session import Studies, StudyRun, TrackedStudy, tracked

if TYPE_CHECKING:
    from amp_track.study.grid import Grid, Point
    from amp_track.study.search import TrainingSearch
    from amp_track.study.types import Study

_FEWEST_SEEDS = 2
"""Fewer seeds cannot estimate the noise."""
_SLOW = 0.5
"""A precision below this fraction of the speed of fp32 is not worth more than one training."""


@interrupted_safely
def search(request: Request, *, runner: Runner | None = None) -> SearchResult:
    """Find the max batches and train inside them, in one MLflow run. Arguments and errors are those of `max_batch`."""
    options = request.search_options
    session = Session.prepare(request, request.max_batch_options.precisions, runner=runner)
    checks.needs_a_workload(session.job, session.inspection, "search", "whose metric it compares")
    if options.seeds > 1 and REFERENCE not in session.precisions:
        raise BadInput(
            f"--seeds: got {options.seeds} with --precision {','.join(session.precisions)}, expected fp32 among them: "
            "the others are compared with it."
        )
    if not session.inspection.evaluation_samples:
        raise BadInput(
            f"search requires evaluation data to compare the metric; {session.job.workload} has none. Return some from "
            "eval_data, or use amp-track max-batch, which compares memory and speed."
        )
    studies, parts = Studies(session), ("max-batch", "train", "seeds")
    studies.check(*parts)
    from amp_track import tracking

    figures.warm_up()
    tracker = session.open_tracker()
    study, sampler = max_batch.open_study(studies)
    with tracked(studies, study, tracker, given_run_id=tracking.run_id_of_environment()) as tracked_study:
        study_manifest.keep(tracked_study, "search")
        tracked_study.parent.keep_view(batches_differ=True)
        _say_phases(options)
        fitted = max_batch.find_max_batches(tracked_study, sampler)
        limit_seconds = options.time_limit_seconds  # from here on: a slow device must leave time to train
        deadline = time.monotonic() + (limit_seconds if limit_seconds is not None else math.inf)
        _train_inside(tracked_study.open("train"), fitted, deadline)
        if options.seeds > 1:
            _train_seeds(tracked_study.open("seeds"), fitted, deadline)
        studies.end_stale_trials(*parts)
        tracker.settle()
        result = result_of(studies, fitted, tracked_study.run)
        return dataclasses.replace(result, report=publish.publish(tracked_study, result, *parts))


def result_of(studies: Studies, fitted: MaxBatchResult, run: StudyRun) -> SearchResult:
    """Return the result of the trainings inside the max batches of a study."""
    from amp_track.study import search

    session, options = studies.session, studies.session.request.search_options
    trained = studies.existing("train")
    trials, pareto = search.trainings(trained, session.job) if trained is not None else ([], [])
    return SearchResult(
        limits=fitted,
        seeds=_seeds_of(studies, fitted, run),
        metric_name=session.inspection.metric_name,
        higher_is_better=session.inspection.higher_is_better,
        workload_batch_size=session.inspection.batch_size,
        trials=tuple(dataclasses.replace(trial, run_id=run.id_of(trial.run_id)) for trial in trials),
        pareto=tuple(pareto),
        trials_wanted=options.trials,
        seeds_wanted=options.seeds,
        tolerance=options.tolerance,
    )


def _train_inside(tracked_study: TrackedStudy, fitted: MaxBatchResult, deadline: float) -> None:
    """Train at batches and precisions within the max batches. No training starts after `deadline` (monotonic clock)."""
    from amp_track.study import search, trials

    session, options = tracked_study.session, tracked_study.session.request.search_options
    slow = _slow_precisions(fitted)
    is_asked_for = session.request.max_batch_options.precisions is not None
    skipped = frozenset(name for name, ratio in slow.items() if not is_asked_for and ratio * (options.trials - 1) < 1)
    for name, ratio in slow.items():
        what = "not trained, which would take longer than all other trials" if name in skipped else "trained only once"
        what += ", but at every seed (--precision leaves it out)" * (options.seeds > 1)
        progress.say(f"{name} runs at {ratio:.2g} × the speed of {REFERENCE} here: {what}")
    space = search.Space(
        max_batches=fitted.max_batch,
        reference_batch_size=session.inspection.batch_size,
        lr_range=options.lr_range,
        emulated=frozenset(session.cautions),
        slow=frozenset(slow),
        skipped=skipped,
    )
    within = search.TrainingSearch(
        study=tracked_study.study,
        space=space,
        job=fitted.with_eval_batch_size(session.job, *fitted.max_batch),
        trials=options.trials,
        higher_is_better=session.inspection.higher_is_better,
    )
    _say_cost(tracked_study, fitted, within)
    pace = progress.Pace(deadline)
    while within.is_anything_left(deadline):
        with trials.next_trial(within.study) as asked:
            job = within.suggest(asked.trial)
            job_result, run_id = within.known(asked.trial) or run_trial(
                tracked_study, asked.trial, job, where=pace.next(len(within.complete()), options.trials)
            )
            asked.value = within.record(asked.trial, job, job_result, run_id)


def _say_phases(options: SearchOptions) -> None:
    """Print what a search does, and the flags that bound it."""
    text = f"searching: first every max batch (no time limit), then {counted(options.trials, 'trial')} (--trials)"
    text += f" and {options.seeds} seeds per precision (--seeds)" if options.seeds > 1 else ""
    progress.say(text + _limit_in_words(options))


def _limit_in_words(options: SearchOptions) -> str:
    """Return when the last training may start, with its flag; "" without a limit."""
    if options.time_limit_seconds is None:
        return ""
    return f"; none starts after {time_text(options.time_limit_seconds)} of training (--time-limit)"


def _say_cost(tracked_study: TrackedStudy, fitted: MaxBatchResult, within: TrainingSearch) -> None:
    """Print how many trainings follow, how long they take at the speed of the probes, and the flags that bound them."""
    session, left = tracked_study.session, max(within.trials - len(within.complete()), 0)
    of_seeds = _seeds_left(tracked_study.studies, fitted)
    parts = [f"{counted(left, 'trial')} (--trials)"] * bool(left)
    parts += [f"{counted(len(of_seeds), 'training')} over seeds (--seeds)"] * bool(of_seeds)
    if not parts:
        progress.say(f"training within the max batches: {counted(within.trials, 'trial')} done, none left (--trials)")
        return
    text = f"training within the max batches: {' and '.join(parts)}"
    landmarks = [dataclasses.replace(within.job, **changes) for changes in within.space.landmarks()]
    of_trials, of_each_seed = (_mean_seconds(session, fitted, jobs) for jobs in (landmarks, of_seeds))
    if seconds := left * of_trials + len(of_seeds) * of_each_seed:
        text += f" of about {time_text(seconds / (left + len(of_seeds)))} each, {time_text(seconds)} in all"
    progress.say(text + _limit_in_words(session.request.search_options))


def _mean_seconds(session: Session, fitted: MaxBatchResult, jobs: Iterable[Job]) -> float:
    """Return how long the trainings take at the speed of the probes; 0 if it is unknown."""
    each = []
    for job in jobs:
        found = fitted.precisions[job.precision]
        if (probe := found.confirmation or found.at_max_batch) is not None:
            each.append(probe_jobs.training_seconds(session, job, probe))
    known = [seconds for seconds in each if seconds is not None]
    return fmean(known) if known else 0.0


def _seeds_left(studies: Studies, fitted: MaxBatchResult) -> list[Job]:
    """Return the trainings over seeds that no search worker has finished."""
    seeds, study = studies.session.seeds, studies.existing("seeds")
    if len(seeds) == 1:
        return []
    job = _job_of_seeds(studies.session, fitted, fitted.max_batch)
    points = _points_of_seeds(seeds, fitted) if study is None else _grid_of_seeds(study, seeds, fitted).missing()
    return [dataclasses.replace(job, **point) for point in points]


def _slow_precisions(fitted: MaxBatchResult) -> dict[str, float]:
    """Return the precisions that do not pay on this device, with their best speed relative to fp32's."""
    speeds = {name: fitted.precisions[name].best_speed for name in fitted.max_batch}
    of_fp32 = speeds.get(REFERENCE)
    ratios = {name: speed / of_fp32 for name, speed in speeds.items() if speed} if of_fp32 else {}
    return {name: ratio for name, ratio in ratios.items() if ratio < _SLOW}


def _train_seeds(tracked_study: TrackedStudy, fitted: MaxBatchResult, deadline: float) -> None:
    """Train at one batch size, so that only the precision differs: the workload's, or the largest that fits at all.

    No training starts after `deadline` of the monotonic clock.
    """
    from amp_track.study import trials

    seeds, job = tracked_study.session.seeds, _job_of_seeds(tracked_study.session, fitted, fitted.max_batch)
    progress.say(f"comparing {', '.join(fitted.max_batch)} over {len(seeds)} seeds at batch {job.batch_size}")
    grid, pace = _grid_of_seeds(tracked_study.study, seeds, fitted), progress.Pace(deadline)
    while grid.is_anything_left(deadline):
        with trials.next_trial(grid.study) as asked:
            chosen = dataclasses.replace(job, **grid.claim(asked.trial))
            where, note = pace.next(len(grid.trained()), len(grid.points)), seed_text(chosen.seed, seeds)
            job_result, run_id = run_trial(tracked_study, asked.trial, chosen, note=note, where=where)
            asked.value = grid.record(asked.trial, job_result, run_id)


def _seeds_of(studies: Studies, fitted: MaxBatchResult, run: StudyRun) -> SeedsResult | None:
    """Return the results of the seeds that all precisions were trained with; None if fewer than two."""
    seeds = studies.session.seeds
    study = studies.existing("seeds") if len(seeds) > 1 and fitted.max_batch else None
    if study is None:
        return None
    if not (trained := _grid_of_seeds(study, seeds, fitted).trained()):
        return None
    precisions = {training.point["precision"] for training in trained}  # a later max-batch may have found more
    made = Counter(training.point["seed"] for training in trained)
    whole = [seed for seed in seeds if made[seed] == len(precisions)]
    if len(whole) < _FEWEST_SEEDS:
        return None
    job = _job_of_seeds(studies.session, fitted, precisions)
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


def _grid_of_seeds(study: Study, seeds: range, fitted: MaxBatchResult) -> Grid:
    from amp_track.study.grid import Grid
    from amp_track.study.types import CategoricalDistribution, IntDistribution

    return Grid(
        study=study,
        points=_points_of_seeds(seeds, fitted),
        distributions={
            "precision": CategoricalDistribution(tuple(fitted.max_batch)),
            "seed": IntDistribution(seeds[0], seeds[-1]),
        },
        objective="metric",
        job_timeout_seconds=fitted.job.job_timeout_seconds,
    )


def _points_of_seeds(seeds: range, fitted: MaxBatchResult) -> list[Point]:
    return [{"precision": precision, "seed": seed} for seed in seeds for precision in fitted.max_batch]


def _job_of_seeds(session: Session, fitted: MaxBatchResult, precisions: Iterable[str]) -> Job:
    max_batches = {name: fitted.max_batch[name] for name in precisions}
    job = fitted.with_eval_batch_size(session.job, *max_batches)
    return dataclasses.replace(job, batch_size=min(session.inspection.batch_size, *max_batches.values()))
