"""The result of `max-batch` as a table and notes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from amp_track.records.units import format_bytes
from amp_track.report.table import Column, Row, Table, numbers, table_of
from amp_track.report.wording import (
    CPU_BUDGET_IS_SLOW,
    UNKNOWN,
    counted,
    has_cpu_budget,
    memory_text,
    not_possible,
    of_precisions,
    speed_text,
    tied,
    time_text,
    title,
)
from amp_track.results.max_batch import MaxBatchResult, PrecisionResult

_BOUNDS = {
    "memory": "memory",
    "dataset": "size of the training set",
    "max_batch_size": "--max-batch-size",
    "kernel": "a kernel of the device",
}
_MOST_SPREAD = 0.3
"""Readings of one batch that differ by a larger fraction decide nothing: the machine is busy with something else."""
_TIMED = ("probe", "multiple", "repeat", "timing")
"""The kinds of jobs that wait for each step, so that loading does not overlap with it."""
_MUCH_LOADING = 0.5
"""The fraction of a step from which on loading is what its speed shows."""
_SAME_MEMORY = 1.01
"""The ratio of two peaks of one batch above which a note names both."""
_RESOLUTION = {
    True: "Memory is measured in pages (4 KiB).",
    False: "Memory is measured in segments of the caching allocator (2 MiB or more).",
}
"""The resolution of the memory meter; the key is whether the device is a CPU."""


def max_batch_table(result: MaxBatchResult) -> Table:
    """Return a table with one row per precision: max batch, its limit, memory and speed, and the efficient batch."""
    columns = [
        Column("precision", key=True),
        *numbers("max\nbatch"),
        Column("limited by"),
        *numbers("peak\nmemory", "samples/s", "efficient\nbatch", "probes", "confirmed\nby"),
    ]
    if result.multiple_of > 1:
        columns[2:2] = numbers(f"max multiple\nof {result.multiple_of}")
    if any(fitted.typical_max_batch for fitted in result.precisions.values()):
        columns += numbers("max batch,\nas drawn")
    if any(fitted.eval_max_batch for fitted in result.precisions.values()):
        columns += numbers("max batch,\nevaluation")
    if result.effective_batch_size is not None:
        columns += numbers(f"effective\nbatch {result.effective_batch_size}")
    rows = [_row(result, name) for name in result.precisions]
    return table_of(title(result), columns, rows + rows_of_the_others(result, len(columns)))


def rows_of_the_others(result: MaxBatchResult, columns: int) -> list[Row]:
    """Return a row for each requested precision that has no max batch."""
    words = {name: "not yet" if name in result.unproven else "skipped" for name in result.left_out}
    return [(name, word, *[UNKNOWN] * (columns - 2)) for name, word in words.items()]


def _row(result: MaxBatchResult, name: str) -> Row:
    fitted = result.precisions[name]
    efficient, confirmed = fitted.efficient_batch, UNKNOWN
    if fitted.confirmation is not None:
        made = fitted.confirmation.steps
        confirmed = f"{made:,} of\n{fitted.epoch_steps:,} steps" if _is_cut_short(fitted) else counted(made, "step")
    cells = [
        name,
        *max_batch_cells(fitted),
        f"{efficient[0]}\n{speed_text(efficient[1])}/s" if efficient else UNKNOWN,
        str(fitted.probes),
        confirmed,
    ]
    if result.multiple_of > 1:
        cells.insert(2, str(fitted.max_multiple or UNKNOWN))
    if any(each.typical_max_batch for each in result.precisions.values()):
        cells.append(str(fitted.typical_max_batch.batch_size) if fitted.typical_max_batch else UNKNOWN)
    if any(each.eval_max_batch for each in result.precisions.values()):
        cells.append(str(fitted.eval_max_batch.batch_size) if fitted.eval_max_batch else UNKNOWN)
    if result.effective_batch_size is not None:
        parts = result.accumulation(name)
        cells.append(tied(f"{parts[0]} × {parts[1]}") if parts else "no divisor fits")
    return tuple(cells)


def _is_cut_short(fitted: PrecisionResult) -> bool:
    return fitted.confirmation is not None and fitted.confirmation.steps < fitted.epoch_steps


def max_batch_cells(fitted: PrecisionResult) -> tuple[str, str, str, str]:
    if fitted.at_max_batch is None:
        needed = f"one sample needs {memory_text(fitted.bytes_needed)}" if fitted.bytes_needed else "nothing fits"
        return "0", "not supported here" if fitted.why_unsupported is not None else needed, UNKNOWN, UNKNOWN
    phase = fitted.failure.phase if fitted.max_batch.bound == "memory" and fitted.failure else ""
    return (
        str(fitted.max_batch.batch_size),
        _BOUNDS[fitted.max_batch.bound] + (f" in {phase}" if phase else ""),
        memory_text(fitted.peak_bytes),
        speed_text(fitted.samples_per_second),
    )


def max_batch_notes(result: MaxBatchResult) -> list[str]:
    """Return the notes on a search for max batches, those that change how its answer is used first."""
    lines = unproven_notes(result) + _few_steps(result) + _own_accumulation(result) + _loading(result)
    lines += _limited_by_data(result) + _varying_speeds(result) + confirmation_notes(result)
    if has_cpu_budget(result):
        lines.append(CPU_BUDGET_IS_SLOW)
    if any(fitted.efficient_batch for fitted in result.precisions.values()):
        lines.append(
            "Efficient batch: the smallest batch within 3 % of the best samples/s. Larger batches are not faster."
        )
    lines += precision_notes(result)
    errors = {name: found.plan_error for name, found in result.precisions.items() if found.plan_error is not None}
    if errors:
        listed = ", ".join(f"{error:+.1%} at {name}" for name, error in errors.items())
        lines.append(f"Memory of the first probe relative to the memory plan: {listed}.")
    return lines


def unproven_notes(result: MaxBatchResult) -> list[str]:
    """Return a note with what is known about each precision whose search has not ended."""
    return [f"{name} is {result.skipped[name]}" for name in result.unproven]


def _few_steps(result: MaxBatchResult) -> list[str]:
    """Return a note if the model may stay undertrained at the recommended batch, unless the user set that of a step."""
    choice = result.recommended
    if choice is None or not choice.makes_few_steps or result.effective_batch_size is not None:
        return []
    steps = counted(choice.epoch_steps or 0, "optimizer step")
    before = f"of {result.training_samples:,} samples has only {steps}"
    cure = "train for more epochs, raise the learning rate, or use a smaller batch with --max-batch-size"
    if choice.workload_epoch_steps is not None:
        before = (
            f"has {steps}, at the workload's batch {result.workload_batch_size} it has {choice.workload_epoch_steps:,}"
        )
        cure = (
            "train for more epochs, raise the learning rate, or keep the samples per step with --effective-batch-size"
        )
    batch = f"{choice.batch_size:,}" + (f" × {choice.batches_per_step}" if choice.batches_per_step > 1 else "")
    return [
        f"Few optimizer steps: at batch {batch} an epoch {before}, so the model may stay undertrained. "
        f"To avoid that, {cure}."
    ]


def _own_accumulation(result: MaxBatchResult) -> list[str]:
    """Return a note if the training itself accumulates another number of batches than the effective batch needs."""
    choice = result.recommended
    if choice is None or result.accumulation(choice.precision) is None:
        return []
    own, wanted = result.batches_per_step(choice.batch_size), choice.job.grad_accum
    if own in (1, wanted):
        return []
    return [
        f"The training itself takes {own} batches for each optimizer step. Change that number to {wanted} at "
        f"batch {choice.batch_size:,}: else a step does not have the {result.effective_batch_size:,} samples of "
        "--effective-batch-size."
    ]


def _loading(result: MaxBatchResult) -> list[str]:
    """Return a note if loading limits the speed at the recommended batch, which then says little of the precision."""
    choice = result.recommended
    if choice is None:
        return []
    timed = [
        (row, row.batch_size / speed, load_seconds)
        for row in result.probes
        if row.precision == choice.precision
        and row.kind in _TIMED
        and (speed := row.job_result.samples_per_second)
        and (load_seconds := row.job_result.load_seconds)
    ]
    if not timed:
        return []
    row, batch_seconds, load_seconds = min(timed, key=lambda each: abs(each[0].batch_size - choice.batch_size))
    where = f"at {row.precision} and batch {row.batch_size:,}"
    if result.workload_batch_size is None:  # of a function or a command: an optimizer step, with the loading
        step_seconds = batch_seconds * (row.job_result.batches_per_step or 1)
        if has_cpu_budget(result) or load_seconds < _MUCH_LOADING * step_seconds:
            return []
        return [
            f"Loading takes {load_seconds / step_seconds:.0%} of a step {where}, so the speeds are mostly those of the "
            "data loader, at every precision. Load faster, such as with more workers, and search again."
        ]
    step_seconds = batch_seconds * result.job.nproc
    # A CPU computes on the cores that would load.
    if result.hardware.kind == "cpu" or load_seconds <= step_seconds * max(result.job.num_workers or 0, 1):
        return []
    loading, stepping = time_text(load_seconds), time_text(step_seconds)
    return [
        f"Loading a batch takes {loading} in one process, a step {stepping} ({where}): a training waits for its data, "
        f"which these speeds do not count. Use --num-workers {math.ceil(load_seconds / step_seconds)} or more."
    ]


def _limited_by_data(result: MaxBatchResult) -> list[str]:
    """Return a note if no max batch says anything about memory."""
    found = [result.precisions[name] for name in result.max_batch]
    if not found or any(fitted.max_batch.bound != "dataset" for fitted in found):
        return []
    is_workload = result.workload_batch_size is not None
    cure = "--synthetic finds what memory allows" if is_workload else "With more samples, memory would"
    peak = memory_text(max(fitted.peak_bytes or 0 for fitted in found))
    limit = f" of {memory_text(result.limit_bytes)}" if result.limit_bytes else ""
    return [f"The size of the training set, not memory, limits every max batch (peak {peak}{limit}). {cure}."]


def _varying_speeds(result: MaxBatchResult) -> list[str]:
    """Return a note on the batch whose readings disagree most, of those that the recommendation compares."""
    spreads = [
        (1 - min(own) / max(own), f"{name} at batch {batch_size:,}: {', '.join(map(speed_text, own))} samples/s")
        for name, fitted in result.precisions.items()
        for batch_size, own in fitted.readings.items()
        if batch_size in fitted.compared and min(own)
    ]
    spread, readings = max(spreads, default=(0.0, ""))
    if spread <= _MOST_SPREAD:
        return []
    return [
        f"The speeds of one batch vary by up to {spread * 100:.0f} % between readings ({readings}), so the recommended "
        "precision and batch are uncertain. Repeat with another --study when the machine is idle."
    ]


def confirmation_notes(result: MaxBatchResult) -> list[str]:
    """Return notes on the proof of the max batches: the confirmation runs, and the headroom."""
    lines = []
    found = result.precisions.values()
    ratios = [fitted.size_ratio for fitted in found if fitted.size_ratio is not None]
    if ratios:
        typical = [(fitted.typical_max_batch, fitted.max_batch) for fitted in found]
        fits_more = any(drawn is not None and drawn.batch_size > worst.batch_size for drawn, worst in typical)
        more = " Batches as drawn fit more, until one of them is larger." if fits_more else ""
        lines.append(
            f"Samples differ in size: the largest is {ratios[0]:.1f} times the mean. The max batch and its speed are "
            f"those of batches of the largest samples.{more}"
        )
    if reasons := dict.fromkeys(fitted.why_as_drawn for fitted in found if fitted.why_as_drawn):
        lines.append(
            f"Samples may differ in size, but batches stayed as they were drawn: {'; '.join(reasons)}. A later one may "
            "be larger and run out of memory: use --confirm-steps epoch and --headroom."
        )
    if any(map(_is_cut_short, result.precisions.values())):
        lines.append(
            "The confirmation run covers part of an epoch: full steps, the smaller last step, an evaluation of as many "
            "batches and, with several epochs, the steps after it. Use --confirm-steps epoch for a full epoch."
        )
    single = {
        name: found.max_batch.batch_size
        for name, found in result.precisions.items()
        if _has_one_full_step(result, found) and not _is_cut_short(found)
    }
    if single:
        listed = ", ".join(f"{name} at batch {batch:,}" for name, batch in single.items())
        lines.append(
            f"Only one full optimizer step confirms the max batch ({listed}). A training with more steps or epochs may "
            "need more memory: search with them."
        )
    runs = [result.precisions[name].runs_at_max_batch for name in result.max_batch]
    if max(runs, default=1) > 1:
        varied = _varying_memory(result) or _RESOLUTION[result.hardware.kind == "cpu"]
        at_least = "at least " if len(set(runs)) > 1 else ""
        processes = counted(min(runs), "fresh process", "fresh processes")
        lines.append(f"Each max batch ran in {at_least}{processes}. {varied}")
    if result.headroom_bytes:
        lines.append(f"--headroom keeps {format_bytes(result.headroom_bytes)} of the budget free at each max batch.")
    return lines


def _has_one_full_step(result: MaxBatchResult, found: PrecisionResult) -> bool:
    """Return whether the confirmation run had one step of full batches, and at most a smaller one after it."""
    steps = found.confirmation.steps if found.confirmation is not None else 0
    step_samples = found.max_batch.batch_size * result.asked.nproc * result.grad_accum
    has_smaller_step = steps == found.epoch_steps == 2 and 2 * step_samples > (result.training_samples or 0) > 0
    return steps == 1 or has_smaller_step


def _varying_memory(result: MaxBatchResult) -> str:
    """Return how far apart the peaks of one max batch were, if by more than 1 %; else nothing."""
    for name, batch_size in result.max_batch.items():
        rows = [row for row in result.probes if (row.precision, row.batch_size) == (name, batch_size)]
        own = [row.job_result for row in rows if row.kind not in ("eval", "typical") and row.job_result.fits]
        peaks = [peak for job_result in own if (peak := job_result.peak_bytes)]
        if peaks and max(peaks) > _SAME_MEMORY * min(peaks):
            return f"Their memory varied, at {name} from {format_bytes(min(peaks))} to {format_bytes(max(peaks))}."
    return ""


def precision_notes(result: MaxBatchResult) -> list[str]:
    """Return a note with the reason for each precision that is not supported, has a caution or was skipped."""
    skipped = {name: reason for name, reason in result.left_out.items() if name not in result.unproven}
    return impossible_precisions(result.precisions) + _beyond(result) + of_precisions(result.cautions, skipped)


def _beyond(result: MaxBatchResult) -> list[str]:
    lines, none = [], []
    for name, fitted in result.precisions.items():
        if fitted.also_fits:
            fit = "fits" if len(fitted.also_fits) == 1 else "fit"
            lines.append(
                f"{name}: batch {fitted.max_batch.first_failing_batch} runs out of memory although "
                f"{', '.join(map(str, fitted.also_fits))} {fit}. The max batch stays below the first failing one: no "
                "smaller batch is known to fail."
            )
        elif fitted.beyond:
            none.append(f"up to {fitted.beyond[-1][0]} at {name}")
    if none:
        lines.append(f"Batches above the first failing one do not fit either (tried {', '.join(none)}).")
    return lines


def impossible_precisions(fits: Mapping[str, PrecisionResult]) -> list[str]:
    """Return a note with the error for each precision that the device has no kernels for."""
    return [not_possible(name, why) for name, fitted in fits.items() if (why := fitted.why_unsupported) is not None]
