"""The result of a search as tables and notes."""

from __future__ import annotations

from amp_track.config.precisions import REFERENCE
from amp_track.records.result import JobResult, JobStatus
from amp_track.report.max_batch import (
    confirmation_notes,
    max_batch_cells,
    precision_notes,
    rows_of_the_others,
    unproven_notes,
)
from amp_track.report.table import Column, Row, Table, numbers, table_of
from amp_track.report.wording import (
    CPU_BUDGET_IS_SLOW,
    NOTHING_LEARNED,
    ONE_SEED,
    RUN_AGAIN,
    UNKNOWN,
    duration,
    has_cpu_budget,
    interval_text,
    listed,
    memory_text,
    metric_text,
    short_trainings,
    speed_text,
    tied,
    title,
)
from amp_track.results.equivalence import SeedsResult
from amp_track.results.recommendation import made_few_optimizer_steps
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow

_MOST_LISTED = 5


def search_tables(result: SearchResult) -> list[Table]:
    seeds = [seeds_table(result.seeds, result.metric_name)] if result.seeds is not None else []
    return [search_table(result), *seeds]


def search_table(result: SearchResult) -> Table:
    """Return a table with one row per precision: max batch, best metric, fastest batch, and skipped steps.

    With one line per cell it fits `amp_track.report.table.WIDTH`; the page has more of each training.
    """
    metric = result.metric_name
    columns = [
        Column("precision", key=True),
        *numbers("max\nbatch", "peak\nmemory", "samples/s"),
        *numbers(f"{metric}\nat max batch", f"best\n{metric}", "at\nbatch", "fastest\nbatch"),
    ]
    bests = [best for name in result.limits.precisions if (best := result.best(name)) is not None]
    has_scaler = any(best.job_result.scale is not None for best in bests)
    columns += numbers("steps\nskipped") if has_scaler else []
    rows = [_row(result, name, has_scaler=has_scaler) for name in result.limits.precisions]
    return table_of(title(result.limits), columns, rows + rows_of_the_others(result.limits, len(columns)))


def _row(result: SearchResult, name: str, *, has_scaler: bool) -> Row:
    largest, _, memory, speed = max_batch_cells(result.limits.precisions[name])
    trials, best = result.trained(name), result.best(name)
    fastest = max(trials, key=lambda trial: trial.job_result.samples_per_second or 0, default=None)
    max_batch = result.limits.precisions[name].max_batch.batch_size
    there = [trial for trial in trials if trial.batch_size == max_batch]
    at_max_batch = result.best(name, max_batch) or next(iter(there), None)
    failed = [(each.precision, str(each.batch_size)) for each in _out_of_memory(result)]
    if at_max_batch is not None:
        memory = memory_text(at_max_batch.job_result.peak_bytes)
        speed = speed_text(at_max_batch.job_result.samples_per_second)
    cells = (
        name,
        largest,
        memory,
        speed,
        "out of memory" if at_max_batch is None and (name, largest) in failed else _metric(at_max_batch, best),
        _metric(best, None) if best else UNKNOWN,
        str(best.batch_size) if best else UNKNOWN,
        str(fastest.batch_size) if fastest else UNKNOWN,
    )
    return (*cells, _skipped(best.job_result) if best else UNKNOWN) if has_scaler else cells


def _out_of_memory(result: SearchResult) -> list[TrialRow]:
    return [trial for trial in result.trials if trial.job_result.status is JobStatus.OOM]


def _metric(trial: TrialRow | None, best: TrialRow | None) -> str:
    if trial is None or trial.job_result.metric is None:
        return "not trained"
    steps = trial.job_result.optimizer_steps
    is_few = best is not None and made_few_optimizer_steps(steps, best.job_result.optimizer_steps)
    return metric_text(trial.job_result.metric) + " (few!)" * is_few


def _skipped(job_result: JobResult) -> str:
    return f"{job_result.skipped_steps} of {job_result.steps}" if job_result.scale is not None else UNKNOWN


