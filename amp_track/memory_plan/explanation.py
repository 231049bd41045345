"""Explain a failed allocation: the max batch, and what changes of the training save."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from amp_track.config.job import micro_batch
from amp_track.memory_plan.allocator import CachingAllocator, PlainAllocator
from amp_track.memory_plan.replay import state_at_failure
from amp_track.records.memory_state import MemoryState, WayOut
from amp_track.records.plan import Category, PrecisionPlan
from amp_track.results.explain import ExplainResult

_BLOCK = re.compile(r"(?:[^.(]+\.)*?\d+(?=\.|$)|[^.(]+")
"""The block of a layer: its name up to the first index, such as `layer1.0` of `layer1.0.conv1`; `(loss)` has none."""
_EIGHT_BIT = 0.75 - 4 / 256 / 4
"""What 8-bit blockwise quantization saves of a 32-bit state: one scale of 4 bytes per block of 256 values (Dettmers et
al., 2110.02861)."""


_WORTH_IT = 0.01
"""A change that saves a smaller part of the memory is left out."""


def explained(
    state: MemoryState,
    *,
    source: str,
    plans: Sequence[PrecisionPlan] = (),
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
        is_cuda: whether the memory is that of PyTorch's caching allocator.
        is_predicted: whether the state is predicted, too.
        happened: whether an allocation has really failed, which overrules the plans.
    """
    peak, lower = None, plans[1:]
    max_batch = state.max_batch()
    is_upper_bound = state.failed is not None and state.phase not in ("backward", "optimizer")
    if plans:
        kind = CachingAllocator if is_cuda else PlainAllocator
        peak = dataclasses.replace(
            state_at_failure(plans[0].trace, None, kind=kind), capacity_bytes=state.capacity_bytes
        )  # fmt: skip
        max_batch, is_upper_bound = plans[0].max_batches[0].batch_size, False
    if happened and max_batch is not None and state.batch_size is not None and max_batch >= state.batch_size:
        max_batch, is_upper_bound = state.batch_size - 1, True
    return ExplainResult(
        source=source,
        state=state,
        peak=peak,
        ways_out=ways_out(state, peak=peak or state, max_batch=max_batch, lower=lower, is_cuda=is_cuda),
        max_batch=max_batch,
        is_upper_bound=is_upper_bound,
        is_predicted=is_predicted,
        happened=happened,
        is_cuda=is_cuda,
    )


def ways_out(
    state: MemoryState,
    *,
    peak: MemoryState,
    max_batch: int | None,
    lower: Sequence[PrecisionPlan] = (),
    is_cuda: bool = True,
) -> tuple[WayOut, ...]:
    """Return the changes that save memory, cheapest first.

    Args:
        state: the memory at the failure.
        peak: the memory at the peak of a step with the same batch, or as close to it as is known.
        max_batch: the max batch without a change; None if unknown.
        lower: the memory plans at lower precisions for the same batch and capacity, if there are any.
        is_cuda: whether the memory is that of PyTorch's caching allocator.
    """
    found = [
        *(_defragmented(state) if is_cuda else ()),
        *_lower_precision(peak, lower),
        *_accumulated(peak, max_batch),
        *_single_tensor(state),
        *_small_states(peak),
        *_checkpointed(peak),
    ]
    return tuple(way for way in found if way.saved_bytes > _WORTH_IT * peak.allocated_bytes)


def _defragmented(state: MemoryState) -> Iterator[WayOut]:
    if state.failed is not None and not state.expandable_segments and state.unused_bytes >= state.failed.size_bytes:
        yield WayOut(
            change="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            cost="none: the unused memory would be enough in one piece",
            saved_bytes=state.unused_bytes,
        )


def _lower_precision(state: MemoryState, lower: Sequence[PrecisionPlan]) -> Iterator[WayOut]:
    for plan in lower:
        (max_batch,) = plan.max_batches
        yield WayOut(
            change=f"{plan.precision} instead of {state.precision}",
            cost="faster where the device computes in 16 bits; check the metric",
            saved_bytes=state.reserved_bytes - plan.peak.reserved_bytes,
            max_batch=max_batch.batch_size,
        )
    if not lower and state.precision in ("", "fp32", "tf32"):
        # autocast keeps activations in 16 bits, and a 16-bit copy of each weight
        copies = state.bytes_of(Category.PARAMETERS) / 2
        activations = state.bytes_of(Category.ACTIVATIONS) / 2
        yield WayOut(
            change="autocast to bfloat16" + ("" if state.precision else ", unless it is used already"),
            cost="faster where the device computes in 16 bits; check the metric",
            saved_bytes=int(activations - copies),
            max_batch=state.max_batch(saved_bytes=-copies, saved_sample_bytes=activations / (state.batch_size or 1)),
        )


def _accumulated(state: MemoryState, max_batch: int | None) -> Iterator[WayOut]:
    if state.batch_size is None or not max_batch or max_batch >= state.batch_size:
        return
    size, grad_accum = micro_batch(state.batch_size, max_batch) or (1, state.batch_size)
    yield WayOut(
        change=f"batch {size:,}, {grad_accum:,} batches per optimizer step",
        cost="slower if the device is not busy at the smaller batch; batch norm sees fewer samples",
        saved_bytes=int(state.sample_bytes * (state.batch_size - size)),
        max_batch=max_batch,
    )


def _single_tensor(state: MemoryState) -> Iterator[WayOut]:
    known = [*state.holdings, *([state.failed] if state.failed is not None else [])]
    temporaries = sum(
        one.size_bytes for one in known if one.category is Category.TEMPORARIES and one.layer == "(optimizer)"
    )
    if state.phase == "optimizer":
        yield WayOut(
            change="fused=True or foreach=False in the optimizer",
            cost="foreach=False is slower with many small parameters",
            saved_bytes=temporaries,
            max_batch=None,
        )


def _small_states(state: MemoryState) -> Iterator[WayOut]:
    states = state.bytes_of(Category.OPTIMIZER_STATE)
    for change, cost, fraction in (
        ("8-bit optimizer states, such as bitsandbytes' AdamW8bit", "another package; check the metric", _EIGHT_BIT),
        ("bfloat16 optimizer states", "the optimizer must support them; check the metric", 0.5),
    ):
        saved_bytes = int(states * fraction)
        yield WayOut(
            change=change,
            cost=cost,
            saved_bytes=saved_bytes,
            max_batch=state.max_batch(saved_bytes=saved_bytes),
        )


def _checkpointed(state: MemoryState) -> Iterator[WayOut]:
    """Estimate checkpoints of all blocks: each keeps its input, and one at a time is computed again.

    The largest allocation of a block counts as the input of the next: an upper bound of what is kept.
    """
    sizes: dict[str, list[int]] = defaultdict(list)
    for holding in state.holdings:
        if holding.category is Category.ACTIVATIONS and (match := _BLOCK.match(holding.layer)):
            sizes[match.group()] += [holding.size_bytes // holding.count] * holding.count
    freed = [saved for of_block in sizes.values() if (saved := sum(of_block) - max(of_block))]
    if len(freed) < 2:
        return
    saved_bytes = sum(freed) - max(freed)
    yield WayOut(
        change=f"activation checkpointing of {len(freed)} blocks (torch.utils.checkpoint)",
        cost="about a third more computation: the forward pass runs twice",
        saved_bytes=saved_bytes,
        max_batch=state.max_batch(saved_sample_bytes=saved_bytes / (state.batch_size or 1)),
    )
