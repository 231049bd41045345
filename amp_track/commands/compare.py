"""compare: train the same job at several precisions, and at several values of one workload option."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from amp_track.commands import interrupted_safely
from amp_track.config.options import Request
from amp_track.config.precisions import PRECISIONS, REFERENCE
from amp_track.records.errors import BadInput, NothingFits
from amp_track.report import compare as compare_report
from amp_track.report import figures, progress
from amp_track.results.compare import Cell, CompareResult, as_numbers, in_order
from amp_track.results.trial_row import TrialRow
from amp_track.session import checks, publish, study_manifest
from amp_track.session.run_job import run_trial, seed_text
from amp_track.session.session import Runner, Session
from amp_track.session.study_session import Studies, StudyRun, TrackedStudy, tracked

if TYPE_CHECKING:
    from amp_track.study.grid import Grid
    from amp_track.study.types import BaseDistribution, Study


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

    figures.warm_up()
    tracker = base.open_tracker()
    study = studies.open("compare")
    with tracked(studies, study, tracker, given_run_id=tracking.run_id_of_environment()) as tracked_study:
        study_manifest.keep(tracked_study, "compare", compared=sessions)
        tracked_study.parent.keep_view(batches_differ=False)
        _train(tracked_study, sessions)
        tracker.settle()
        result = result_of(base, study, sessions, tracked_study.run)
        result = dataclasses.replace(result, report=publish.publish(tracked_study, result, "compare"))
        if not any(training.job_result.fits for cell in result.cells for training in cell.trainings):
            statuses = ", ".join(sorted({cell.status for cell in result.cells}))
            raise NothingFits(
                f"no training of this comparison fits at batch {result.job.batch_size} ({statuses}). Use a smaller "
                "--batch-size, a larger --memory-budget, or a longer --job-timeout.",
                result=result.as_json(),
            )
        return result


def _sessions(request: Request, runner: Runner | None) -> tuple[Session, dict[str, Session]]:
    """Return the base session, and a session per value; without an option, the only value is the empty text."""
    assert request.compare_options is not None
    if request.compare_options.vary is None:
        base = Session.prepare(request, request.max_batch_options.precisions, runner=runner)
        checks.needs_a_workload(base.job, base.inspection, "compare", "whose metric it compares")
        return base, {"": base}
    option, texts = request.compare_options.vary
    options = request.job.options
    first = dataclasses.replace(request, job=dataclasses.replace(request.job, options=(*options, (option, texts[0]))))
    with checks.given_by_vary(request, [option]):
        base = Session.prepare(first, request.max_batch_options.precisions, runner=runner)
        checks.needs_a_workload(base.job, base.inspection, "compare", "whose metric it compares")
        each = [base, *(base.with_options((*options, (option, text))) for text in texts[1:])]
    by_value = {dict(session.inspection.options)[option]: session for session in each}  # 16 and 016 are the same value
    return base, {value: by_value[value] for value in in_order(list(by_value))}


def _train(tracked_study: TrackedStudy, sessions: Mapping[str, Session]) -> None:
    from amp_track.study import trials
    from amp_track.study.max_batches import memory_violation

    base = tracked_study.session
    option, grid = _option(base.request), _grid(base, tracked_study.study, sessions)
    progress.say(
        f"comparing {', '.join(base.precisions)}"
        + (f" at {option}={','.join(sessions)}" if option is not None else "")
        + f": {len(grid.points)} trainings at batch {base.job.batch_size}"
    )
    base.say_cautions()
    pace = progress.Pace()
    while grid.is_anything_left():
        with trials.next_trial(grid.study) as asked:
            point = grid.claim(asked.trial)
            value = point.get(_param(option), "")
            session = sessions[value]
            job = dataclasses.replace(
                base.job, options=session.inspection.options, precision=point["precision"], seed=point["seed"]
            )
            note = (f"{option}={value} " if option is not None else "") + seed_text(job.seed, base.seeds)
            where = pace.next(len(grid.trained()), len(grid.points))
            of_value = dataclasses.replace(tracked_study, session=session)
            job_result, run_id = run_trial(of_value, asked.trial, job, note=note, where=where)
            constraint = "memory", memory_violation(job_result, job.memory_budget_bytes)
            asked.value = grid.record(asked.trial, job_result, run_id, constraint=constraint)


def result_of(base: Session, study: Study, sessions: Mapping[str, Session], run: StudyRun) -> CompareResult:
    """Return the result of a comparison at the values where every precision was trained; `sessions` are by value."""
    assert base.job.batch_size is not None, "a comparison needs one"
    option, grid = _option(base.request), _grid(base, study, sessions)
    trained = grid.trained()
    made: dict[tuple[str, str], list[TrialRow]] = {}
    for training in trained:
        row = TrialRow(
            precision=training.point["precision"],
            batch_size=base.job.batch_size,
            seed=training.point["seed"],
            job_result=training.job_result,
            run_id=run.id_of(training.run_id),
        )
        made.setdefault((training.point.get(_param(option), ""), row.precision), []).append(row)
    hardware = base.inspection.hardware
    least_bytes = hardware.least_metered_bytes(base.job.memory_budget_bytes)
    values = [value for value in sessions if all((value, precision) in made for precision in base.precisions)]
    result = CompareResult(
        study=run.name,
        run_id=run.run_id,
        experiment_id=run.experiment_id,
        job=base.job,
        asked=base.request.job,
        hardware=hardware,
        metric_name=base.inspection.metric_name,
        higher_is_better=base.inspection.higher_is_better,
        option=option,
        values=tuple(values),
        precisions=base.precisions,
        skipped=base.skipped,
        cautions=base.cautions,
        seeds=base.request.search_options.seeds,
        tolerance=base.request.search_options.tolerance,
        cells=tuple(
            Cell(value=value, precision=precision, trainings=tuple(made[value, precision]), least_bytes=least_bytes)
            for value in values
            for precision in base.precisions
        ),
        missing=len(grid.points) - len(trained),
    )
    return dataclasses.replace(result, answers=tuple(compare_report.answers(result)))


def _grid(base: Session, study: Study, sessions: Mapping[str, Session]) -> Grid:
    """Return the requested trainings, precisions innermost: trainings to be compared run close together.

    The data is part of a point because an option may change it, and results on other data are not comparable.
    """
    from amp_track.study.grid import Grid
    from amp_track.study.types import CategoricalDistribution, FloatDistribution, IntDistribution

    option = _option(base.request)
    distributions: dict[str, BaseDistribution] = {
        "precision": CategoricalDistribution(PRECISIONS),
        "seed": IntDistribution(base.seeds[0], base.seeds[-1]),
    }
    # A later command may widen numbers; Optuna rejects new choices of a categorical distribution.
    if (numbers := as_numbers(list(sessions))) is not None:
        distributions[_param(option)] = FloatDistribution(min(numbers), max(numbers))  # accepts the text of a number
    return Grid(
        study=study,
        points=[
            {"precision": precision, "seed": seed, "dataset": session.inspection.dataset_digest}
            | ({_param(option): value} if option is not None else {})
            for seed in base.seeds
            for value, session in sessions.items()
            for precision in base.precisions
        ],
        distributions=distributions,
        objective="samples/s",
        job_timeout_seconds=base.job.job_timeout_seconds,
    )


def _param(option: str | None) -> str:
    """Return the trial parameter of the option; the prefix avoids a conflict with precision, seed and dataset."""
    return f"option.{option}"


def _option(request: Request) -> str | None:
    assert request.compare_options is not None
    return request.compare_options.vary[0] if request.compare_options.vary is not None else None
