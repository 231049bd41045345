"""The result of a comparison: its table, the sentences that answer, and its pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
from rich.console import Console
from rich.table import Table

from amp_track.records.outcome import Verdict
from amp_track.records.values import format_bytes
from amp_track.report import search as report
from amp_track.results import compare as comparison
from amp_track.results.compare import REFERENCE, Cell, ComparisonResult, Speed, judge, pays_from
from amp_track.workers import processes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from amp_track.tracking import Run, Tracker

TARGET = "target"
"""A picture of this name is the same at every precision: what the others should look like."""
Pictures = Mapping[tuple[str, str], Mapping[str, Path]]
"""By value and precision: PNG files by name."""
_CELL_INCHES = 3.0
_SHORT_SECONDS = 1.0
"""A training that took less says little about speed: a machine that does something else for a moment shows."""


def table(result: ComparisonResult) -> Table:
    """One row for each precision at each value. In brackets: times what fp32 takes."""
    job = result.job
    within = f", within {format_bytes(job.memory_budget_bytes)}" if job.memory_budget_bytes is not None else ""
    table = Table(title=f"{job.workload} on {result.device_name}{within}", title_justify="left")
    headings = [result.option] if result.option is not None else []
    headings += ["precision", "samples/s\n(× fp32)", "train\nseconds", "peak memory\nin training"]
    headings += ["evaluation\nsamples/s", "peak memory\nin evaluation"]
    headings += [result.quality_name] * result.has_quality + ["steps\nskipped"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "precision" else "right")
    for cell in result.cells:
        is_first = cell.precision == result.precisions[0]
        is_last = cell.precision == result.precisions[-1]
        value = [cell.value if is_first else ""] if result.option is not None else []
        table.add_row(*value, cell.precision, *_measures(result, cell), end_section=is_last)
    return table


def _measures(result: ComparisonResult, cell: Cell) -> list[str]:
    cells = [
        _with_ratio(result, cell, "samples_per_second", "{:,.0f}".format),
        f"{cell.train_seconds:.3g}" if cell.train_seconds is not None else "–",
        _with_ratio(result, cell, "train_memory_bytes", format_bytes),
        _with_ratio(result, cell, "eval_samples_per_second", "{:,.0f}".format),
        _with_ratio(result, cell, "eval_memory_bytes", format_bytes),
    ]
    if result.has_quality:
        cells.append(_quality(cell))
    cells.append(f"{cell.skipped_steps:,} of {cell.steps:,}" if cell.precision == "amp" and cell.steps else "–")
    if cell.failure is not None:
        cells[0] = _failure(cell) + ("" if cells[0] == "–" else f"\n{cells[0]}")
    return cells


def _with_ratio(result: ComparisonResult, cell: Cell, measure: str, show: Callable[[float], str]) -> str:
    number, ratio = getattr(cell, measure), result.ratio(cell, measure)
    if number is None:
        return "–"
    return show(number) if cell.precision == REFERENCE or ratio is None else f"{show(number)} ({ratio:.2f} ×)"


def _quality(cell: Cell) -> str:
    found = cell.quality
    if found is None:
        return "–"
    return f"{found.mean:.4f}" if found.half_width is None else f"{found.mean:.4f} ± {found.half_width:.4f}"


def _failure(cell: Cell) -> str:
    assert cell.failure is not None
    failed = sum(not training.outcome.fits for training in cell.trainings)
    of = f" ({failed} of {len(cell.trainings)})" if failed < len(cell.trainings) else ""
    where = f" in {cell.failure.phase}" if cell.failure.phase else ""
    return f"{cell.verdict}{where}{of}"


def tables(result: ComparisonResult) -> list[Table]:
    """All that a comparison has found."""
    if result.seeds == 1 or not result.has_quality:
        return [table(result)]
    equivalence = [
        report.seeds_table(result.seeds_at(value), result.quality_name, where=result.at(value))
        for value in result.values
    ]
    return [table(result), *equivalence]


def answers(result: ComparisonResult) -> list[str]:
    """For each precision, whether it is faster than fp32, and from where on."""
    others = [precision for precision in result.precisions if precision != REFERENCE]
    lines = [_answer(result, precision) for precision in others]
    return lines + [line for precision in others for line in _only_it_fits(result, precision)]


def _answer(result: ComparisonResult, precision: str) -> str:
    speedups = result.speedups(precision)
    known = [(result.at(value), speedup) for value, speedup in zip(result.values, speedups, strict=True) if speedup]
    if not known:
        return f"{precision} cannot be compared with {REFERENCE}: the two ran whole nowhere together"
    if len(result.values) == 1:
        return _answer_at_one(precision, *known[0])
    faster = [(where, speedup) for where, speedup in known if judge(speedup) is Speed.FASTER]
    at_last, of_last = known[-1]
    if comparison.as_numbers(result.values) is None:
        where = f"faster than {REFERENCE} at {_listed(faster)}" if faster else f"never faster than {REFERENCE}"
        rest = [(at, speedup) for at, speedup in known if (at, speedup) not in faster]
        return f"{precision} is {where}" + (f", not at {_listed(rest)}" if rest else "")
    start = pays_from(speedups)
    if start is not None:
        up_to = "" if speedups[-1] is not None else f", up to {at_last}, where both still run"
        first, of_first = result.at(result.values[start]), speedups[start]
        more = f"; {of_last:.2g} × at {at_last}" if first != at_last else ""
        return f"{precision} is faster than {REFERENCE} from {first} on ({of_first:.2g} ×{more}){up_to}"
    if faster:
        return f"{precision} is faster than {REFERENCE} at {_listed(faster)} only, up to {at_last} ({of_last:.2g} ×)"
    if all(judge(speedup) is Speed.SAME for _, speedup in known):
        return f"{precision}: no difference to {REFERENCE} (within 3 %), up to {at_last}"
    return f"{precision} is never faster than {REFERENCE}, up to {at_last} ({of_last:.2g} ×)"


def _answer_at_one(precision: str, where: str, speedup: float) -> str:
    at = f" at {where}" if where else ""
    if judge(speedup) is Speed.SAME:
        return f"{precision}: no difference to {REFERENCE}{at} ({speedup:.2f} ×, within 3 %)"
    return f"{precision} is {judge(speedup)} than {REFERENCE}{at} ({speedup:.2g} ×)"


def _listed(speedups: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{where} ({speedup:.2g} ×)" for where, speedup in speedups)


def _only_it_fits(result: ComparisonResult, precision: str) -> list[str]:
    values = [
        value
        for value in result.values
        if result.cell(value, precision).failure is None
        and all(found.outcome.verdict is Verdict.OOM for found in result.cell(value, REFERENCE).trainings)
    ]
    where = f" at {', '.join(map(result.at, values))}" if result.option is not None else ""
    return [f"{precision} runs{where} where {REFERENCE} runs out of memory"] if values else []


def notes(result: ComparisonResult) -> list[str]:
    """What must be said beside the table for it not to mislead."""
    job = result.job
    long = (
        f"{job.steps:,} steps" if job.steps is not None else f"{job.epochs} {'epoch' if job.epochs == 1 else 'epochs'}"
    )
    lines = [
        f"each training: {long} at batch {job.batch_size} and learning rate {job.learning_rate:g}; × fp32 in brackets"
    ]
    if job.synthetic:
        lines.append("made-up data (--synthetic): speed and memory are those of the real one, there is no quality.")
    elif result.seeds == 1:
        lines.append("One seed: small differences of quality are noise. --seeds 5 tests whether it is fp32's.")
    if job.memory_budget_bytes is not None and result.device_kind == "cpu":
        lines.append(report.CPU_BUDGET_IS_SLOW)
    if any(cell.train_seconds is not None and cell.train_seconds < _SHORT_SECONDS for cell in result.cells):
        lines.append(
            "Some trainings took less than a second: their samples/s are rough. Give more --steps or --epochs."
        )
    waiting = [cell for cell in result.cells if cell.waits_for_data]
    if waiting:
        where = ", ".join(f"{_name(result, cell)} {cell.waited_fraction:.0%}" for cell in waiting)
        lines.append(
            f"Trainings waited for data ({where} of their time): their samples/s are those of loading. Give more "
            "--loader-workers, or compare with --synthetic."
        )
    return lines + [f"{precision} left out: {reason}" for precision, reason in result.skipped.items()]


def _name(result: ComparisonResult, cell: Cell) -> str:
    return " ".join(part for part in (cell.precision, result.at(cell.value)) if part)


def log(result: ComparisonResult, parent: Run, tracker: Tracker) -> str:
    """Keep tables, answers and pictures with the comparison's MLflow run. Returns the path of the report."""
    console = Console(record=True, width=160, file=io.StringIO())
    for shown in tables(result):
        console.print(shown)
    for line in (*result.answers, *notes(result)):
        console.print("·", line)
    parent.text("report.txt", console.export_text())
    rows = [result.row(cell) for cell in result.cells]
    parent.table("compare.json", {name: [row[name] for row in rows] for name in rows[0]})
    with processes.scratch_folder() as folder:
        picture = folder / "compare.png"
        if draw(result, picture):
            parent.artifact(picture)
        side_by_side = folder / "side-by-side.png"
        if draw_side_by_side(result, _fetched(result, tracker, folder), side_by_side):
            parent.artifact(side_by_side)
    return parent.artifact_path("report.txt")


