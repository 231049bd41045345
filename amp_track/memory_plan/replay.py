"""Replay a traced training step in the simulated allocator: its peak memory, and its memory over time."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from amp_track.memory_plan.allocator import Block, CachingAllocator, SimulatedOutOfMemory
from amp_track.records.memory_state import MemoryState
from amp_track.records.plan import (
    BLAS_LT_WORKSPACE,
    BLAS_WORKSPACE,
    CUDNN_ATTENTION,
    FLASH_ATTENTION,
    LARGEST_SHOWN,
    WINOGRAD,
    Category,
    Kernels,
    Limits,
    PeakMemory,
    StepTrace,
    Storage,
    grouped,
)

_REPLACEABLE = (Category.CONVOLUTIONS,)
"""Without room for them, PyTorch tries the next engine (`try_configs` in aten/src/ATen/native/cudnn/Conv_v8.cpp)."""
STEPS = 5
"""Steps to replay: in validation against published measurements, two steps predicted too large a batch more often."""


@dataclass(frozen=True)
class TraceFamily:
    """The traces of one step at every batch size, interpolated between two of them.

    The operations of a step almost never depend on the batch size, and storage sizes are almost always linear in it.
    Compare an interpolated trace with a real one before you rely on it.
    """

    first: StepTrace
    second: StepTrace

    @classmethod
    def through(cls, first: StepTrace, second: StepTrace) -> TraceFamily | None:
        """Return the family through two traces, or None if they differ in more than the sizes of their storages."""
        if first.batch_size == second.batch_size or first.events != second.events:
            return None
        return cls(first, second)

    def sizes_at(self, batch_size: int) -> list[int]:
        """Return the size of each storage in bytes at that batch size."""
        start, distance = self.first.batch_size, self.second.batch_size - self.first.batch_size
        sizes = [
            max(one.size_bytes + (other.size_bytes - one.size_bytes) * (batch_size - start) // distance, 0)
            for one, other in zip(self.first.storages, self.second.storages, strict=True)
        ]
        for index, first, second in self._limited:
            limits = first if first == second else first.between(second, (batch_size - start) / distance)
            sizes[index] = limits.within(sizes[index])
        return sizes

    @functools.cached_property
    def _limited(self) -> list[tuple[int, Limits, Limits]]:
        """The storages with limits, by index, with those of both traces."""
        pairs = enumerate(zip(self.first.storages, self.second.storages, strict=True))
        return [(index, one.limits, other.limits) for index, (one, other) in pairs if one.limits and other.limits]

    def holds(self, trace: StepTrace) -> bool:
        """Return True if a third trace is exactly the family's trace at its batch size."""
        return trace.events == self.first.events and trace.sizes == self.sizes_at(trace.batch_size)

    def at(self, batch_size: int) -> StepTrace:
        """Return the trace at that batch size."""
        storages = (
            dataclasses.replace(storage, size_bytes=size, limits=None)
            for storage, size in zip(self.first.storages, self.sizes_at(batch_size), strict=True)
        )
        return dataclasses.replace(self.first, batch_size=batch_size, storages=tuple(storages))


def on_device(trace: StepTrace, kernels: Kernels, *, convolutions: bool = False) -> StepTrace:
    """Return the trace for a device with these kernels: with the sizes of their workspaces and buffers.

    `convolutions` keeps the workspaces of cuDNN's Winograd engine, which are left out otherwise.
    """
    sizes = {
        BLAS_WORKSPACE: kernels.blas_workspace_bytes,
        BLAS_LT_WORKSPACE: kernels.blas_lt_workspace_bytes,
        **({} if convolutions else {WINOGRAD: 0}),
        FLASH_ATTENTION if kernels.uses_cudnn_attention else CUDNN_ATTENTION: 0,
    }

    def sized(storage: Storage) -> Storage:
        if storage.operation in sizes:
            return dataclasses.replace(storage, size_bytes=sizes[storage.operation])
        if (limits := storage.limits) is not None:
            limits = dataclasses.replace(limits, thread_blocks=kernels.thread_blocks)
            return dataclasses.replace(storage, limits=limits)
        return storage

    return dataclasses.replace(trace, storages=tuple(map(sized, trace.storages)))


