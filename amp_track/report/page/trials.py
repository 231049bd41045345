"""The table of all trials on the report page: probes, trainings, and trainings over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator

from amp_track.records.units import MEBIBYTE
from amp_track.report.summary import Result
from amp_track.report.table import Column, Row
from amp_track.results.compare import CompareResult
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow

_FRONT = "on the Pareto front"


def table(result: Result) -> tuple[tuple[Column, ...], tuple[tuple[Row, str], ...]]:
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
    if isinstance(result, CompareResult):
        for cell in result.cells:
            for each in cell.trainings:
                yield _row("compare", each, setting=cell.value, why=f"seed {each.seed}")
        return
    for each in (result.limits if isinstance(result, SearchResult) else result).probes:
        yield _row("max-batch", each, why=f"{each.kind}: {each.reason}")
    if not isinstance(result, SearchResult):
        return
    front, varies = frozenset(result.pareto), len({each.learning_rate for each in result.trials}) > 1
    for each in result.trials:
        learning_rate = _number(each.learning_rate if varies else None, ".3g")
        yield _row("train", each, setting=learning_rate, why=_FRONT if each.number in front else "")
    for each in result.seeds.trainings if result.seeds is not None else ():
        yield _row("seeds", each, why=f"seed {each.seed}")


def _row(part: str, trial: TrialRow, *, setting: str = "", why: str) -> tuple[Row, str]:
    job_result = trial.job_result
    cells = (
        part,
        str(trial.number) if trial.number is not None else "",
        trial.precision,
        str(trial.batch_size),
        setting,
        job_result.ended,
        _number(job_result.metric, ".4f"),
        _number(job_result.samples_per_second, ".0f"),
        _number(job_result.wall_seconds, ".1f"),
        _mebibytes(job_result.peak_bytes),
        _mebibytes(trial.predicted_bytes),
        str(job_result.optimizer_steps) if job_result.fits else "",
        str(job_result.skipped_steps) if job_result.scale is not None else "",
        _number(job_result.scale.final if job_result.scale is not None else None, "g"),
        why,
    )
    return cells, trial.run_id


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None and math.isfinite(value) else ""


def _mebibytes(size_bytes: int | None) -> str:
    return _number(size_bytes / MEBIBYTE if size_bytes is not None else None, ".1f")
