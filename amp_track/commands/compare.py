"""compare: train the same job at several precisions, and at several values of one workload option."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from amp_track.config.options import Request
from amp_track.config.precisions import PRECISIONS, REFERENCE
from amp_track.records.errors import BadInput, NothingFits
from amp_track.records.result import JobResult, JobStatus
from amp_track.report import compare as compare_report
from amp_track.report import progress
from amp_track.results.compare import Cell, CompareResult, as_numbers, in_order
from amp_track.results.trial_row import TrialRow
from amp_track.session import checks, publish, study_manifest
from amp_track.session.run_job import run_trial, seed_text
from amp_track.session.session import Runner, Session, interrupted_safely
from amp_track.session.study_session import Studies, StudyRun, TrackedStudy, tracked

if TYPE_CHECKING:
    from amp_track.study import grid
    from amp_track.study.types import BaseDistribution, Study, Trial

_NEARLY_AS_LONG = 0.9
"""A training that timed out after this fraction of the current --job-timeout is not repeated; clocks differ."""


@interrupted_safely
def compare(request: Request, *, runner: Runner | None = None) -> CompareResult:
    """Train at each precision, each value and each seed, all else equal, under one MLflow run.

    Raises:
        BadInput: before anything is written.
        TargetFailed, NothingFits, KeyboardInterrupt: after runs and trials have ended with that status. A training
            that runs out of memory is a result; NothingFits means that all of them did.
    """
    asked = request.max_batch_options.precisions
    if asked is not None and REFERENCE not in asked:
        raise BadInput(
            f"--precision: got {','.join(asked)}, expected {REFERENCE} among them: the others are compared with it."
        )
    base, sessions = _sessions(request, runner)
    for session in sessions.values():
        checks.data_has_a_batch(
            base.request, dataclasses.replace(base.job, options=session.job.options), session.inspection
        )
    studies = Studies(base)
    studies.check("compare")
    from amp_track import tracking

    tracker = base.open_tracker()
    study = studies.open("compare")
    with tracked(studies, study, tracker, given_run_id=tracking.run_id_of_environment()) as tracked_study:
        study_manifest.keep(tracked_study, "compare", compared=sessions)
        tracked_study.parent.keep_view(batches_differ=False)
        _train(tracked_study, sessions)
        tracker.settle()
        result = result_of(base, study, sessions, tracked_study.run)
        publish.note_answer(studies, result, parts=("compare",))
        result = dataclasses.replace(
            result, report=publish.keep_compare(result, tracked_study.parent, tracker, ui=base.ui)
        )
        if not any(training.job_result.fits for cell in result.cells for training in cell.trainings):
            raise NothingFits(_why_nothing_ran(result), result.as_json())
        publish.show_plots(studies, "compare", result.run_id, trials={})
        return result


def _why_nothing_ran(result: CompareResult) -> str:
    statuses = ", ".join(sorted({cell.status for cell in result.cells}))
    return (
        f"no training of this comparison fits at batch {result.job.batch_size} ({statuses}). Use a smaller "
        "--batch-size, a larger --memory-budget, or a longer --job-timeout."
    )


def _sessions(request: Request, runner: Runner | None) -> tuple[Session, dict[str, Session]]:
    """Return the base session, and a session per value; without an option, the only value is the empty text."""
    assert request.compare_options is not None
    if request.compare_options.vary is None:
        base = Session.prepare(request, request.max_batch_options.precisions, runner=runner)
        return base, {"": base}
    option, texts = request.compare_options.vary
    options = request.job.options
    checks.check_varied(request, [option])
    first = dataclasses.replace(request, job=dataclasses.replace(request.job, options=(*options, (option, texts[0]))))
    with checks.named_by_vary([option]):
        base = Session.prepare(first, request.max_batch_options.precisions, runner=runner)
        each = [base, *(base.with_options((*options, (option, text))) for text in texts[1:])]
    by_value = {dict(session.inspection.options)[option]: session for session in each}  # 16 and 016 are the same value
    return base, {value: by_value[value] for value in in_order(list(by_value))}


def _train(tracked_study: TrackedStudy, sessions: Mapping[str, Session]) -> None:
    from amp_track.study import grid, storage
    from amp_track.study.max_batches import memory_violation

    base = tracked_study.session
    option, param = _option(base.request), _param(base)
    points = _points(base, sessions)
    progress.say(
        f"comparing {', '.join(base.precisions)}"
        + (f" at {option}={','.join(sessions)}" if option is not None else "")
        + f": {len(points)} trainings at batch {base.job.batch_size}"
    )

    base.say_cautions()
    pace = progress.Pace()

    def run_training(trial: Trial, point: grid.Point) -> tuple[JobResult, str]:
        value = point.get(param, "")
        options = sessions[value].inspection.options
        job = dataclasses.replace(base.job, options=options, precision=point["precision"], seed=point["seed"])
        note = (f"{option}={value} " if option is not None else "") + seed_text(job.seed, base.seeds)
        made = len(grid.trained(tracked_study.study, points, value=_speed_of, is_known=_is_known(base)))
        where = pace.next(made, len(points))
        of_value = dataclasses.replace(tracked_study, session=sessions[value])
        job_result, run_id = run_trial(of_value, trial, job, note=note, where=where)
        storage.constrain(trial, "memory", memory_violation(job_result, job.memory_budget_bytes))
        return job_result, run_id

    grid.train_grid(
        tracked_study.study,
        points,
        distributions=_distributions(base, param, list(sessions)),
        run_training=run_training,
        value=_speed_of,
        is_known=_is_known(base),
    )


def result_of(base: Session, study: Study, sessions: Mapping[str, Session], run: StudyRun) -> CompareResult:
    """Return the result of a comparison at the values where every precision was trained; `sessions` are by value."""
    from amp_track.study import grid

    assert base.job.batch_size is not None, "a comparison needs one"
    points, param = _points(base, sessions), _param(base)
    trained = grid.trained(study, points, value=_speed_of, is_known=_is_known(base))
    missing = len(points) - len(trained)
    made = {(training.point.get(param, ""), training.point["precision"]) for training in trained}
    values = [value for value in sessions if all((value, precision) in made for precision in base.precisions)]
    result = CompareResult(
        study=run.name,
        run_id=run.run_id,
        experiment_id=run.experiment_id,
        job=base.job,
        asked=base.request.job,
        hardware=base.inspection.hardware,
        metric_name=base.inspection.metric_name,
        higher_is_better=base.inspection.higher_is_better,
        option=_option(base.request),
        values=tuple(values),
        precisions=base.precisions,
        skipped=base.unsupported,
        cautions=base.cautions,
        seeds=base.request.search_options.seeds,
        tolerance=base.request.search_options.tolerance,
        cells=tuple(
            Cell(
                value=value,
                precision=precision,
                trainings=tuple(
                    TrialRow(
                        precision=precision,
                        batch_size=base.job.batch_size,
                        seed=training.point["seed"],
                        job_result=training.job_result,
                        run_id=run.id_of(training.run_id),
                    )
                    for training in trained
                    if (training.point.get(param, ""), training.point["precision"]) == (value, precision)
                ),
            )
            for value in values
            for precision in base.precisions
        ),
        missing=missing,
    )
    return dataclasses.replace(result, answers=tuple(compare_report.answers(result)))


def _speed_of(job_result: JobResult) -> float:
    return job_result.samples_per_second or 0.0


def _is_known(base: Session) -> Callable[[JobResult], bool]:
    """Return a function that checks whether a result counts: a timeout with less time than now does not."""
    seconds = _NEARLY_AS_LONG * (base.job.job_timeout_seconds or math.inf)
    return lambda job_result: job_result.status is not JobStatus.TIMED_OUT or job_result.wall_seconds >= seconds


def _points(base: Session, sessions: Mapping[str, Session]) -> list[grid.Point]:
    """Return the requested trainings, precisions innermost: trainings to be compared run close together.

    The data is part of a point because an option may change it, and results on other data are not comparable.
    """
    return [
        {"precision": precision, "seed": seed, "dataset": session.inspection.dataset_digest}
        | ({_param(base): value} if _option(base.request) is not None else {})
        for seed in base.seeds
        for value, session in sessions.items()
        for precision in base.precisions
    ]


def _distributions(base: Session, param: str, values: list[str]) -> dict[str, BaseDistribution]:
    """Return distributions that a later command may widen: Optuna rejects new choices of a categorical one."""
    from amp_track.study.types import CategoricalDistribution, FloatDistribution, IntDistribution

    seeds = base.seeds
    known: dict[str, BaseDistribution] = {
        "precision": CategoricalDistribution(PRECISIONS),
        "seed": IntDistribution(seeds[0], seeds[-1]),
    }
    if (numbers := as_numbers(values)) is not None:
        known[param] = FloatDistribution(min(numbers), max(numbers))  # accepts the text of a number
    return known


def _param(base: Session) -> str:
    """Return the trial parameter of the option; the prefix avoids a conflict with precision, seed and dataset."""
    return f"option.{_option(base.request)}"


def _option(request: Request) -> str | None:
    assert request.compare_options is not None
    return request.compare_options.vary[0] if request.compare_options.vary is not None else None
