"""The memory of one traced step over its course, as a picture shows it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from amp_track.memory_plan.allocator import CachingAllocator
from amp_track.memory_plan.replay import replay_of
from amp_track.records.trace import Category, StepTrace


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What is allocated after each event of a trace's last step: births and deaths of storages, in order."""

    by_category: dict[Category, list[int]]
    """Bytes of storages, which the allocator rounds up."""
    allocated_bytes: list[int]
    """In blocks of the allocator."""
    reserved_bytes: list[int]
    phases: list[tuple[str, int]]
    """Each phase of the step, with the index of its first event here."""

    @property
    def peak(self) -> int:
        """The index of the event after which the most is allocated."""
        return max(range(len(self.allocated_bytes)), key=self.allocated_bytes.__getitem__)


def timeline(trace: StepTrace) -> Timeline:
    """Return the course of a trace's last step, on a device of any capacity. What came before it is allocated."""
    last_step = trace.phases[-1].step
    phases = [phase for phase in trace.phases if phase.step == last_step]
    start = phases[0].first_event
    alive: Counter[Category] = Counter()
    rows: list[tuple[Counter[Category], int, int]] = []
    allocator = CachingAllocator()
    for position, (index, _) in enumerate(replay_of(trace.events, trace.sizes, allocator)):
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
