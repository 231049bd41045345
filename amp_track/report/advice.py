"""Advice on one training: what happened and what to do about it, where its outcome proves it."""

from __future__ import annotations

import math

from amp_track.records.diagnosis import Diagnosis, LayerSummary
from amp_track.records.result import JobResult, ScaleReport

_SETTLED = 0.05
"""The part of a training in which a scale that only falls is still finding its level."""
_OFTEN = 0.01
"""The share of steps above which overflows beyond the scaler's own trials of a larger scale are too many."""
_UNDERFLOWS = 0.25
"""The share of a layer's gradient values below float16's smallest normal number above which it is mentioned."""
_LARGEST_FLOAT16 = 65504
_RETRIES_PER_STEP, _FEWEST_RETRIES = 0.1, 5
"""The allocator may retry while it finds its way in the first steps; more than one step in ten slows the training."""


def explain(job_result: JobResult, precision: str, *, num_workers: int | None = None) -> list[str]:
    """Return one line for each thing that happened, the gravest first; none where there is nothing to say."""
    lines = []
    if job_result.non_finite_weights:
        lines.append(
            f"the weights are not finite ({job_result.non_finite_weights} is the first): the training has diverged and "
            "cannot recover; lower --lr, or give --max-grad-norm"
        )
    lines += _about_loss(job_result, precision)
    if job_result.scale is not None:
        lines += _about_scale(job_result, job_result.scale)
    if job_result.diagnosis is not None:
        lines += _about_layers(job_result, job_result.diagnosis, precision)
    return lines + _about_retries(job_result) + _about_input(job_result, num_workers)


def _about_retries(job_result: JobResult) -> list[str]:
    retries = job_result.allocation_retries or 0
    if retries < max(_RETRIES_PER_STEP * job_result.steps, _FEWEST_RETRIES):
        return []
    return [
        f"the allocator gave its cache back and tried again {retries:,} times in {job_result.steps:,} steps, which "
        "waits for the device each time: this batch is so close to the limit that it trains slower; a slightly smaller "
        "one, such as max-batch --headroom 5% finds, is faster"
    ]


def _about_input(job_result: JobResult, num_workers: int | None) -> list[str]:
    if not job_result.waits_for_data:
        return []
    waited, seconds = job_result.waited_fraction, job_result.waited_seconds
    instead = "--num-workers, which load it meanwhile"
    if num_workers:
        instead = f"more --num-workers than {num_workers}, or data that loads faster"
    return [
        f"the training waited for data {waited:.0%} of its time ({seconds:,.1f} s): samples/s are those of loading, "
        f"not of this precision; try {instead}"
    ]


def _about_loss(job_result: JobResult, precision: str) -> list[str]:
    losses = job_result.non_finite_losses
    if losses is None:
        return []
    batch = f", batch {losses.first_batch} of it" if losses.first_batch > 1 else ""
    line = f"the loss was inf or NaN in {losses.batches:,} batches, first at step {losses.first_step:,}{batch}"
    if precision == "amp" and not job_result.non_finite_weights:
        return [f"{line}: no overflow of gradients; either that batch, or float16 in the forward pass: try bf16"]
    return [f"{line}: look at that batch and the loss, or lower --lr; no precision cures it"]


def _about_scale(job_result: JobResult, scale: ScaleReport) -> list[str]:
    lines = []
    below_one = _fell_below_one_for_good(scale)
    if below_one is not None:
        what = (
            "the loss itself" if job_result.non_finite_losses else "gradients overflow unscaled, so the backward pass"
        )
        lines.append(
            f"the scale fell below 1 at step {below_one:,} and never recovered: {what} overflows float16; try bf16"
        )
        return lines
    if job_result.non_finite_losses is not None:
        return lines  # which of the falls were overflows of gradients is not known
    changes = list(zip(scale.history, scale.history[1:], strict=False))
    first_growth = next((step for (_, before), (step, after) in changes if after > before), math.inf)
    falls = [(step, after) for (_, before), (step, after) in changes if after < before and step < first_growth]
    if falls:
        step, level = falls[-1]
        what = (
            "normal, the scaler begins high and finds its level"
            if step <= max(_SETTLED * job_result.steps, 50)
            else "the largest gradients are still finding their level; watch it, or try bf16"
        )
        lines.append(
            f"{len(falls)} of the first {step:,} steps overflowed and were skipped, until the scale was down from "
            f"{scale.initial:,g} to {level:,g}: {what}"
        )
    if falls and falls[0][0] == 1:
        lines.append(
            "the first step was skipped, after which torch's fused SGD with momentum uses memory that it has not "
            "written: TrainStep mends that, a plain loop should leave fused=True out"
        )
    later = job_result.skipped_steps - len(falls)
    if later - scale.growths > max(_OFTEN * job_result.steps, 2):
        lines.append(
            f"{later:,} steps after that overflowed, and made no update, though the scale was tried higher only "
            f"{scale.growths:,} times: gradients are spiky; try bf16 or a lower --lr"
        )
    return lines


def _about_layers(job_result: JobResult, diagnosis: Diagnosis, precision: str) -> list[str]:
    lines = []
    first = diagnosis.first_non_finite
    if first is not None:
        what = "an output" if first.in_pass == "forward" else "a gradient"
        lines.append(f"{what} of layer {first.layer} was the first that was not finite, at step {first.step:,}")
    worst = max(diagnosis.layers, key=lambda layer: layer.underflowing, default=None)
    if worst is not None and worst.underflowing > _UNDERFLOWS:
        lines.append(_about_underflow(job_result, worst, precision))
    largest = max(diagnosis.layers, key=lambda layer: layer.largest_output or 0.0, default=None)
    size = largest.largest_output if largest is not None else None
    if precision != "amp" and size is not None and math.isfinite(size) and size > _LARGEST_FLOAT16:
        assert largest is not None
        lines.append(
            f"layer {largest.layer} puts out up to {size:,.3g}, above float16's largest number, 65,504: amp would "
            "overflow there"
        )
    if job_result.train_seconds:
        lines.append(
            f"diagnosing every {diagnosis.every} steps ({diagnosis.steps} in all) took {diagnosis.seconds:.3g} s, "
            f"{diagnosis.seconds / job_result.train_seconds:.1%} of the training"
        )
    return lines


def _about_underflow(job_result: JobResult, worst: LayerSummary, precision: str) -> str:
    if precision == "amp":
        final = f" at scale {job_result.scale.final:,g}" if job_result.scale is not None else ""
        return (
            f"in layer {worst.layer} {worst.underflowing:.0%} of the gradient values lie below float16's smallest "
            f"normal number{final}, and lose precision; bf16 has float32's range"
        )
    return (
        f"in layer {worst.layer} {worst.underflowing:.0%} of the gradient values lie below float16's smallest normal "
        "number unscaled: amp needs its GradScaler here"
    )


def _fell_below_one_for_good(scale: ScaleReport) -> int | None:
    """Return the step at which the scale fell below 1, if it has stayed there."""
    if scale.final >= 1:
        return None
    last_above = max((index for index, (_, size) in enumerate(scale.history) if size >= 1), default=-1)
    return scale.history[last_above + 1][0]
