"""Metric over several seeds as a table, and what must be said beside it."""

from __future__ import annotations

from amp_track.report.table import Column, Table
from amp_track.report.text import UNKNOWN, tied
from amp_track.results.equivalence import Comparison
from amp_track.results.search import SearchResult
from amp_track.results.seeds import SeedsResult


def seeds_table(seeds: SeedsResult, metric_name: str, *, where: str = "") -> Table:
    """Return a table with one row for each precision: the mean over seeds, and whether it equals fp32's.

    `where` names what else is fixed.
    """
    at = f"batch {seeds.job.batch_size}" + (f", {where}" if where else "")
    columns = (
        Column("precision", key=True),
        Column(f"mean {tied('± 95 %')}", right=True),
        Column(f"difference\n{tied('(90 %')} interval)", right=True),
        Column("conclusion"),
        Column("updates\nmade", right=True),
    )
    rows = []
    for name in seeds.precisions:
        interval, against = seeds.interval(name), seeds.comparison(name)
        optimizer_steps = sorted({t.job_result.optimizer_steps for t in seeds.trainings if t.precision == name})
        rows.append(
            (
                name,
                UNKNOWN if interval is None else f"{interval.mean:.4f} " + tied(f"± {_number(interval.half_width)}"),
                UNKNOWN if against is None else _difference(against),
                _status(seeds, name),
                str(optimizer_steps[0]) if len(optimizer_steps) == 1 else f"{optimizer_steps[0]}–{optimizer_steps[-1]}",
            )
        )
    title = f"{metric_name} over {seeds.seeds} seeds at {at}, against fp32 ± {seeds.tolerance}"
    return Table(title=title, columns=columns, sections=(tuple(rows),))


def _status(seeds: SeedsResult, name: str) -> str:
    against, without = seeds.comparison(name), seeds.without_metric(name)
    words = [f"{without} of {seeds.seeds} without a quality"] if without else []
    if against is not None:
        words.append(against.conclusion)
    elif name == "fp32":
        words.append("the reference")
    else:
        words.append("no fp32 to compare with")
    return ", ".join(words)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4f}"


def _difference(against: Comparison) -> str:
    low, high = ("?" if bound is None else f"{bound:+.4f}" for bound in (against.low, against.high))
    return f"{against.difference:+.4f}\n({low} {tied(f'to {high})')}"


def seeds_note(result: SearchResult, seeds: SeedsResult) -> str:
    """Say what the trainings compared over seeds have in common, and what the verdicts mean."""
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
