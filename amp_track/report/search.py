"""The result of a search as tables, notes and a plot."""

from __future__ import annotations

from pathlib import Path

from amp_track.config.values import PRECISION_COLORS
from amp_track.records.result import JobResult, JobStatus
from amp_track.report.max_batch import confirmation_notes, max_batch_cells, precision_notes
from amp_track.report.seeds import seeds_note, seeds_table
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
    title,
)
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


def draw(result: SearchResult, file: Path) -> None:
    """Draw speed and metric over the batch size: one line per precision, with its max batch dashed."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speed, metric = figure.subplots(1, 2)
    for name, fitted in result.limits.precisions.items():
        trials = sorted(
            (trial for trial in result.trials if trial.precision == name and trial.job_result.fits),
            key=lambda trial: trial.batch_size,
        )
        batches = [trial.batch_size for trial in trials]
        style = {"marker": "o", "color": PRECISION_COLORS[name], "label": f"{name} (≤ {fitted.max_batch.batch_size})"}
        speed.plot(batches, [trial.job_result.samples_per_second for trial in trials], **style)
        metric.plot(batches, [trial.job_result.metric for trial in trials], **style)
        for axes in (speed, metric):
            axes.axvline(fitted.max_batch.batch_size, color=PRECISION_COLORS[name], linestyle="--", linewidth=0.8)
    same = "epochs" if result.limits.job.steps is None else "steps"
    for axes, label in ((speed, "samples per second"), (metric, f"{result.metric_name}, same {same} for all")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("batch size (dashed: max batch)")
        axes.set_ylabel(label)
        axes.legend()
        axes.grid(alpha=0.3)
    speed.set_ylim(bottom=0)
    figure.savefig(file, dpi=110)


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