def predict_peak(
    trace: StepTrace, *, capacity_bytes: int | None = None, kind: type[CachingAllocator] = CachingAllocator
) -> PeakMemory:
    """Return the peak memory of a traced step, which must fit the capacity."""
    allocator, trace = kind(capacity_bytes), trace.sized()
    end, failed = _peak_and_failure(trace, allocator)
    assert failed is None, "the step fits"
    living = _living(trace, end)
    by_category: Counter[Category] = Counter()
    by_layer: Counter[str] = Counter()
    for storage in living:
        by_category[storage.category] += storage.size_bytes
        by_layer[storage.layer or f"({storage.category})"] += storage.size_bytes
    return PeakMemory(
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
        by_category=tuple(by_category.most_common()),
        by_layer=tuple(by_layer.most_common()),
        largest=grouped(living)[:LARGEST_SHOWN],
        retries=allocator.retries,
    )


def state_at_failure(
    trace: StepTrace, capacity_bytes: int | None, *, kind: type[CachingAllocator] = CachingAllocator
) -> MemoryState:
    """Return the memory when an allocation of the step fails, or at its peak if all fit the capacity."""
    allocator, trace = kind(capacity_bytes), trace.sized()
    end, failed = _peak_and_failure(trace, allocator)
    if failed is None:
        return _state(
            trace, end, None,
            allocated_bytes=allocator.peak_allocated_bytes, reserved_bytes=allocator.peak_reserved_bytes,
            capacity_bytes=capacity_bytes,
        )  # fmt: skip
    return _state(
        trace,
        failed,
        trace.storages[trace.events[failed]],
        allocated_bytes=allocator.allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
        largest_free_bytes=max((block.size_bytes for block in allocator.free_blocks()), default=0),
        capacity_bytes=capacity_bytes,
    )


def _peak_and_failure(trace: StepTrace, allocator: CachingAllocator) -> tuple[int, int | None]:
    """Replay a trace; return the number of events up to the peak, and the index of the event that does not fit."""
    position, end, most = -1, 0, 0
    try:
        for position, _ in replay_of(trace, trace.sizes, allocator):
            if allocator.allocated_bytes > most:
                most, end = allocator.allocated_bytes, position + 1
    except SimulatedOutOfMemory:
        return end, position + 1 if position + 1 < len(trace.events) else trace.repeated_from or 0
    return end, None


def _state(trace: StepTrace, end: int, failed: Storage | None, **sizes: Any) -> MemoryState:
    """Return the memory before the event with that index, whose allocation has failed, if any."""
    return MemoryState(
        holdings=grouped(_living(trace, end)),
        failed=grouped([failed])[0] if failed is not None else None,
        phase=[phase.name for phase in trace.phases if phase.first_event <= end][-1],
        batch_size=trace.batch_size,
        precision=trace.precision,
        **sizes,
    )


def fits(
    trace: StepTrace, sizes: Sequence[int], capacity_bytes: int, *, kind: type[CachingAllocator] = CachingAllocator
) -> bool:
    """Return True if a step with a trace's events and these storage sizes fits within the capacity."""
    try:
        replayed(trace, sizes, kind(capacity_bytes))
    except SimulatedOutOfMemory:
        return False
    return True


def replayed(trace: StepTrace, sizes: Sequence[int], allocator: CachingAllocator) -> CachingAllocator:
    """Return the allocator after all steps. Raises SimulatedOutOfMemory."""
    for _ in replay_of(trace, sizes, allocator):
        pass
    return allocator


