"""The result of a comparison as tables, answers and notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amp_track.config.precisions import REFERENCE
from amp_track.records.result import JobStatus
from amp_track.records.units import format_bytes
from amp_track.report.search import seeds_table
from amp_track.report.table import Column, Row, Table, numbers
from amp_track.report.wording import (
    CPU_BUDGET_IS_SLOW,
    NOTHING_LEARNED,
    ONE_SEED,
    RUN_AGAIN,
    UNKNOWN,
    counted,
    duration,
    has_cpu_budget,
    interval_text,
    memory_text,
    not_possible,
    of_precisions,
    short_trainings,
    speed_text,
    tied,
)
from amp_track.results import compare as comparison
from amp_track.results.compare import Cell, CompareResult, Speed, pays_from


def tables(result: CompareResult) -> list[Table]:
    if result.seeds == 1 or not result.has_metric:
        return [table(result)]
    over_seeds = (
        seeds_table(result.seeds_at(value), result.metric_name, where=result.at(value)) for value in result.values
    )
    return [table(result), *over_seeds]


def table(result: CompareResult) -> Table:
    """Return a table with one row per precision and value. Ratios to fp32 are in parentheses."""
    job = result.job
    within = f", within {format_bytes(job.memory_budget_bytes)}" if job.memory_budget_bytes is not None else ""
    columns = [Column(result.option, right=True, key=True, spans=True)] if result.option is not None else []
    headings = ["samples/s\n(× fp32)", "train\nseconds", "peak memory\nin training"]
    headings += ["eval\nsamples/s", "peak memory\nin eval"]
    headings += [result.metric_name] * result.has_metric + ["steps\nskipped"]
    return Table(
        title=f"{job.workload} on {result.hardware.title}{within}",
        columns=(*columns, Column("precision", key=True), *numbers(*headings)),
        sections=tuple(_section(result, value) for value in result.values),
    )


def _section(result: CompareResult, value: str) -> tuple[Row, ...]:
    rows = [(precision, *_measures(result, result.cell(value, precision))) for precision in result.precisions]
    if result.option is None:
        return tuple(rows)
    return tuple((value if index == 0 else "", *row) for index, row in enumerate(rows))


def _measures(result: CompareResult, cell: Cell) -> list[str]:
    cells = [
        _with_ratio(result, cell, "samples_per_second", speed_text),
        f"{cell.train_seconds:.3g}" if cell.train_seconds is not None else UNKNOWN,
        _with_ratio(result, cell, "train_memory_bytes", memory_text),
        _with_ratio(result, cell, "eval_samples_per_second", speed_text),
        _with_ratio(result, cell, "eval_memory_bytes", memory_text),
    ]
    if result.has_metric:
        cells.append(interval_text(cell.metric) if cell.metric is not None else UNKNOWN)
    cells.append(f"{cell.skipped_steps:,} of {cell.steps:,}" if cell.has_scaler else UNKNOWN)
    if cell.failure is not None:
        failed = sum(not training.job_result.fits for training in cell.trainings)
        of = " " + tied(f"({failed} of {len(cell.trainings)})") if failed < len(cell.trainings) else ""
        cells[0] = cell.failure.ended + of + ("" if cells[0] == UNKNOWN else f"\n{cells[0]}")
    return cells


def _with_ratio(result: CompareResult, cell: Cell, measure: str, show: Callable[[float | None], str]) -> str:
    ratio = result.ratio(cell, measure) if cell.precision != REFERENCE else None
    return show(getattr(cell, measure)) + ("" if ratio is None else f" {tied(f'({ratio:.2f} ×)')}")


def answers(result: CompareResult) -> list[str]:
    """Return for each precision whether it is faster than fp32, and from which value on."""
    others = [precision for precision in result.precisions if precision != REFERENCE]
    lines = [_answer(result, precision) for precision in others]
    return lines + [line for precision in others for line in _only_it_fits(result, precision)]


def _answer(result: CompareResult, precision: str) -> str:
    speedups, verdicts = result.speedups(precision), result.verdicts(precision)
    all_values = zip(map(result.at, result.values), speedups, verdicts, strict=True)
    known = [(where, speedup, verdict) for where, speedup, verdict in all_values if speedup and verdict]
    if not known:
        return f"{precision} cannot be compared with {REFERENCE}: they completed no training in common"
    at_last, of_last, last = known[-1]
    if len(result.values) == 1:
        at = f" at {at_last}" if at_last else ""
        if last is Speed.SAME:
            return f"{precision} is as fast as {REFERENCE}{at} ({of_last:.2f} ×, within 3 %)"
        if last is Speed.UNCLEAR:
            return f"{precision} is {last} than {REFERENCE}{at} ({of_last:.2f} ×): the readings of the seeds overlap"
        return f"{precision} is {last} than {REFERENCE}{at} ({of_last:.2g} ×)"
    faster = [(where, speedup) for where, speedup, verdict in known if verdict is Speed.FASTER]
    never = "never clearly faster" if any(verdict is Speed.UNCLEAR for _, _, verdict in known) else "never faster"
    if comparison.as_numbers(result.values) is None:
        where = f"faster than {REFERENCE} at {_listed(faster)}" if faster else f"{never} than {REFERENCE}"
        rest = [(where, speedup) for where, speedup, _ in known if (where, speedup) not in faster]
        return f"{precision} is {where}" + (f", not at {_listed(rest)}" if rest else "")
    start = pays_from(verdicts)
    if start is not None:
        up_to = "" if speedups[-1] is not None else f", up to {at_last}, the last value at which both fit"
        first, of_first = result.at(result.values[start]), speedups[start]
        more = f"; {of_last:.2g} × at {at_last}" if first != at_last else ""
        return f"{precision} is faster than {REFERENCE} from {first} on ({of_first:.2g} ×{more}){up_to}"
    if faster:
        return f"{precision} is faster than {REFERENCE} at {_listed(faster)} only, up to {at_last} ({of_last:.2g} ×)"
    if all(verdict is Speed.SAME for _, _, verdict in known):
        return f"{precision} is as fast as {REFERENCE} (within 3 %), up to {at_last}"
    if all(verdict in (Speed.SAME, Speed.UNCLEAR) for _, _, verdict in known):
        return f"{precision} is {Speed.UNCLEAR} than {REFERENCE}, up to {at_last}: the readings of the seeds overlap"
    return f"{precision} is {never} than {REFERENCE}, up to {at_last} ({of_last:.2g} ×)"


def _listed(speedups: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{where} ({speedup:.2g} ×)" for where, speedup in speedups)


def _only_it_fits(result: CompareResult, precision: str) -> list[str]:
    values = [
        value
        for value in result.values
        if result.cell(value, precision).failure is None
        and all(training.job_result.status is JobStatus.OOM for training in result.cell(value, REFERENCE).trainings)
    ]
    where = f" at {', '.join(map(result.at, values))}" if result.option is not None else ""
    return [f"{precision} fits{where}, but {REFERENCE} runs out of memory"] if values else []


def notes(result: CompareResult) -> list[str]:
    job = result.job
    lines = [
        f"Each training: {duration(job)} at batch {job.batch_size} and learning rate {job.learning_rate:g}. Numbers in "
        "parentheses are relative to fp32."
    ]
    if job.synthetic:
        lines.append("Synthetic data (--synthetic): speed and memory are those of real data, but there is no metric.")
    elif result.seeds == 1:
        lines.append(ONE_SEED)
    if result.seeds > 1 and not all(result.seeds_at(value).has_learned for value in result.values):
        lines.append(NOTHING_LEARNED)
    if has_cpu_budget(result):
        lines.append(CPU_BUDGET_IS_SLOW)
    lines += short_trainings(cell.train_seconds for cell in result.cells)
    waiting = [f"{_name(result, cell)} {cell.waited_fraction:.0%}" for cell in result.cells if cell.waits_for_data]
    if waiting:
        lines.append(
            f"Trainings waited for data ({', '.join(waiting)} of their time), so their samples/s measure data loading. "
            "Use more --num-workers, or compare with --synthetic."
        )
    lines += [
        not_possible(_name(result, cell), cell.failure.message)
        for cell in result.cells
        if cell.failure is not None and cell.failure.status is JobStatus.UNSUPPORTED
    ]
    if result.missing:
        lines.append(f"{counted(result.missing, 'training')} still missing. {RUN_AGAIN}")
    return lines + of_precisions(result.cautions, result.skipped)


def _name(result: CompareResult, cell: Cell) -> str:
    return " ".join(part for part in (cell.precision, result.at(cell.value)) if part)
