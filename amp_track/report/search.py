"""The result of a search as tables and notes."""

from __future__ import annotations

from amp_track.config.precisions import REFERENCE
from amp_track.records.result import JobResult, JobStatus
from amp_track.report.max_batch import confirmation_notes, max_batch_cells, precision_notes
from amp_track.report.table import Column, Row, Table
from amp_track.report.wording import (
    CPU_BUDGET_IS_SLOW,
    ONE_SEED,
    RUN_AGAIN,
    UNKNOWN,
    counted,
    listed,
    memory_text,
    speed_text,
    tied,
    title,
)
from amp_track.results.equivalence import Comparison, SeedsResult
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow

_MOST_LISTED = 5
_FEW_UPDATES = 4
"""A training with this many times fewer optimizer steps than the best one at its precision is undertrained."""


def search_table(result: SearchResult) -> Table:
    """Return a table with one row per precision: max batch, fastest batch, best metric, and the GradScaler."""
    metric = result.metric_name
    columns = (
        Column("precision", key=True),
        Column("max\nbatch", right=True),
        Column("peak\nmemory", right=True),
        Column("samples/s", right=True),
        Column(f"{metric}\nat max batch", right=True),
        Column("fastest\nbatch", right=True),
        Column(f"best\n{metric}", right=True),
        Column("GradScaler\n(best run)"),
    )
    rows = [_row(result, name) for name in result.limits.precisions]
    rows += [(name, "skipped", *[UNKNOWN] * (len(columns) - 2)) for name in result.limits.skipped]
    return Table(title=title(result.limits), columns=columns, sections=(tuple(rows),))


def _row(result: SearchResult, name: str) -> Row:
    fitted = result.limits.precisions[name]
    trials = [trial for trial in result.trials if trial.precision == name and trial.job_result.fits]
    best = result.best(name)
    fastest = max(trials, key=lambda trial: trial.job_result.samples_per_second or 0, default=None)
    at_max_batch = next((trial for trial in trials if trial.batch_size == fitted.max_batch.batch_size), None)
    ran_out = any(
        (trial.precision, trial.batch_size, trial.job_result.status)
        == (name, fitted.max_batch.batch_size, JobStatus.OOM)
        for trial in result.trials
    )
    largest, _, memory, speed = max_batch_cells(fitted)
    if at_max_batch is not None:
        memory = memory_text(at_max_batch.job_result.peak_bytes)
        speed = speed_text(at_max_batch.job_result.samples_per_second)
    return (
        name,
        largest,
        memory,
        speed,
        "out of memory" if at_max_batch is None and ran_out else _metric(at_max_batch, best),
        f"{fastest.batch_size}\n{speed_text(fastest.job_result.samples_per_second)}/s" if fastest else UNKNOWN,
        f"{_metric(best, best)}\nat batch {best.batch_size}" if best else UNKNOWN,
        _scale(best.job_result) if best else UNKNOWN,
    )


def search_tables(result: SearchResult) -> list[Table]:
    """Return all tables of a search."""
    seeds = [seeds_table(result.seeds, result.metric_name)] if result.seeds is not None else []
    return [search_table(result), *seeds]


def notes(result: SearchResult) -> list[str]:
    """Return the notes that readers of the tables need."""
    lines = []
    if result.limits.job.memory_budget_bytes is not None and result.limits.hardware.kind == "cpu":
        lines.append(CPU_BUDGET_IS_SLOW)
    for name in result.limits.precisions:
        trials = [trial for trial in result.trials if trial.precision == name and trial.job_result.fits]
        best = result.best(name)
        poor = [
            trial
            for trial in trials
            if best and made_few_optimizer_steps(trial.job_result.optimizer_steps, best.job_result.optimizer_steps)
        ]
        if best and poor:
            few = listed([f"{trial.batch_size} ({trial.job_result.optimizer_steps})" for trial in poor], _MOST_LISTED)
            lines.append(
                f"{name}: few optimizer steps at batch {few}, compared with {best.job_result.optimizer_steps} at batch "
                f"{best.batch_size}, so the model is undertrained. Compare with more --epochs, the same --steps, or "
                "--lr-scaling."
            )
    lines += [*confirmation_notes(result.limits), *_out_of_memory(result), *_stopped_early(result)]
    if result.seeds is not None:
        lines.append(seeds_note(result, result.seeds))
    elif result.seeds_wanted == 1:
        lines.append(ONE_SEED)
    return lines + precision_notes(result.limits)


def _out_of_memory(result: SearchResult) -> list[str]:
    """Return a note on the trainings that ran out of memory at a batch that fit before."""
    failed = [trial for trial in result.trials if trial.job_result.status is JobStatus.OOM]
    if not failed:
        return []
    where = listed([f"{trial.precision} at batch {trial.batch_size:,}" for trial in failed], _MOST_LISTED)
    return [
        f"{where}: out of memory although the batch fit before, because the memory of a job varies here. Use more "
        "--headroom with another --study."
    ]


def _stopped_early(result: SearchResult) -> list[str]:
    """Return a note on the requested trainings that have not run, because of the time limit or an interrupt."""
    made = result.seeds.seeds if result.seeds is not None else 0
    missing = []
    if len(result.trials) < result.trials_wanted:
        missing.append(f"{len(result.trials)} of {result.trials_wanted} trainings")
    if 1 < result.seeds_wanted > made:
        missing.append(f"{made} of {result.seeds_wanted} seeds")
    if not missing:
        return []
    return [f"Stopped after {' and '.join(missing)} (--time-limit or interrupt). {RUN_AGAIN}"]


def made_few_optimizer_steps(optimizer_steps: int, best_optimizer_steps: int) -> bool:
    """Return whether a training made so few optimizer steps that its metric is not comparable to the best one."""
    return optimizer_steps * _FEW_UPDATES <= best_optimizer_steps


def _metric(trial: TrialRow | None, best: TrialRow | None) -> str:
    if trial is None or trial.job_result.metric is None:
        return "not trained"
    few = (
        " (few!)"
        if best is not None
        and made_few_optimizer_steps(trial.job_result.optimizer_steps, best.job_result.optimizer_steps)
        else ""
    )
    return f"{trial.job_result.metric:.4f}\n{counted(trial.job_result.optimizer_steps, 'step')}{few}"


def _scale(job_result: JobResult) -> str:
    if job_result.scale is None:
        return "not used"
    scale = job_result.scale
    return (
        f"{scale.initial:,.0f} → {scale.final:,.0f}\n"
        f"{job_result.skipped_steps} of {job_result.steps} steps skipped, {scale.growths} growths"
    )


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
                UNKNOWN if interval is None else f"{interval.mean:.4f} " + tied(f"± {_bound(interval.half_width)}"),
                UNKNOWN if against is None else _difference(against),
                _conclusion(seeds, name),
                str(optimizer_steps[0]) if len(optimizer_steps) == 1 else f"{optimizer_steps[0]}–{optimizer_steps[-1]}",
            )
        )
    title = f"{metric_name} over {seeds.seeds} seeds at {at}, against fp32 ± {seeds.tolerance}"
    return Table(title=title, columns=columns, sections=(tuple(rows),))


def _conclusion(seeds: SeedsResult, name: str) -> str:
    against, without = seeds.comparison(name), seeds.without_metric(name)
    words = [f"{without} of {seeds.seeds} without a metric"] if without else []
    if against is not None:
        words.append(against.conclusion)
    elif name == REFERENCE:
        words.append("reference")
    else:
        words.append("no fp32 result")
    return ", ".join(words)


def _bound(value: float | None) -> str:
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
