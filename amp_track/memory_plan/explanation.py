"""Explain a failed allocation: the max batch, and what changes of the training save."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Sequence

from amp_track.config.job import micro_batch
from amp_track.memory_plan.allocator import allocator_kind
from amp_track.memory_plan.replay import state_at_failure
from amp_track.records.memory_state import MemoryState, WayOut
from amp_track.records.plan import OPTIMIZER, Category, Kernels, PlanTarget, PlanTask, PrecisionPlan
from amp_track.results.explain import ExplainResult

_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)|[^.]+")
"""The block of a layer: its name up to the first index, such as `layer1.0` of `layer1.0.conv1`."""
_EIGHT_BIT = 0.75 - 4 / 256 / 4
"""What 8-bit blockwise quantization saves of a 32-bit state: one scale of 4 bytes per block of 256 values (Dettmers et
al., 2110.02861)."""
_COST_OF_16_BIT = "faster where the device computes in 16 bits; check the metric"
_WORTH_IT = 0.01
"""A change that saves a smaller part of the memory is left out."""


def task_within(
    capacity_bytes: int,
    *,
    precisions: tuple[str, ...],
    batch_size: int,
    is_cuda: bool,
    kernels: Kernels,
) -> PlanTask:
    """Return the inputs of the memory plans that `explained` needs."""
    kernels = kernels if is_cuda else Kernels()
    return PlanTask(
        precisions=precisions,
        batch_size=batch_size,
        targets=(PlanTarget(name="", capacity_bytes=capacity_bytes, kernels=kernels),),
        kernels=kernels,
        on_cuda=is_cuda,
    )


def explained(
    state: MemoryState,
    *,
    source: str,
    plans: Sequence[PrecisionPlan] = (),
    no_plan: str = "",
    is_cuda: bool = True,
    is_predicted: bool = False,
    happened: bool = True,
) -> ExplainResult:
    """Return the explanation of a failed allocation.

    Args:
        state: the memory at the failure.
        source: the file of the snapshot, or the target.
        plans: the memory plans at the precision of the training, and then at lower ones, with the capacity as their
            only target. Without them, sizes are assumed to grow linearly with the batch.
        no_plan: why there are no plans.
        is_cuda: whether the memory is that of PyTorch's caching allocator.
        is_predicted: whether the state is predicted, too.
        happened: whether an allocation has really failed, which overrules the plans.
    """
    peak, max_batch, is_upper_bound = None, state.max_batch(), True  # the rest of the step is unknown
    if plans:
        peak = dataclasses.replace(
            state_at_failure(plans[0].trace, None, kind=allocator_kind(on_cuda=is_cuda)),
            capacity_bytes=state.capacity_bytes,
            has_16_bit_weights=state.has_16_bit_weights,
        )
        max_batch, is_upper_bound = plans[0].max_batches[0].batch_size, False
    if happened and max_batch is not None and state.batch_size is not None and max_batch >= state.batch_size:
        max_batch, is_upper_bound = state.batch_size - 1, True
    return ExplainResult(
        source=source,
        state=state,
        peak=peak,
        no_plan=no_plan,
        ways_out=_ways_out(state, peak or state, None if peak and is_upper_bound else max_batch, plans[1:], is_cuda),
        max_batch=max_batch,
        is_upper_bound=is_upper_bound,
        is_predicted=is_predicted,
        happened=happened,
        is_cuda=is_cuda,
    )


def _ways_out(
    state: MemoryState, peak: MemoryState, max_batch: int | None, lower: Sequence[PrecisionPlan], is_cuda: bool
) -> tuple[WayOut, ...]:
    """Return the changes that save memory, cheapest first.

    Args:
        state: the memory at the failure.
        peak: the memory at the peak of a step with the same batch, or as close to it as is known.
        max_batch: the max batch without a change; None if unknown, and then also with one.
        lower: the memory plans at lower precisions for the same batch and capacity, if there are any.
        is_cuda: whether the memory is that of PyTorch's caching allocator.
    """
    linear = peak.max_batch()

    def batch_with(saved_bytes: float, saved_sample_bytes: float = 0) -> int | None:
        """Return the max batch with a change: larger than without by the factor of two linear estimates."""
        changed = peak.max_batch(saved_bytes=saved_bytes, saved_sample_bytes=saved_sample_bytes)
        return int(max_batch * changed / linear) if max_batch is not None and changed is not None and linear else None

    samples = peak.batch_size or 1
    found: list[WayOut] = []

    def add(change: str, cost: str, saved_bytes: float, max_batch: int | None = None) -> None:
        if saved_bytes > _WORTH_IT * peak.allocated_bytes:
            found.append(WayOut(change=change, cost=cost, saved_bytes=int(saved_bytes), max_batch=max_batch))

    is_split = state.failed is not None and state.largest_free_bytes < state.failed.size_bytes <= state.unused_bytes
    if is_cuda and is_split and not state.expandable_segments:
        cost = "none: the unused memory would be enough in one piece"
        add("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", cost, state.unused_bytes)
    for plan in lower:
        saved_bytes = peak.reserved_bytes - plan.peak.reserved_bytes
        of_plan = plan.max_batches[0].batch_size if max_batch is not None else None
        add(f"{plan.precision} instead of {peak.precision}", _COST_OF_16_BIT, saved_bytes, of_plan)
    if not lower and peak.precision in ("", "fp32", "tf32") and not peak.has_16_bit_weights:
        # autocast keeps activations in 16 bits, and a 16-bit copy of each weight
        copies, activations = peak.bytes_of(Category.PARAMETERS) / 2, peak.bytes_of(Category.ACTIVATIONS) / 2
        change = "autocast to bfloat16" + ("" if peak.precision else ", unless it is used already")
        add(change, _COST_OF_16_BIT, activations - copies, batch_with(-copies, activations / samples))
    if max_batch and peak.batch_size is not None and max_batch < peak.batch_size:
        size, grad_accum = micro_batch(peak.batch_size, max_batch) or (1, peak.batch_size)
        change = f"batch {size:,}, {grad_accum:,} batches per optimizer step"
        cost = "slower if the device is not busy at the smaller batch; batch norm sees fewer samples"
        add(change, cost, peak.sample_bytes * (peak.batch_size - size))
    if is_cuda and state.phase == "optimizer":
        known = [*state.holdings, *([state.failed] if state.failed is not None else [])]
        temporaries = [one for one in known if one.category is Category.TEMPORARIES and one.layer == OPTIMIZER]
        cost = "foreach=False is slower with many small parameters"
        add("fused=True or foreach=False in the optimizer", cost, sum(one.size_bytes for one in temporaries))
    states = peak.bytes_of(Category.OPTIMIZER_STATE) if not peak.has_16_bit_weights else 0
    for change, cost, saved_bytes in (
        ("8-bit optimizer states, as in bitsandbytes", "another package; check the metric", int(states * _EIGHT_BIT)),
        ("bfloat16 optimizer states", "the optimizer must support them; check the metric", states // 2),
    ):
        add(change, cost, saved_bytes, batch_with(saved_bytes))
    blocks, saved_bytes = _checkpointed(peak)
    if blocks > 1:
        change = f"activation checkpointing of {blocks} blocks (torch.utils.checkpoint)"
        cost = "about a third more computation: the forward pass runs twice"
        add(change, cost, saved_bytes, batch_with(0, saved_bytes / samples))
    return tuple(found)


def _checkpointed(state: MemoryState) -> tuple[int, int]:
    """Return the number of blocks that checkpoints make smaller, and the bytes that they save together.

    Each block keeps its input, and one at a time is computed again. The largest allocation of a block counts as the
    input of the next: an upper bound of what is kept.
    """
    sizes: dict[str, list[int]] = defaultdict(list)
    for holding in state.holdings:
        is_layer = not set(holding.layer) & set(": (")  # else a line of code, or `(loss)`
        if holding.category is Category.ACTIVATIONS and is_layer and (match := _BLOCK.match(holding.layer)):
            sizes[match.group()] += [holding.size_bytes // holding.count] * holding.count
    freed = [saved for of_block in sizes.values() if (saved := sum(of_block) - max(of_block))]
    return len(freed), sum(freed) - max(freed, default=0)