def most_alive_bytes(trace: StepTrace, sizes: Sequence[int], *, rounding_bytes: int = 1) -> int:
    """Return the peak of live bytes that a step cannot do without: without an allocator, each storage rounded up."""
    needed = (
        0 if storage.category in _REPLACEABLE else size for storage, size in zip(trace.storages, sizes, strict=True)
    )
    sizes = [-(-size // rounding_bytes) * rounding_bytes for size in needed]
    alive = most = 0
    for index in trace.events:
        alive += sizes[index] if index >= 0 else -sizes[~index]
        most = max(most, alive)
    return most


def state_at_request(trace: StepTrace, size_bytes: int) -> MemoryState | None:
    """Return the memory when an allocation of exactly that size failed, without an allocator; None if there is none.

    Of several, it is the one with the most live bytes. The capacity is the largest at which it fails, or what earlier
    allocations have used, if that is more.
    """
    alive = most = most_with_it = event = capacity_bytes = 0
    trace = trace.sized()
    for position, index in enumerate(trace.events):
        size = trace.storages[index if index >= 0 else ~index].size_bytes
        alive += size if index >= 0 else -size
        if index >= 0 and size == size_bytes and alive > most_with_it:
            most_with_it, event, capacity_bytes = alive, position, max(most, alive - 1)
        most = max(most, alive)
    if not most_with_it:
        return None
    held = most_with_it - size_bytes
    failed = trace.storages[trace.events[event]]
    return _state(trace, event, failed, allocated_bytes=held, reserved_bytes=held, capacity_bytes=capacity_bytes)


def replay_of(
    trace: StepTrace, sizes: Sequence[int], allocator: CachingAllocator
) -> Iterator[tuple[int, Block | None]]:
    """Replay a trace in an allocator, and yield the position of each event with the block that it allocates or frees.

    A storage of size 0 has no block. The last step is repeated, because fragmentation builds up over the first steps:
    until the allocator's free blocks are those after the step before, or STEPS were made. Raises SimulatedOutOfMemory.
    """
    blocks: dict[int, Block] = {}

    def run(start: int) -> Iterator[tuple[int, Block | None]]:
        for position in range(start, len(trace.events)):
            index = trace.events[position]
            block = None
            if index < 0:
                if (block := blocks.pop(~index, None)) is not None:
                    allocator.free(block)
            elif sizes[index]:
                try:
                    block = blocks[index] = allocator.allocate(sizes[index])
                except SimulatedOutOfMemory:
                    if trace.storages[index].category not in _REPLACEABLE:
                        raise
            yield position, block

    yield from run(0)
    if (start := trace.repeated_from) is None:
        return
    before: list[tuple[int, int]] = []
    for _ in range(STEPS - 2):
        free = [(block.address, block.size_bytes) for block in allocator.free_blocks()]
        if free == before:
            return
        before = free
        yield from run(start)


def _living(trace: StepTrace, end: int) -> list[Storage]:
    """Return the storages that live before the event with that index."""
    before = trace.events[:end]
    dead = {~index for index in before if index < 0}
    return [trace.storages[index] for index in before if index >= 0 and index not in dead]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The memory after each event (birth or death of a storage) of a trace's last step."""

    by_category: dict[Category, list[int]]
    """Bytes of storages, before the allocator rounds them up."""
    allocated_bytes: list[int]
    """In the allocator's rounded blocks."""
    reserved_bytes: list[int]
    phases: list[tuple[str, int]]
    """Each phase of the step, with the index of its first event here."""

    @property
    def peak(self) -> int:
        """The index of the event with the peak of allocated bytes."""
        return max(range(len(self.allocated_bytes)), key=self.allocated_bytes.__getitem__)


def timeline(trace: StepTrace) -> Timeline:
    """Return the timeline of a trace's last step. Earlier storages count as allocated."""
    last_step = trace.phases[-1].step
    phases = [phase for phase in trace.phases if phase.step == last_step]
    start = phases[0].first_event
    alive: Counter[Category] = Counter()
    rows: list[tuple[Counter[Category], int, int]] = []
    allocator, trace = CachingAllocator(), trace.sized()
    for position, _ in replay_of(trace, trace.sizes, allocator):
        if position == start:
            rows.clear()  # the last of the repeated steps counts
        index = trace.events[position]
        storage = trace.storages[index if index >= 0 else ~index]
        alive[storage.category] += storage.size_bytes if index >= 0 else -storage.size_bytes
        if position >= start:
            rows.append((alive.copy(), allocator.allocated_bytes, allocator.reserved_bytes))
    return Timeline(
        by_category={
            category: sizes for category in Category if any(sizes := [row[0].get(category, 0) for row in rows])
        },
        allocated_bytes=[row[1] for row in rows],
        reserved_bytes=[row[2] for row in rows],
        phases=[(phase.name, phase.first_event - start) for phase in phases],
    )
