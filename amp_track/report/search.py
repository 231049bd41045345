"""The result of a search as a table for the terminal, and as text and picture for MLflow."""

from __future__ import annotations

import io
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from amp_track.records.outcome import Diagnosis, Outcome
from amp_track.records.values import format_bytes
from amp_track.results.equivalence import Comparison
from amp_track.results.fit import FitResult, PrecisionFit, SearchResult, SeedsResult, TrialResult

if TYPE_CHECKING:
    from amp_track.tracking import Run

_FEW_UPDATES = 4
"""A training that made this many times fewer updates than the best one at its precision says little about its batch."""
CPU_BUDGET_IS_SLOW = (
    "samples/s are under an enforced CPU budget, where freed memory goes back to the system at once: without a budget "
    "the same training is faster."
)
_BOUNDS = {
    "memory": "one more runs out of memory",
    "dataset": "the whole training set",
    "max_batch_size": "as far as --max-batch-size lets it look",
    "kernel": "a kernel of the device takes no more",
}


def fit_table(result: FitResult) -> Table:
    """One row for each precision: the largest batch, what it costs, and from which batch on more buys no speed."""
    table = Table(title=_title(result), title_justify="left")
    headings = ["precision", "largest\nbatch", "why no more", "peak memory\nthere", "samples/s\nthere"]
    headings += ["as fast\nfrom batch", "probes", "confirmed\nby"]
    if result.multiple_of > 1:
        headings.insert(2, f"largest multiple\nof {result.multiple_of}")
    if result.effective_batch_size is not None:
        headings.append(f"for {result.effective_batch_size}\na step")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("precision", "why no more") else "right")
    for name, fitted in result.precisions.items():
        largest, why, memory, speed = _edge_cells(fitted)
        efficient = fitted.efficient_batch
        cells = [name, largest, why, memory, speed]
        cells += [
            f"{efficient[0]}\n{_speed(efficient[1])}/s" if efficient else "–",
            str(fitted.probes),
            f"{fitted.confirmation.steps} steps" if fitted.confirmation else "–",
        ]
        if result.multiple_of > 1:
            cells.insert(2, str(fitted.largest_multiple or "–"))
        if result.effective_batch_size is not None:
            parts = result.accumulation(name)
            cells.append(f"{parts[0]} × {parts[1]}" if parts else "nothing divides it")
        table.add_row(*cells)
    for name, reason in result.skipped.items():
        table.add_row(name, "–", *["–"] * (result.multiple_of > 1), reason)
    return table


def fit_notes(result: FitResult) -> list[str]:
    """What must be said beside the table for it not to mislead."""
    lines = []
    if any(fitted.efficient_batch for fitted in result.precisions.values()):
        lines.append(
            "as fast from: the smallest of the batches that ran within 3 % of the best samples/s. A larger one buys no "
            "speed."
        )
    if result.headroom_bytes:
        lines.append(f"{format_bytes(result.headroom_bytes)} of the budget are left free at these edges (--headroom).")
    if result.job.memory_budget_bytes is not None and result.device_kind == "cpu":
        lines.append(CPU_BUDGET_IS_SLOW)
    return lines


def search_table(result: SearchResult) -> Table:
    """One row for each precision: the edge, the fastest batch, the best quality and where, the scaler in numbers."""
    table = Table(title=_title(result.fit), title_justify="left")
    quality = result.quality_name
    headings = ("", "largest\nbatch", "peak memory\nthere", "samples/s\nthere", f"{quality}\nthere")
    for heading in (*headings, "fastest\nbatch", f"best\n{quality}", "GradScaler\nat the best"):
        table.add_column(heading, justify="left" if not heading or "Scaler" in heading else "right")
    for name, fitted in result.fit.precisions.items():
        trials = [trial for trial in result.trials if trial.precision == name and trial.outcome.fits]
        best = _best(trials, higher_is_better=result.higher_is_better)
        fastest = max(trials, key=lambda trial: trial.outcome.samples_per_second or 0, default=None)
        at_edge = next((trial for trial in trials if trial.batch_size == fitted.edge.largest_batch), None)
        largest, _, memory, speed = _edge_cells(fitted)
        if at_edge is not None:
            memory, speed = _memory(at_edge.outcome.max_memory_bytes), _speed(at_edge.outcome.samples_per_second)
        table.add_row(
            name,
            largest,
            memory,
            speed,
            _quality(at_edge, best),
            f"{fastest.batch_size}\n{_speed(fastest.outcome.samples_per_second)}/s" if fastest else "–",
            f"{_quality(best, best)}\nat batch {best.batch_size}" if best else "–",
            _scale(best.outcome) if best else "–",
        )
    for name, reason in result.fit.skipped.items():
        table.add_row(name, "–", *["–"] * 5, reason)
    return table


