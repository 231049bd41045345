"""The table of all trials on the report page: probes, trainings, and trainings over seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from amp_track.report.summary import Result
from amp_track.report.table import Column
from amp_track.results.compare import CompareResult
from amp_track.results.max_batch import ProbeResult
from amp_track.results.search import SearchResult, TrialResult
from amp_track.results.seeds import SeedResult

_MEBIBYTE = 2**20
_FRONT = "on the Pareto front"
_SETTING = Column("setting", right=True)
_TRIALS = (
    Column("part", key=True),
    Column("trial", right=True),
    Column("precision"),
    Column("batch", right=True),
    _SETTING,
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


@dataclass(frozen=True)
class TrialRow:
    """The cells of a trial in the table of all trials, and the id of its MLflow run."""

    cells: tuple[str, ...]
    run_id: str


def table(result: Result) -> tuple[tuple[Column, ...], tuple[TrialRow, ...]]:
    """Return the columns that are not empty, and a row for each trial."""
    columns, rows = _columns(result), _rows(result)
    shown = [place for place in range(len(columns)) if any(row.cells[place] for row in rows)]
    return tuple(columns[place] for place in shown), tuple(
        TrialRow(tuple(row.cells[place] for place in shown), row.run_id) for row in rows
    )


def _rows(result: Result) -> list[TrialRow]:
    if isinstance(result, CompareResult):
        return [
            _row("compare", None, cell.precision, result.job.batch_size, each, setting=cell.value, why=_seed(each))
            for cell in result.cells
            for each in cell.trainings
        ]
    fitted = result.limits if isinstance(result, SearchResult) else result
    rows = [
        _row("max-batch", each.trial, each.precision, each.batch_size, each, why=f"{each.kind}: {each.reason}")
        for each in fitted.probes
    ]
    if not isinstance(result, SearchResult):
        return rows
    front, varies = frozenset(result.pareto), len({each.learning_rate for each in result.trials}) > 1
    rows += [
        _row(
            "train",
            each.number,
            each.precision,
            each.batch_size,
            each,
            setting=f"{each.learning_rate:.3g}" if varies else "",
            why=_FRONT if each.number in front else "",
        )
        for each in result.trials
    ]
    if result.seeds is not None:
        batch = result.seeds.job.batch_size
        rows += [_row("seeds", None, each.precision, batch, each, why=_seed(each)) for each in result.seeds.trainings]
    return rows


def _columns(result: Result) -> tuple[Column, ...]:
    """Return all columns; `setting` gets the name of the setting that varies besides precision and batch size."""
    setting = result.option if isinstance(result, CompareResult) else "learning rate"
    return tuple(Column(setting or "", right=True) if column is _SETTING else column for column in _TRIALS)


def _seed(training: SeedResult) -> str:
    return f"seed {training.seed}"


def _row(
    part: str,
    number: int | None,
    precision: str,
    batch_size: int | None,
    each: ProbeResult | TrialResult | SeedResult,
    *,
    setting: str = "",
    why: str,
) -> TrialRow:
    job_result = each.job_result
    return TrialRow(
        cells=(
            part,
            str(number) if number is not None else "",
            precision,
            str(batch_size),
            setting,
            job_result.ended,
            _number(job_result.metric, ".4f"),
            _number(job_result.samples_per_second, ".0f"),
            _number(job_result.wall_seconds, ".1f"),
            _mebibytes(job_result.peak_bytes),
            _mebibytes(each.predicted_bytes if isinstance(each, ProbeResult) else None),
            str(job_result.optimizer_steps) if job_result.fits else "",
            str(job_result.skipped_steps) if job_result.scale is not None else "",
            _number(job_result.scale.final if job_result.scale is not None else None, "g"),
            why,
        ),
        run_id=each.run_id,
    )


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None and math.isfinite(value) else ""


def _mebibytes(size_bytes: int | None) -> str:
    return _number(size_bytes / _MEBIBYTE if size_bytes is not None else None, ".1f")
