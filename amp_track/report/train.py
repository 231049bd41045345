"""The result of one training as lines and tables, and advice on it: what happened and what to change."""

from __future__ import annotations

import math

from amp_track.config.precisions import BY_NAME
from amp_track.records.result import Diagnosis, JobResult, ScaleReport
from amp_track.report import links, progress
from amp_track.report.table import Column, Table, numbers, table_of
from amp_track.report.wording import UNKNOWN, bullets, counted
from amp_track.results.train import TrainResult

_SETTLED = 0.05
"""The fraction of a training in which a scale that only falls is still normal."""
_OFTEN = 0.01
"""The fraction of steps above which overflows are too frequent, not counting those caused by scale growth."""
_UNDERFLOWS = 0.25
"""A layer is reported if a larger fraction of its gradients is below float16's smallest normal number."""
_LARGEST_FLOAT16 = 65504
_RETRIES_PER_STEP, _FEWEST_RETRIES = 0.1, 5
"""The allocator may retry in the first steps; retries in more than one of ten steps slow the training down."""


def blocks(result: TrainResult, *, see_with: str, ui: str) -> list[str | Table]:
    """Return the output of `train` in order: lines, advice, the diagnosis table, and the links to MLflow.

    `see_with` is the command that starts MLflow's UI, `ui` the URL of that UI.
    """
    where = f"MLflow run {result.run_id}; see it with: {see_with}"
    page = f"  {links.run(ui, result.experiment_id, result.run_id)}"
    return [*lines(result), *bullets(result.advice), *tables(result), where, page]


def lines(result: TrainResult) -> list[str]:
    """Return one line for the job result, and one for the GradScaler if there was one."""
    job_result = result.job_result
    shown = [progress.job_result_line(result.job, job_result, metric_name=result.inspection.metric_name)]
    if (scale := job_result.scale) is not None:
        skipped = f"{job_result.skipped_steps} of {job_result.steps} steps skipped"
        shown.append(f"scale {scale.initial:g} -> {scale.final:g}, {skipped}")
    return shown


def tables(result: TrainResult) -> list[Table]:
    diagnosis = result.job_result.diagnosis
    return [diagnosis_table(diagnosis)] if diagnosis is not None else []


def diagnosis_table(diagnosis: Diagnosis) -> Table:
    headings = ("non-finite", "underflowing", "zero", "largest\noutput")
    rows = []
    for layer in diagnosis.layers:
        fractions = [f"{fraction:.2%}" for fraction in (layer.non_finite, layer.underflowing, layer.zero)]
        largest = f"{layer.largest_output:.4g}" if layer.largest_output is not None else UNKNOWN
        rows.append((layer.layer, *(fractions if layer.has_gradients else [UNKNOWN] * 3), largest))
    return table_of(
        f"gradient statistics by layer, over {counted(diagnosis.steps, 'step')} (one in {diagnosis.every})",
        (Column("layer", key=True), *numbers(*headings)),
        rows,
    )


def explain(job_result: JobResult, precision: str, *, num_workers: int | None = None) -> list[str]:
    """Return one line of advice per finding, the most serious first."""
    lines = []
    if job_result.non_finite_weights:
        lines.append(
            f"The weights are not finite (first: {job_result.non_finite_weights}): the training diverged and cannot "
            "recover. Lower --lr or set --max-grad-norm."
        )
    if (losses := job_result.non_finite_losses) is not None:
        batch = f" (batch {losses.first_batch} of the step)" if losses.first_batch > 1 else ""
        batches = counted(losses.batches, "batch", "batches")
        may_overflow = BY_NAME[precision].computes == "float16" and not job_result.non_finite_weights
        lines.append(
            f"The loss was inf or NaN in {batches}, first at step {losses.first_step:,}{batch}"
            + (
                "; this is not a gradient overflow. Check that batch, or use bf16: the forward pass may overflow."
                if may_overflow
                else ". Check that batch and the loss, or lower --lr; another precision does not help."
            )
        )
    if job_result.scale is not None:
        lines += _about_scale(job_result, job_result.scale)
    if job_result.diagnosis is not None:
        lines += _about_layers(job_result, job_result.diagnosis, precision)
    retries = job_result.allocation_retries or 0
    if retries >= max(_RETRIES_PER_STEP * job_result.steps, _FEWEST_RETRIES):
        lines.append(
            f"The allocator emptied its cache and retried {retries:,} times in {job_result.steps:,} steps, and each "
            "retry waits for the device. A slightly smaller batch is faster: find it with max-batch --headroom 5%."
        )
    if job_result.waits_for_data:
        fix = "Set --num-workers to load data in the background."
        if num_workers:
            fix = f"Use more than {num_workers} --num-workers, or data that loads faster."
        lines.append(
            f"The training waited for data {job_result.waited_fraction:.0%} of its time "
            f"({job_result.waited_seconds:,.1f} s), so samples/s measure data loading, not this precision. {fix}"
        )
    return lines


