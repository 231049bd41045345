"""The content of a report page: the recommendation, sections with tables and charts, and all trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from amp_track.config.job import Job
from amp_track.records.units import MEBIBYTE
from amp_track.report import compare, figures, max_batch, plots, search
from amp_track.report import summary as answers
from amp_track.report.page import charts
from amp_track.report.page.charts import Chart, Training
from amp_track.report.summary import Answer, Result
from amp_track.report.table import Column, Row, Table
from amp_track.report.wording import title
from amp_track.results.compare import CompareResult, as_numbers
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow

_COMPARED, _SEEDS, _SCALES = "Comparison of precisions", "Several seeds", "GradScaler"
_POINTS = 12
"""The font size in charts; a phone scales it to nine."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the page."""

    heading: str
    lines: tuple[str, ...]
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    """The report page of a study."""

    result: Result
    subtitle: str
    answer: Answer
    sections: tuple[Section, ...]
    columns: tuple[Column, ...]
    trials: tuple[tuple[Row, str], ...]
    """The cells of each trial, and the id of its MLflow run."""


def page_of(result: Result) -> Page:
    """Return the report page of a study."""
    with figures.plain_text(points=_POINTS):
        match result:
            case CompareResult():
                sections, subtitle = _of_compare(result), compare.table(result).title
            case SearchResult():
                sections, subtitle = _of_search(result), title(result.limits)
            case _:
                sections, subtitle = _of_max_batch(result), title(result)
        columns, rows = _trials(result)
        return Page(
            result=result,
            subtitle=subtitle,
            answer=answers.answer(result),
            sections=tuple(section for section in sections if section.tables or section.charts or section.lines),
            columns=columns,
            trials=rows,
        )


def _section(heading: str, *parts: Table | Chart | None, lines: Iterable[str] = ()) -> Section:
    """Return a section of tables and charts; a chart without anything to draw is None."""
    return Section(
        heading=heading,
        lines=tuple(lines),
        tables=tuple(part for part in parts if isinstance(part, Table)),
        charts=tuple(part for part in parts if isinstance(part, Chart)),
    )


def _of_max_batch(result: MaxBatchResult) -> Iterator[Section]:
    yield from _of_limits(result)
    yield _section("Speed", charts.speed(result))


def _of_limits(result: MaxBatchResult) -> Iterator[Section]:
    proofs = (answers.proof(name, fitted) for name, fitted in result.precisions.items())
    yield _section("Max batch and proof", max_batch.max_batch_table(result), lines=proofs)
    yield _section("Memory", charts.memory(result), charts.predicted(result))


def _of_search(result: SearchResult) -> Iterator[Section]:
    name = result.metric_name
    drawn = [
        Training(trial=each, label=f"batch {each.batch_size}", setting=each.batch_size, is_best=_is_best(result, each))
        for each in result.trials
    ]
    note = f"{_same(result.limits.job)} Ringed: no other training is both better and faster (samples/s)."
    yield _section(_COMPARED, search.search_table(result))
    yield from _of_limits(result.limits)
    yield _section(
        "Speed and metric",
        charts.speed(result),
        charts.metric(drawn, name, setting="batch size", note=note),
        charts.metric_over_time(drawn, name, note=note),
    )
    if result.seeds is not None:
        yield _section(_SEEDS, charts.seeds(name, result.seeds), search.seeds_table(result.seeds, name))
    yield _section(_SCALES, charts.scales(drawn))


def _is_best(result: SearchResult, trial: TrialRow) -> bool:
    return trial.number in result.pareto


def _of_compare(result: CompareResult) -> Iterator[Section]:
    table, *over_seeds = compare.tables(result)
    name, drawn, note = result.metric_name, _compared(result), _same(result.job)
    yield _section(_COMPARED, table, *_measures(result))
    yield _section(
        "Metric",
        charts.metric(drawn, name, setting=result.option or "", note=note),
        charts.metric_over_time(drawn, name, note=note),
    )
    if over_seeds:
        of_seeds = (charts.seeds(name, result.seeds_at(value), where=result.at(value)) for value in result.values)
        yield _section(_SEEDS, *over_seeds, *of_seeds)
    yield _section(_SCALES, charts.scales(drawn, by=result.option or ""))


def _measures(result: CompareResult) -> Iterator[Chart]:
    """Yield a chart of speed and one of memory."""
    for measure in plots.measures(result):
        figure, axes = charts.new_axes("", "")
        plots.draw_measure(axes, result, measure)
        yield Chart(measure.label.partition(" in ")[0].capitalize(), figure, "; ".join(result.answers))


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


def _trials(result: Result) -> tuple[tuple[Column, ...], tuple[tuple[Row, str], ...]]:
    """Return the columns that are not empty, and for each trial its cells and the id of its MLflow run."""
    # The setting that varies besides precision and batch size.
    setting = (result.option or "") if isinstance(result, CompareResult) else "learning rate"
    columns = (
        Column("part", key=True),
        Column("trial", right=True),
        Column("precision"),
        Column("batch", right=True),
        Column(setting, right=True),
        Column("status"),
        Column("metric", right=True),
        Column("samples/s", right=True),
        Column("seconds", right=True),
        Column("MiB", right=True),
        Column("predicted MiB", right=True),
        Column("optimizer steps", right=True),
        Column("skipped steps", right=True),
        Column("final scale", right=True),
        Column("why"),
    )
    rows = list(_rows(result))
    shown = [place for place in range(len(columns)) if any(cells[place] for cells, _ in rows)]
    return tuple(columns[place] for place in shown), tuple(
        (tuple(cells[place] for place in shown), run_id) for cells, run_id in rows
    )


def _rows(result: Result) -> Iterator[tuple[Row, str]]:
    """Yield the probes, the trainings, and the trainings over seeds."""
    if isinstance(result, CompareResult):
        for cell in result.cells:
            for each in cell.trainings:
                yield _row("compare", each, setting=cell.value, why=f"seed {each.seed}")
        return
    for each in result.limits.probes:
        yield _row("max-batch", each, why=f"{each.kind}: {each.reason}")
    if isinstance(result, SearchResult):
        varies = len({each.learning_rate for each in result.trials}) > 1
        for each in result.trials:
            learning_rate = _number(each.learning_rate if varies else None, ".3g")
            why = "on the Pareto front" if _is_best(result, each) else ""
            yield _row("train", each, setting=learning_rate, why=why)
        for each in result.seeds.trainings if result.seeds is not None else ():
            yield _row("seeds", each, why=f"seed {each.seed}")


def _row(part: str, trial: TrialRow, *, setting: str = "", why: str) -> tuple[Row, str]:
    job_result, scale = trial.job_result, trial.job_result.scale
    cells = (
        part,
        _number(trial.number, "d"),
        trial.precision,
        str(trial.batch_size),
        setting,
        job_result.ended,
        _number(job_result.metric, ".4f"),
        _number(job_result.samples_per_second, ".0f"),
        _number(job_result.wall_seconds, ".1f"),
        _number(job_result.peak_bytes, ".1f", MEBIBYTE),
        _number(trial.predicted_bytes, ".1f", MEBIBYTE),
        str(job_result.optimizer_steps) if job_result.fits else "",
        str(job_result.skipped_steps) if scale is not None else "",
        _number(scale.final if scale is not None else None, "g"),
        why,
    )
    return cells, trial.run_id


def _number(value: float | None, form: str, unit: int | None = None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return format(value if unit is None else value / unit, form)
