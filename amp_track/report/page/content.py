"""The content of a report page: the recommendation, sections with tables and charts, and all trials."""

from __future__ import annotations

from dataclasses import dataclass

from amp_track.config.job import Job
from amp_track.report import compare, max_batch, plots, search
from amp_track.report import summary as answers
from amp_track.report.page import charts, svg, trials
from amp_track.report.page.charts import Chart, Training
from amp_track.report.search import seeds_table
from amp_track.report.summary import Answer, Result
from amp_track.report.table import Column, Row, Table
from amp_track.report.wording import title
from amp_track.results.compare import CompareResult, as_numbers
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.search import SearchResult

_SCALES = "GradScaler"
_POINTS = 12
"""The font size in charts; a phone scales it to nine."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the page."""

    heading: str
    lines: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """The report page of a study."""

    study: str
    subtitle: str
    answer: Answer
    sections: tuple[Section, ...]
    columns: tuple[Column, ...]
    trials: tuple[tuple[Row, str], ...]
    """The cells of each trial, and the id of its MLflow run."""
    experiment_id: str
    result: Result


def page_of(result: Result) -> Page:
    """Return the report page of a study."""
    with svg.plain_text(points=_POINTS):
        return _page_of(result)


def _page_of(result: Result) -> Page:
    if isinstance(result, CompareResult):
        found: MaxBatchResult | CompareResult = result
        sections, subtitle = _of_compare(result), compare.table(result).title
    else:
        found = result.limits if isinstance(result, SearchResult) else result
        sections, subtitle = (
            _of_search(result) if isinstance(result, SearchResult) else _of_max_batch(result),
            title(found),
        )
    columns, rows = trials.table(result)
    return Page(
        study=found.study,
        subtitle=subtitle,
        answer=answers.answer(result),
        sections=tuple(section for section in sections if section.tables or section.charts or section.lines),
        columns=columns,
        trials=rows,
        experiment_id=found.experiment_id,
        result=result,
    )


def _of_max_batch(result: MaxBatchResult) -> list[Section]:
    return [*_of_max_batches(result), Section(heading="Speed", charts=_there(charts.speed(result)))]


def _of_max_batches(result: MaxBatchResult) -> list[Section]:
    proofs = tuple(answers.proof(name, fitted) for name, fitted in result.precisions.items())
    return [
        Section(heading="Max batch and proof", lines=proofs, tables=(max_batch.max_batch_table(result),)),
        Section(heading="Memory", charts=_there(charts.memory(result), charts.predicted(result))),
    ]


def _of_search(result: SearchResult) -> list[Section]:
    max_batches, memory = _of_max_batches(result.limits)
    compared = result.seeds
    name = result.metric_name
    over_seeds = (charts.seeds(name, compared), seeds_table(compared, name)) if compared else None
    trained, note = (
        _trained(result),
        f"{_same(result.limits.job)} Ringed: no other training is both better and faster (samples/s).",
    )
    return [
        Section(heading="Comparison of precisions", tables=(search.search_table(result),)),
        max_batches,
        memory,
        Section(
            heading="Speed and metric",
            charts=_there(
                charts.speed(result),
                charts.metric(trained, name, setting="batch size", note=note),
                charts.metric_over_time(trained, name, note=note),
            ),
        ),
        Section(
            heading="Several seeds",
            charts=_there(over_seeds[0]) if over_seeds else (),
            tables=(over_seeds[1],) if over_seeds else (),
        ),
        Section(heading=_SCALES, charts=_there(charts.scales(trained))),
    ]


def _of_compare(result: CompareResult) -> list[Section]:
    table, *over_seeds = compare.tables(result)
    name, trained, note = result.metric_name, _compared(result), _same(result.job)
    return [
        Section(heading="Comparison of precisions", tables=(table,), charts=_measures(result)),
        Section(
            heading="Metric",
            charts=_there(
                charts.metric(trained, name, setting=result.option or "", note=note),
                charts.metric_over_time(trained, name, note=note),
            ),
        ),
        Section(
            heading="Several seeds",
            tables=tuple(over_seeds),
            charts=_there(
                *(
                    charts.seeds(name, result.seeds_at(value), where=result.at(value))
                    for value in (result.values if over_seeds else ())
                )
            ),
        ),
        Section(heading=_SCALES, charts=_there(charts.scales(trained, by=result.option or ""))),
    ]


def _measures(result: CompareResult) -> tuple[Chart, ...]:
    """Return a chart of speed and one of memory."""
    found = []
    for measure in plots.measures(result):
        figure, axes = charts.new_figure("", "")
        plots.draw_measure(axes, result, measure)
        found.append(Chart(measure.label.partition(" in ")[0].capitalize(), figure, "; ".join(result.answers)))
    return tuple(found)


def _trained(result: SearchResult) -> list[Training]:
    front = frozenset(result.pareto)
    return [
        Training(
            trial=trial,
            label=f"batch {trial.batch_size}",
            setting=trial.batch_size,
            is_best=trial.number in front,
        )
        for trial in result.trials
    ]


def _compared(result: CompareResult) -> list[Training]:
    numbers = as_numbers(result.values) if result.option is not None else None
    by_value = dict(zip(result.values, numbers, strict=True)) if numbers is not None else {}
    return [
        Training(
            trial=each,
            label=cell.value or cell.precision,
            setting=by_value.get(cell.value),
            is_repeat=each is not next((one for one in cell.trainings if one.job_result.fits), None),
        )
        for cell in result.cells
        for each in cell.trainings
    ]


def _same(job: Job) -> str:
    return f"Same {'epochs' if job.steps is None else 'steps'} for all."


def _there(*drawn: Chart | None) -> tuple[Chart, ...]:
    return tuple(chart for chart in drawn if chart is not None)