def _about_scale(job_result: JobResult, scale: ScaleReport) -> list[str]:
    if scale.final < 1:
        last_above = max((index for index, (_, size) in enumerate(scale.history) if size >= 1), default=-1)
        below_one = scale.history[last_above + 1][0]
        what = "the loss overflows float16" if job_result.non_finite_losses else "gradients overflow even unscaled"
        return [f"The scale fell below 1 at step {below_one:,} and never recovered: {what}. Use bf16."]
    if job_result.non_finite_losses is not None:
        return []  # it is unknown which decreases were gradient overflows
    lines = []
    changes = list(zip(scale.history, scale.history[1:], strict=False))
    first_growth = next((step for (_, before), (step, after) in changes if after > before), math.inf)
    falls = [(step, after) for (_, before), (step, after) in changes if after < before and step < first_growth]
    if falls:
        step, level = falls[-1]
        what = (
            "This is normal: the scaler starts high."
            if step <= max(_SETTLED * job_result.steps, 50)
            else "Gradients still grow this late: watch the scale, or use bf16."
        )
        lines.append(
            f"{len(falls)} of the first {step:,} steps overflowed and were skipped until the scale had fallen from "
            f"{scale.initial:,g} to {level:,g}. {what}"
        )
    later = job_result.skipped_steps - len(falls)
    if later - scale.growths > max(_OFTEN * job_result.steps, 2):
        lines.append(
            f"{later:,} later steps overflowed and were skipped, although the scale grew only "
            f"{counted(scale.growths, 'time')}: gradients are spiky. Use bf16 or lower --lr."
        )
    return lines


def _about_layers(job_result: JobResult, diagnosis: Diagnosis, precision: str) -> list[str]:
    lines, kind = [], BY_NAME[precision]
    if (first := diagnosis.first_non_finite) is not None:
        what = "an output" if first.in_pass == "forward" else "a gradient"
        lines.append(f"The first non-finite value was {what} of layer {first.layer}, at step {first.step:,}.")
    worst = max(diagnosis.layers, key=lambda layer: layer.underflowing, default=None)
    if worst is not None and worst.underflowing > _UNDERFLOWS:
        final = f" at scale {job_result.scale.final:,g}" if job_result.scale is not None else ""
        why = f"{final} and lose precision. bf16 has the range of float32."
        if not kind.grad_scaler:
            why = " without scaling: amp needs its GradScaler here."
        lines.append(
            f"In layer {worst.layer}, {worst.underflowing:.0%} of the gradient values are below float16's smallest "
            f"normal number{why}"
        )
    size, name = max(((layer.largest_output or 0.0, layer.layer) for layer in diagnosis.layers), default=(0.0, ""))
    if kind.computes != "float16" and _LARGEST_FLOAT16 < size < math.inf:
        lines.append(
            f"Layer {name} outputs values up to {size:,.3g}, above float16's maximum of 65,504: amp would overflow in "
            "it."
        )
    if job_result.train_seconds:
        lines.append(
            f"Gradient statistics every {diagnosis.every} steps ({diagnosis.steps} in total) took "
            f"{diagnosis.seconds:.3g} s, {diagnosis.seconds / job_result.train_seconds:.1%} of the training."
        )
    return lines
