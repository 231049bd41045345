"""The metric over several seeds as a table and a note."""

from __future__ import annotations

from amp_track.config.precisions import REFERENCE
from amp_track.report.table import Column, Table
from amp_track.report.wording import UNKNOWN, counted, tied
from amp_track.results.equivalence import Comparison, SeedsResult
from amp_track.results.search import SearchResult


def seeds_table(seeds: SeedsResult, metric_name: str, *, where: str = "") -> Table:
    """Return a table with one row per precision: the mean over seeds, and whether it is equivalent to fp32.

    `where` names the other fixed settings.
    """
    at = f"batch {seeds.job.batch_size}" + (f", {where}" if where else "")
    columns = (
        Column("precision", key=True),
        Column(f"mean {tied('± 95 %')}", right=True),
        Column(f"difference\n{tied('(90 %')} interval)", right=True),
        Column("conclusion"),
        Column("optimizer\nsteps", right=True),
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
    words = [f"{without} of {seeds.seeds} without a metric"] if without else []
    if against is not None:
        words.append(against.conclusion)
    elif name == REFERENCE:
        words.append("reference")
    else:
        words.append("no fp32 result")
    return ", ".join(words)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4f}"


def _difference(against: Comparison) -> str:
    low, high = ("?" if bound is None else f"{bound:+.4f}" for bound in (against.low, against.high))
    return f"{against.difference:+.4f}\n({low} {tied(f'to {high})')}"


def seeds_note(result: SearchResult, seeds: SeedsResult) -> str:
    """Return a note on the settings shared by all seeds, and on the meaning of the conclusions."""
    job = seeds.job
    reference = result.workload_batch_size
    duration = counted(job.steps, "step") if job.steps is not None else counted(job.epochs or 0, "epoch")
    rule = "" if job.lr_scaling == "none" else f", scaled by --lr-scaling {job.lr_scaling} from batch {reference}"
    return (
        f"Seeds: {duration} each, at batch {job.batch_size} and learning rate {job.learning_rate:g}{rule}; steps that "
        "amp skips are not counted. Equivalent: the difference is proven to be within the tolerance (two one-sided "
        "t-tests at 5 %, paired by seed); different: it is significant at 5 %."
    )
