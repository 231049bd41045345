"""What a study's page says: the answer, then sections with tables and charts, then every trial."""

from __future__ import annotations

import math
from dataclasses import dataclass

from amp_track.records.job import Job
from amp_track.records.outcome import Outcome
from amp_track.report import answer as answers
from amp_track.report import compare, compare_pictures, fit, search
from amp_track.report.answer import Answer, Result
from amp_track.report.page import edge_charts, svg, training_charts
from amp_track.report.page.drawing import Chart
from amp_track.report.page.training_charts import Training
from amp_track.report.seeds import seeds_table
from amp_track.report.table import Column, Table
from amp_track.report.text import title
from amp_track.results.compare import CompareResult, as_numbers
from amp_track.results.fit import FitResult
from amp_track.results.search import SearchResult

_MEBIBYTE = 2**20
_SCALES = "What the GradScaler did"
_FRONT = "Pareto: nothing is better and faster"
_TRIALS = (
    Column("part", key=True),
    Column("trial", right=True),
    Column("precision"),
    Column("batch", right=True),
    Column("verdict"),
    Column("quality", right=True),
    Column("samples/s", right=True),
    Column("seconds", right=True),
    Column("MiB", right=True),
    Column("predicted MiB", right=True),
    Column("skipped steps", right=True),
    Column("final scale", right=True),
    Column("why"),
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page under one heading."""

    heading: str
    lines: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A trial as the cells of the table of all trials, and the id of its MLflow run."""

    cells: tuple[str, ...]
    run_id: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """The page of a study."""

    study: str
    subtitle: str
    answer: Answer
    sections: tuple[Section, ...]
    columns: tuple[Column, ...]
    trials: tuple[TrialRow, ...]
    experiment_id: str
    result: Result


def page_of(result: Result) -> Page:
    """Return the page of a study."""
    with svg.plain_text():
        return _page_of(result)


def _page_of(result: Result) -> Page:
    if isinstance(result, CompareResult):
        found: FitResult | CompareResult = result
        sections, subtitle = _of_compare(result), compare.table(result).title
    else:
        found = result.fit if isinstance(result, SearchResult) else result
        sections, subtitle = _of_search(result) if isinstance(result, SearchResult) else _of_fit(result), title(found)
    return Page(
        study=found.study,
        subtitle=subtitle,
        answer=answers.answer(result),
        sections=tuple(section for section in sections if section.tables or section.charts or section.lines),
        columns=_TRIALS,
        trials=tuple(_trials(result)),
        experiment_id=found.experiment_id,
        result=result,
    )


def _of_fit(result: FitResult) -> list[Section]:
    return [*_of_edges(result), Section(heading="Speed", charts=_there(edge_charts.speed(result)))]


def _of_edges(result: FitResult) -> list[Section]:
    proofs = tuple(answers.proof(name, fitted) for name, fitted in result.precisions.items())
    return [
        Section(heading="The largest batch, and its proof", lines=proofs, tables=(fit.fit_table(result),)),
        Section(heading="Memory", charts=_there(edge_charts.memory(result), edge_charts.predicted(result))),
    ]


def _of_search(result: SearchResult) -> list[Section]:
    edges, memory = _of_edges(result.fit)
    compared = result.seeds
    name = result.quality_name
    over_seeds = (training_charts.seeds(name, compared), seeds_table(compared, name)) if compared else None
    trained, note = _trained(result), f"{_same(result.fit.job)} Ringed: no other is both better and faster (samples/s)."
    return [
        Section(heading="The precisions side by side", tables=(search.search_table(result),)),
        edges,
        memory,
        Section(
            heading="Speed and quality",
            charts=_there(
                edge_charts.speed(result),
                training_charts.quality(trained, name, setting="batch size", note=note),
                training_charts.quality_over_time(trained, name, note=note),
            ),
        ),
        Section(
            heading="The same training over several seeds",
            charts=_there(over_seeds[0]) if over_seeds else (),
            tables=(over_seeds[1],) if over_seeds else (),
        ),
        Section(heading=_SCALES, charts=_there(training_charts.scales(trained))),
    ]


def _of_compare(result: CompareResult) -> list[Section]:
    figure = compare_pictures.figure_of(result)
    drawn = Chart("Speed and memory", figure, "; ".join(result.answers)) if figure is not None else None
    table, *over_seeds = compare.tables(result)
    name, trained, note = result.quality_name, _compared(result), _same(result.job)
    return [
        Section(heading="The precisions side by side", tables=(table,), charts=_there(drawn)),
        Section(
            heading="Quality",
            charts=_there(
                training_charts.quality(trained, name, setting=result.option or "", note=note),
                training_charts.quality_over_time(trained, name, note=note),
            ),
        ),
        Section(
            heading="The same training over several seeds",
            tables=tuple(over_seeds),
            charts=_there(
                *(
                    training_charts.seeds(name, result.seeds_at(value), where=result.at(value))
                    for value in (result.values if over_seeds else ())
                )
            ),
        ),
        Section(heading=_SCALES, charts=_there(training_charts.scales(trained))),
    ]


def _trained(result: SearchResult) -> list[Training]:
    front = frozenset(result.pareto)
    return [
        Training(
            precision=trial.precision,
            label=f"batch {trial.batch_size}",
            setting=trial.batch_size,
            outcome=trial.outcome,
            is_best=trial.number in front,
        )
        for trial in result.trials
    ]


def _compared(result: CompareResult) -> list[Training]:
    numbers = as_numbers(result.values) if result.option is not None else None
    by_value = dict(zip(result.values, numbers, strict=True)) if numbers is not None else {}
    return [
        Training(
            precision=cell.precision,
            label=result.at(cell.value) or cell.precision,
            setting=by_value.get(cell.value),
            outcome=each.outcome,
            is_repeat=place > 0,
        )
        for cell in result.cells
        for place, each in enumerate(cell.trainings)
    ]


def _same(job: Job) -> str:
    return f"The same {'epochs' if job.steps is None else 'steps'} for all."


def _there(*drawn: Chart | None) -> tuple[Chart, ...]:
    return tuple(chart for chart in drawn if chart is not None)


def _trials(result: Result) -> list[TrialRow]:
    """Return every trial of a study: probes, trainings, and trainings over seeds."""
    if isinstance(result, CompareResult):
        return [
            _row(
                "compare",
                "",
                cell.precision,
                result.job.batch_size,
                each.outcome,
                each.run_id,
                why=_of_seed(cell.value, each.seed),
            )
            for cell in result.cells
            for each in cell.trainings
        ]
    fitted = result.fit if isinstance(result, SearchResult) else result
    rows = [
        _row(
            "fit",
            str(each.trial),
            each.precision,
            each.batch_size,
            each.outcome,
            each.run_id,
            why=f"{each.kind}: {each.reason}",
            predicted_bytes=each.predicted_bytes,
        )
        for each in fitted.probes
    ]
    if not isinstance(result, SearchResult):
        return rows
    front = frozenset(result.pareto)
    rows += [
        _row(
            "train",
            str(each.number),
            each.precision,
            each.batch_size,
            each.outcome,
            each.run_id,
            why=_FRONT if each.number in front else "",
        )
        for each in result.trials
    ]
    if result.seeds is not None:
        batch = result.seeds.job.batch_size
        rows += [
            _row("seeds", "", each.precision, batch, each.outcome, each.run_id, why=_of_seed("", each.seed))
            for each in result.seeds.trainings
        ]
    return rows


def _of_seed(value: str, seed: int) -> str:
    return f"{value} seed {seed}".strip()


def _row(
    part: str,
    number: str,
    precision: str,
    batch_size: int | None,
    outcome: Outcome,
    run_id: str,
    *,
    why: str,
    predicted_bytes: int | None = None,
) -> TrialRow:
    return TrialRow(
        cells=(
            part,
            number,
            precision,
            str(batch_size),
            outcome.ended,
            _number(outcome.quality, ".4f"),
            _number(outcome.samples_per_second, ".0f"),
            _number(outcome.wall_seconds, ".1f"),
            _mebibytes(outcome.max_memory_bytes),
            _mebibytes(predicted_bytes),
            str(outcome.skipped_steps) if outcome.scale is not None else "",
            _number(outcome.scale.final if outcome.scale is not None else None, "g"),
            why,
        ),
        run_id=run_id,
    )


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None and math.isfinite(value) else ""


def _mebibytes(size_bytes: int | None) -> str:
    return _number(size_bytes / _MEBIBYTE if size_bytes is not None else None, ".1f")