def search_tables(result: SearchResult) -> list[Table]:
    """All that a search has found."""
    seeds = [seeds_table(result.seeds, result.quality_name)] if result.seeds is not None else []
    return [search_table(result), *seeds]


def notes(result: SearchResult) -> list[str]:
    """What must be said beside the table for it not to mislead."""
    lines = []
    if result.fit.job.memory_budget_bytes is not None and result.fit.device_kind == "cpu":
        lines.append(CPU_BUDGET_IS_SLOW)
    for name in result.fit.precisions:
        trials = [trial for trial in result.trials if trial.precision == name and trial.outcome.fits]
        best = _best(trials, higher_is_better=result.higher_is_better)
        poor = [trial for trial in trials if best and _made_few_updates(trial, best)]
        if best and poor:
            listed = ", ".join(f"{trial.batch_size} ({trial.outcome.updates})" for trial in poor)
            lines.append(
                f"{name}: few updates at batch {listed}, against {best.outcome.updates} at batch {best.batch_size}: "
                "the same epochs leave such a model untrained. Compare with more --epochs, the same --steps, or "
                "--lr-scaling."
            )
    if result.seeds is not None:
        lines.append(_seeds_note(result, result.seeds))
    else:
        lines.append(
            "One seed for each training: differences of quality within a few samples are noise. --seeds 5 compares the "
            "precisions over several."
        )
    return lines


def seeds_table(seeds: SeedsResult, quality_name: str, *, where: str = "") -> Table:
    """One row for each precision: the mean over seeds, and whether it is fp32's. `where` says what else they share."""
    at = f"batch {seeds.job.batch_size}" + (f", {where}" if where else "")
    title = f"{quality_name} over {seeds.seeds} seeds at {at}, against fp32 ± {seeds.margin}"
    table = Table(title=title, title_justify="left")
    for heading in ("", "mean ± 95 %", "difference\n(90 % interval)", "verdict", "updates\nmade"):
        table.add_column(heading, justify="left" if heading in ("", "verdict") else "right")
    for name in seeds.precisions:
        found, against = seeds.interval(name), seeds.comparison(name)
        updates = sorted({t.outcome.updates for t in seeds.trainings if t.precision == name})
        table.add_row(
            name,
            "–" if found is None else f"{found.mean:.4f} ± {_number(found.half_width)}",
            "–" if against is None else _difference(against),
            _seeds_verdict(seeds, name),
            str(updates[0]) if len(updates) == 1 else f"{updates[0]}–{updates[-1]}",
        )
    return table


def _seeds_verdict(seeds: SeedsResult, name: str) -> str:
    against, without = seeds.comparison(name), seeds.without_quality(name)
    words = [f"{without} of {seeds.seeds} came to no quality"] if without else []
    if against is not None:
        words.append(against.verdict)
    elif name == "fp32":
        words.append("what the others are compared with")
    else:
        words.append("no fp32 to compare with")
    return ", ".join(words)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4f}"


def _difference(against: Comparison) -> str:
    low, high = ("?" if bound is None else f"{bound:+.4f}" for bound in (against.low, against.high))
    return f"{against.difference:+.4f}\n({low} to {high})"


def _seeds_note(result: SearchResult, seeds: SeedsResult) -> str:
    """How the trainings compared over seeds were made alike."""
    job = seeds.job
    reference = result.workload_batch_size
    if job.steps is not None:
        matched = f"updates-matched: each makes {job.steps:,} steps"
    else:
        matched = f"epochs-matched: each goes through the data {job.epochs} times"
    rule = "" if job.lr_scaling == "none" else f", scaled by --lr-scaling {job.lr_scaling} from batch {reference}"
    return (
        f"seeds: {matched}, at batch {job.batch_size} and learning rate {job.learning_rate:g}{rule}; a step that amp "
        "skips is no update. Equivalent: the difference is proven to lie within the margin (two one-sided paired "
        "t-tests at 5 %, seed by seed); different: it is significant at 5 %."
    )


