"""The content of a report page: the recommendation, sections with tables and charts, and all trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from amp_track.config.job import Job
from amp_track.records.result import JobStatus
from amp_track.records.units import MEBIBYTE
from amp_track.report import compare, figures, max_batch, plots, search
from amp_track.report import summary as answers
from amp_track.report.page import charts
from amp_track.report.page.charts import Chart, Training
from amp_track.report.summary import Answer, Result
from amp_track.report.table import Row, Table
from amp_track.report.wording import metric_text, speed_text, title
from amp_track.results.compare import CompareResult, as_numbers
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow

_COMPARED, _SEEDS, _SCALES = "Comparison of precisions", "Several seeds", "GradScaler"
_RATE = "learning rate"
_NO_RATE = {_RATE: ""}
_BEST, _PROOF, _FAILED, _OTHER = range(4)
"""The order of trials: the best trainings, the proofs of the max batches, failures, and the others."""
_TrialCells = tuple[int, dict[str, str], str]
"""One of these ranks, the text of a trial by heading, and its MLflow run."""
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
        if result.option is not None:
            charts.legend(axes)
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
    rows = [(cells, run_id) for _, cells, run_id in sorted(_rows(result), key=lambda row: row[0])]
    headings = [heading for heading in rows[0][0] if any(cells[heading] for cells, _ in rows)] if rows else []
    return tuple(headings), tuple((tuple(cells[name] for name in headings), run_id) for cells, run_id in rows)


def _rows(result: Result) -> Iterator[_TrialCells]:
    """Yield the probes, the trainings, and the trainings over seeds."""
    if isinstance(result, CompareResult):
        for cell in result.cells:
            for each in cell.trainings:
                setting = {result.option or "": cell.value}
                yield _row(each, f"seed {each.seed}", setting=setting, least_bytes=cell.least_bytes)
        return
    for each in result.limits.probes:
        yield _probe_row(result.limits, each)
    if isinstance(result, SearchResult):
        front = frozenset(result.pareto)
        varies = len({each.learning_rate for each in result.trials}) > 1
        rated = [each for each in result.trials if each.finite_metric is not None]
        rated.sort(key=lambda trial: trial.finite_metric or 0.0, reverse=result.higher_is_better)
        for each in (*rated, *(trial for trial in result.trials if trial.finite_metric is None)):
            setting = {_RATE: _number(each.learning_rate if varies else None, ".3g")}
            is_best = each.number in front
            why = "training on the Pareto front" if is_best else "training"
            yield _row(each, why, rank=_BEST if is_best else _OTHER, setting=setting)
        for each in result.seeds.trainings if result.seeds is not None else ():
            yield _row(each, f"seed {each.seed}")


def _probe_row(limits: MaxBatchResult, probe: TrialRow) -> _TrialCells:
    """Return a probe; those that prove a max batch are among the first rows."""
    if probe.precision in limits.precisions and probe.kind not in ("typical", "eval"):
        max_batch = limits.precisions[probe.precision].max_batch
        if probe.job_result.fits and probe.batch_size == max_batch.batch_size:
            return _row(probe, f"max batch: {probe.reason}", rank=_PROOF)
        if not probe.job_result.fits and probe.batch_size == max_batch.first_failing_batch:
            return _row(probe, f"first failing batch: {probe.reason}", rank=_PROOF)
    return _row(probe, f"{probe.kind}: {probe.reason}")


def _row(
    trial: TrialRow, why: str, *, rank: int = _OTHER, setting: Mapping[str, str] = _NO_RATE, least_bytes: int = 0
) -> _TrialCells:
    """Return one trial; `setting` is what varies besides precision and batch size."""
    job_result, scale, speed = trial.job_result, trial.job_result.scale, trial.job_result.samples_per_second
    if not job_result.fits and job_result.status is not JobStatus.OOM:
        why += f": {job_result.message}" if job_result.message else ""
        rank = min(rank, _FAILED)
    elif not job_result.fits and trial.kind == "train":  # a probe that runs out of memory is a step of the search
        rank = _FAILED
    cells = {
        "trial": _number(trial.number, "d"),
        "precision": trial.precision,
        "batch": str(trial.batch_size),
        **setting,
        "status": job_result.ended,
        "metric": metric_text(trial.finite_metric) if trial.finite_metric is not None else "",
        "samples/s": speed_text(speed).replace(",", "") if speed is not None else "",
        "MiB": _mebibytes(job_result.peak_bytes) if (job_result.peak_bytes or 0) >= least_bytes else "",
        "predicted MiB": _mebibytes(trial.predicted_bytes),
        "seconds": _number(job_result.wall_seconds, ".1f"),
        "optimizer steps": str(job_result.optimizer_steps) if job_result.fits else "",
        "skipped steps": str(job_result.skipped_steps) if scale is not None else "",
        "final scale": _number(scale.final if scale is not None else None, "g"),
        "why": why,
    }
    return rank, cells, trial.run_id


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None and math.isfinite(value) else ""


def _mebibytes(size_bytes: int | None) -> str:
    return f"{size_bytes / MEBIBYTE:.1f}" if size_bytes is not None else ""
