"""The content of a report page: the recommendation, sections with tables and charts, and all trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from amp_track.config.job import Job
from amp_track.records.units import MEBIBYTE
from amp_track.report import compare, figures, max_batch, plots, search
from amp_track.report import summary as answers
from amp_track.report.page import charts
from amp_track.report.page.charts import Chart, Training
from amp_track.report.summary import Answer, Result
from amp_track.report.table import Row, Table
from amp_track.report.wording import title
from amp_track.results.compare import CompareResult, as_numbers
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow

_COMPARED, _SEEDS, _SCALES = "Comparison of precisions", "Several seeds", "GradScaler"
_RATE = "learning rate"
_NO_RATE = {_RATE: ""}
_POINTS = 12
"""The font size in charts; a phone scales it to nine."""


@dataclass(frozen=True, kw_only=True)
class Section:
    heading: str
    lines: tuple[str, ...]
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    result: Result
    subtitle: str
    answer: Answer
    sections: tuple[Section, ...]
    headings: tuple[str, ...]
    """Of the table of trials."""
    trials: tuple[tuple[Row, str], ...]
    """The cells of each trial, and the id of its MLflow run."""


def page_of(result: Result) -> Page:
    with figures.plain_text(points=_POINTS):
        match result:
            case CompareResult():
                sections, subtitle = _of_compare(result), compare.table(result).title
            case SearchResult():
                sections, subtitle = _of_search(result), title(result.limits)
            case _:
                sections, subtitle = _of_max_batch(result), title(result)
        headings, rows = _trials(result)
        return Page(
            result=result,
            subtitle=subtitle,
            answer=answers.answer(result),
            sections=tuple(section for section in sections if section.tables or section.charts or section.lines),
            headings=headings,
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
    name, front = result.metric_name, frozenset(result.pareto)
    drawn = [
        Training(trial=each, label=f"batch {each.batch_size}", setting=each.batch_size, is_best=each.number in front)
        for each in result.trials
    ]
    note = f"{_same(result.limits.job)} Ringed: no other training is both better and faster (samples/s)."
    yield _section(_COMPARED, search.search_table(result))
    yield from _of_limits(result.limits)
    yield _section(
        "Speed and metric",
        charts.speed(result),
        *charts.metrics(drawn, name, setting="batch size", note=note),
    )
    if result.seeds is not None:
        yield _section(_SEEDS, charts.seeds(name, result.seeds), search.seeds_table(result.seeds, name))
    yield _section(_SCALES, charts.scales(drawn))


def _of_compare(result: CompareResult) -> Iterator[Section]:
    table, *over_seeds = compare.tables(result)
    name, drawn, note = result.metric_name, _compared(result), _same(result.job)
    yield _section(_COMPARED, table, *_measures(result))
    yield _section("Metric", *charts.metrics(drawn, name, setting=result.option or "", note=note))
    if over_seeds:
        of_seeds = (charts.seeds(name, result.seeds_at(value), where=result.at(value)) for value in result.values)
        yield _section(_SEEDS, *over_seeds, *of_seeds)
    yield _section(_SCALES, charts.scales(drawn, by=result.option or ""))


def _measures(result: CompareResult) -> Iterator[Chart]:
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


def _trials(result: Result) -> tuple[tuple[str, ...], tuple[tuple[Row, str], ...]]:
    """Return the headings of the columns that are not empty, and for each trial its cells and its MLflow run."""
    rows = list(_rows(result))
    headings = [heading for heading in rows[0][0] if any(cells[heading] for cells, _ in rows)] if rows else []
    return tuple(headings), tuple((tuple(cells[name] for name in headings), run_id) for cells, run_id in rows)


def _rows(result: Result) -> Iterator[tuple[dict[str, str], str]]:
    """Yield the probes, the trainings, and the trainings over seeds: text by heading, and the run."""
    if isinstance(result, CompareResult):
        for cell in result.cells:
            for each in cell.trainings:
                yield _row("compare", each, f"seed {each.seed}", setting={result.option or "": cell.value})
        return
    for each in result.limits.probes:
        yield _row("max-batch", each, f"{each.kind}: {each.reason}")
    if isinstance(result, SearchResult):
        front = frozenset(result.pareto)
        varies = len({each.learning_rate for each in result.trials}) > 1
        for each in result.trials:
            setting = {_RATE: _number(each.learning_rate if varies else None, ".3g")}
            yield _row("train", each, "on the Pareto front" if each.number in front else "", setting=setting)
        for each in result.seeds.trainings if result.seeds is not None else ():
            yield _row("seeds", each, f"seed {each.seed}")


def _row(part: str, trial: TrialRow, why: str, *, setting: Mapping[str, str] = _NO_RATE) -> tuple[dict[str, str], str]:
    """Return one trial; `setting` is what varies besides precision and batch size."""
    job_result, scale = trial.job_result, trial.job_result.scale
    cells = {
        "part": part,
        "trial": _number(trial.number, "d"),
        "precision": trial.precision,
        "batch": str(trial.batch_size),
        **setting,
        "status": job_result.ended,
        "metric": _number(job_result.metric, ".4f"),
        "samples/s": _number(job_result.samples_per_second, ".0f"),
        "seconds": _number(job_result.wall_seconds, ".1f"),
        "MiB": _mebibytes(job_result.peak_bytes),
        "predicted MiB": _mebibytes(trial.predicted_bytes),
        "optimizer steps": str(job_result.optimizer_steps) if job_result.fits else "",
        "skipped steps": str(job_result.skipped_steps) if scale is not None else "",
        "final scale": _number(scale.final if scale is not None else None, "g"),
        "why": why,
    }
    return cells, trial.run_id


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None and math.isfinite(value) else ""


def _mebibytes(size_bytes: int | None) -> str:
    return f"{size_bytes / MEBIBYTE:.1f}" if size_bytes is not None else ""