def _fetched(result: ComparisonResult, tracker: Tracker, folder: Path) -> Pictures:
    """Those of the first seed."""
    pictures = {}
    for cell in result.cells:
        first = cell.trainings[0]
        of_run = folder / first.run_id
        of_run.mkdir(exist_ok=True)
        pictures[cell.value, cell.precision] = tracker.fetch_pictures(first.run_id, of_run)
    return pictures


def draw(result: ComparisonResult, file: Path) -> bool:
    """Speed and memory: one line for each precision over the option's values where these are numbers, else bars.
    Returns whether there was anything to draw."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    numbers = comparison.as_numbers(result.values) if len(result.values) > 1 else None
    measures = (("samples_per_second", 1.0, "samples per second"), ("train_memory_bytes", 2**20, "peak memory, MiB"))
    known = [item for item in measures if any(getattr(cell, item[0]) is not None for cell in result.cells)]
    if not known:
        return False
    figure = Figure(figsize=(5.5 * len(known), 4.5), layout="constrained")
    panels = figure.subplots(1, len(known), squeeze=False)[0]
    for axes, (measure, unit, label) in zip(panels, known, strict=True):
        heights = {
            precision: [_scaled(getattr(result.cell(value, precision), measure), unit) for value in result.values]
            for precision in result.precisions
        }
        if numbers is None:
            _draw_bars(axes, result, heights)
        else:
            _draw_lines(axes, result, heights, numbers)
        axes.set_ylabel(f"{label} in training")
        axes.set_axisbelow(True)
        axes.grid(alpha=0.3, axis="both" if numbers is not None else "y")
    figure.savefig(file, dpi=110)
    return True


def _scaled(number: float | None, unit: float) -> float:
    return number / unit if number is not None else numpy.nan


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _draw_lines(
    axes: Axes, result: ComparisonResult, heights: Mapping[str, list[float]], numbers: Sequence[float]
) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for index, (precision, numbers_of) in enumerate(heights.items()):
        axes.plot(numbers, numbers_of, marker="o", markersize=5, color=f"C{index}", label=precision)
    if min(numbers) > 0:
        axes.set_xscale("log")
        axes.minorticks_off()
    if any(number > 0 for of in heights.values() for number in of):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xticks(numbers, labels=result.values)
    axes.set_xlabel(result.option or "")
    axes.legend()


def _draw_bars(axes: Axes, result: ComparisonResult, heights: Mapping[str, list[float]]) -> None:
    width = 0.8 / len(heights)
    places = numpy.arange(len(result.values))
    axes.yaxis.set_major_formatter("{x:,g}")
    for index, (precision, numbers_of) in enumerate(heights.items()):
        shift = (index - (len(heights) - 1) / 2) * width
        bars = axes.bar(places + shift, numbers_of, 0.9 * width, color=f"C{index}", label=precision)
        if result.option is None:
            axes.bar_label(bars, labels=[f"{precision}\n{_rounded(number)}" for number in numbers_of])
    if result.option is None:
        axes.set_xticks([])
        axes.margins(y=0.15)
        return
    axes.set_xticks(places, labels=result.values)
    axes.set_xlabel(result.option)
    axes.legend()


def draw_side_by_side(result: ComparisonResult, pictures: Pictures, file: Path) -> bool:
    """What the models do: for each value and picture a row, for each precision a column, the target first. Returns
    whether there was anything to draw."""
    rows = [row for value in result.values for row in _rows(result, pictures, value)]
    if not rows:
        return False
    from matplotlib.figure import Figure
    from PIL import Image

    columns = len(rows[0][1])
    figure = Figure(figsize=(_CELL_INCHES * columns, (_CELL_INCHES + 0.3) * len(rows)), layout="constrained")
    for (label, cells), row in zip(rows, figure.subplots(len(rows), columns, squeeze=False), strict=True):
        row[0].set_ylabel(label)
        for (title, picture), axes in zip(cells, row, strict=True):
            axes.set_title(title)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_frame_on(picture is not None)
            if picture is not None:
                with Image.open(picture) as image:
                    axes.imshow(numpy.asarray(image), cmap="gray", vmin=0, vmax=255)
    figure.savefig(file, dpi=150, bbox_inches="tight")  # two lines of title stick out of a low figure
    return True


def _rows(result: ComparisonResult, pictures: Pictures, value: str) -> list[tuple[str, list[tuple[str, Path | None]]]]:
    """For each picture at one value: its label, and title and file of each column. The target is shown once."""
    found = {precision: pictures.get((value, precision), {}) for precision in result.precisions}
    targets = [of_run[TARGET] for of_run in found.values() if TARGET in of_run]
    has_target = any(TARGET in of_run for of_run in pictures.values())
    rows: list[tuple[str, list[tuple[str, Path | None]]]] = []
    for name in sorted({name for of_run in found.values() for name in of_run} - {TARGET}):
        cells = [
            (_column_title(result, result.cell(value, precision)), found[precision].get(name)) for precision in found
        ]
        if has_target:
            cells.insert(0, (TARGET, targets[0]) if targets and not rows else ("", None))
        rows.append(("\n".join(part for part in (result.at(value), name) if part), cells))
    return rows


def _column_title(result: ComparisonResult, cell: Cell) -> str:
    outcome = cell.trainings[0].outcome
    if not outcome.fits:
        return f"{cell.precision}: {outcome.verdict}"
    return cell.precision + (f"\n{result.quality_name} {outcome.quality:.4f}" if outcome.quality is not None else "")