def notes(result: SearchResult) -> list[str]:
    """Return the notes on a search, those that change how its answer is used first."""
    lines = unproven_notes(result.limits) + _stopped_early(result)
    if failed := [f"{trial.precision} at batch {trial.batch_size:,}" for trial in _out_of_memory(result)]:
        lines.append(
            f"{listed(failed, _MOST_LISTED)}: out of memory although the batch fit before, because the memory of a job "
            "varies here. Use more --headroom with another --study."
        )
    if undertrained := [text for name in result.limits.precisions if (text := _undertrained(result, name))]:
        lines.append(
            f"Few optimizer steps, so the model is undertrained: {'; '.join(undertrained)}. Compare with more "
            "--epochs, the same --steps, or --lr-scaling, with another --study."
        )
    if result.seeds is not None:
        lines += [seeds_note(result, result.seeds), *[NOTHING_LEARNED] * (not result.seeds.has_learned)]
    elif result.seeds_wanted == 1:
        lines.append(ONE_SEED)
    lines += short_trainings(trial.job_result.train_seconds for trial in result.trials)
    lines += [CPU_BUDGET_IS_SLOW] if has_cpu_budget(result.limits) else []
    return lines + confirmation_notes(result.limits) + precision_notes(result.limits)


def _undertrained(result: SearchResult, name: str) -> str:
    """Return the batches of a precision with few optimizer steps: `fp32 at batch 523 (18), against 138 at batch 64`."""
    if (best := result.best(name)) is None:
        return ""
    most = best.job_result.optimizer_steps
    made = [(trial.batch_size, trial.job_result.optimizer_steps) for trial in result.trained(name)]
    poor = [f"{batch} ({steps})" for batch, steps in made if made_few_optimizer_steps(steps, most)]
    return f"{name} at batch {listed(poor, _MOST_LISTED)}, against {most} at batch {best.batch_size}" if poor else ""


def _stopped_early(result: SearchResult) -> list[str]:
    made = result.seeds.seeds if result.seeds is not None else 0
    missing = []
    if len(result.trials) < result.trials_wanted:
        missing.append(f"{len(result.trials)} of {result.trials_wanted} trainings")
    if 1 < result.seeds_wanted > made:
        missing.append(f"{made} of {result.seeds_wanted} seeds")
    return [f"Stopped after {' and '.join(missing)} (--time-limit or interrupt). {RUN_AGAIN}"] if missing else []


def seeds_table(seeds: SeedsResult, metric_name: str, *, where: str = "") -> Table:
    """Return a table with one row per precision: the mean over seeds, and whether it is equivalent to fp32.

    `where` names the other fixed settings.
    """
    at = f"batch {seeds.job.batch_size}" + (f", {where}" if where else "")
    columns = (
        Column("precision", key=True),
        *numbers(f"mean {tied('± 95 %')}", f"difference\n{tied('(90 %')} interval)"),
        Column("conclusion"),
        *numbers("optimizer\nsteps"),
    )
    title = f"{metric_name} over {seeds.seeds} seeds at {at}, against fp32 ± {seeds.tolerance}"
    return table_of(title, columns, [_seeds_row(seeds, name) for name in seeds.precisions])


def _seeds_row(seeds: SeedsResult, name: str) -> Row:
    interval, against, without = seeds.interval(name), seeds.comparison(name), seeds.without_metric(name)
    optimizer_steps = sorted({t.job_result.optimizer_steps for t in seeds.trainings if t.precision == name})
    difference, conclusion = UNKNOWN, "reference" if name == REFERENCE else "no fp32 result"
    if against is not None:
        of = interval.mean if interval is not None else None
        low, high, moved = (
            "?" if each is None else metric_text(each, of=of, sign="+")
            for each in (against.low, against.high, against.difference)
        )
        difference, conclusion = f"{moved}\n({low} {tied(f'to {high})')}", against.conclusion
    return (
        name,
        interval_text(interval) if interval is not None else UNKNOWN,
        difference,
        (f"{without} of {seeds.seeds} without a metric, " if without else "") + conclusion,
        "–".join(str(steps) for steps in dict.fromkeys((optimizer_steps[0], optimizer_steps[-1]))),
    )


def seeds_note(result: SearchResult, seeds: SeedsResult) -> str:
    """Return a note on the settings shared by all seeds, and on the meaning of the conclusions."""
    job, reference = seeds.job, result.workload_batch_size
    rule = "" if job.lr_scaling == "none" else f", scaled by --lr-scaling {job.lr_scaling} from batch {reference}"
    return (
        f"Seeds: {duration(job)} each, at batch {job.batch_size} and learning rate {job.learning_rate:g}{rule}; steps "
        "that amp skips are not counted. Equivalent: the difference is proven to be within the tolerance (two "
        "one-sided t-tests at 5 %, paired by seed); different: it is significant at 5 %."
    )