def diagnosis_table(diagnosis: Diagnosis) -> Table:
    """One row for each layer, over all diagnosed steps."""
    table = Table(title=f"layers at {diagnosis.steps} steps, one in {diagnosis.every}", title_justify="left")
    for heading in ("layer", "non-finite", "underflowing", "zero", "largest\noutput"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for layer in diagnosis.layers:
        fractions = [f"{fraction:.2%}" for fraction in (layer.non_finite, layer.underflowing, layer.zero)]
        table.add_row(
            layer.layer,
            *(fractions if layer.has_gradients else ["–"] * 3),
            f"{layer.largest_output:.4g}" if layer.largest_output is not None else "–",
        )
    return table


def log(result: SearchResult, parent: Run) -> str:
    """Keep table, notes and picture with the study's MLflow run. Returns the path of the report."""
    console = Console(record=True, width=160, file=io.StringIO())
    for table in search_tables(result):
        console.print(table)
    for line in notes(result):
        console.print("·", line)
    parent.text("report.txt", console.export_text())
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "search.png"
        draw(result, picture)
        parent.artifact(picture)
    parent.table("trials.json", _columns(result.trials))
    return parent.artifact_path("report.txt")


def draw(result: SearchResult, file: Path) -> None:
    """Speed and quality over the batch size, one line for each precision, its edge as a dashed line."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speed, quality = figure.subplots(1, 2)
    for index, (name, fitted) in enumerate(result.fit.precisions.items()):
        trials = sorted(
            (trial for trial in result.trials if trial.precision == name and trial.outcome.fits),
            key=lambda trial: trial.batch_size,
        )
        batches = [trial.batch_size for trial in trials]
        style = {"marker": "o", "color": f"C{index}", "label": f"{name} (≤ {fitted.edge.largest_batch})"}
        speed.plot(batches, [trial.outcome.samples_per_second for trial in trials], **style)
        quality.plot(batches, [trial.outcome.quality for trial in trials], **style)
        for axes in (speed, quality):
            axes.axvline(fitted.edge.largest_batch, color=f"C{index}", linestyle="--", linewidth=0.8)
    same = "epochs" if result.fit.job.steps is None else "steps"
    for axes, label in ((speed, "samples per second"), (quality, f"{result.quality_name}, same {same} for all")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("batch size (dashed: the largest that fits)")
        axes.set_ylabel(label)
        axes.legend()
        axes.grid(alpha=0.3)
    speed.set_ylim(bottom=0)
    figure.savefig(file, dpi=110)


def _title(result: FitResult) -> str:
    budget = result.job.memory_budget_bytes
    within = f"within {format_bytes(budget)}" if budget is not None else "in free memory"
    return f"{result.job.workload} on {result.device_name}, {within}"


def _edge_cells(fitted: PrecisionFit) -> tuple[str, str, str, str]:
    if fitted.at_edge is None:
        needed = f"one sample needs {format_bytes(fitted.bytes_needed)}" if fitted.bytes_needed else "nothing fits"
        return "0", needed, "–", "–"
    where = (
        f" in {fitted.failure.phase}"
        if fitted.edge.bound == "memory" and fitted.failure and fitted.failure.phase
        else ""
    )
    return (
        str(fitted.edge.largest_batch),
        _BOUNDS[fitted.edge.bound] + where,
        _memory(fitted.max_memory_bytes),
        _speed(fitted.samples_per_second),
    )


def _memory(size_bytes: int | None) -> str:
    return format_bytes(size_bytes) if size_bytes is not None else "–"


def _speed(samples_per_second: float | None) -> str:
    return f"{samples_per_second:,.0f}" if samples_per_second is not None else "–"


def _best(trials: list[TrialResult], *, higher_is_better: bool) -> TrialResult | None:
    sign = 1 if higher_is_better else -1
    rated = [trial for trial in trials if math.isfinite(_quality_or_nan(trial))]
    return max(rated, key=lambda trial: sign * _quality_or_nan(trial), default=None)


def _quality_or_nan(trial: TrialResult) -> float:
    return math.nan if trial.outcome.quality is None else trial.outcome.quality


def _made_few_updates(trial: TrialResult, best: TrialResult) -> bool:
    return trial.outcome.updates * _FEW_UPDATES <= best.outcome.updates


def _quality(trial: TrialResult | None, best: TrialResult | None) -> str:
    if trial is None or trial.outcome.quality is None:
        return "not trained"
    few = " (few!)" if best is not None and _made_few_updates(trial, best) else ""
    return f"{trial.outcome.quality:.4f}\n{trial.outcome.updates} updates{few}"


def _scale(outcome: Outcome) -> str:
    if outcome.scale is None:
        return "not used"
    scale = outcome.scale
    return (
        f"{scale.initial:,.0f} → {scale.final:,.0f}\n"
        f"{outcome.skipped_steps} of {outcome.steps} steps skipped, {scale.growths} growths"
    )


def _columns(trials: tuple[TrialResult, ...]) -> dict[str, list[object]]:
    rows = [trial.as_json() | {"updates": trial.outcome.updates} for trial in trials]
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
