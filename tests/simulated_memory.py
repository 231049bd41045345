"""Simulated devices for the search: a formula decides what fits, and the search sees only values of a real meter."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from amp_track.batch_search.search import Hint, Limit, MaxBatch, Probe, explore
from amp_track.records.result import JobStatus

UNLIMITED = Limit(2**24, "dataset")


@dataclass
class Device:
    """A device on which a batch needs `need(batch)` bytes, rounded up to blocks.

    With large blocks it also has a finer meter, like PyTorch's caching allocator (reserved and allocated memory).
    """

    need: Callable[[int], float]
    budget_bytes: int
    block_bytes: int = 1
    failure: JobStatus = JobStatus.OOM
    later_bytes: int | None = None
    """What later steps take beside the first one; None if nobody measures the first step."""

    def reserved(self, batch_size: int) -> int:
        return math.ceil(self.need(batch_size) / self.block_bytes) * self.block_bytes

    def fits(self, batch_size: int) -> bool:
        return batch_size == 0 or self.reserved(batch_size) <= self.budget_bytes

    def probe(self, batch_size: int) -> Probe:
        first = self.reserved(batch_size) - self.later_bytes if self.later_bytes is not None else None
        if self.fits(batch_size):
            has_finer = self.block_bytes > 4096 or first is not None
            fine = int(self.need(batch_size)) if has_finer else None
            return Probe(batch_size, JobStatus.FITS, self.reserved(batch_size), fine, first)
        # The memory that a failed job wanted is known roughly, and sometimes not at all.
        chance = random.Random(batch_size)
        wanted = max(self.need(batch_size) * chance.uniform(0.97, 1.2), self.budget_bytes + 1)
        known = int(wanted) if chance.random() < 0.7 else None
        return Probe(batch_size, self.failure, known, None, first if first and first <= self.budget_bytes else None)

    def search(self, *, limit: Limit = UNLIMITED, hint: Hint | None = None) -> tuple[MaxBatch, list[Probe]]:
        probes: list[Probe] = []
        while not isinstance(step := explore(probes, limit, budget_bytes=self.budget_bytes, hint=hint), MaxBatch):
            assert step.batch_size not in {probe.batch_size for probe in probes}, "no batch is probed twice"
            assert 1 <= step.batch_size <= limit.batch_size
            assert step.reason
            probes.append(self.probe(step.batch_size))
            assert len(probes) < 100, "the search does not end"
        if step.first_failing_batch is not None:
            tried = {probe.batch_size: probe.fits for probe in probes}
            assert step.first_failing_batch == step.batch_size + 1
            assert tried[step.first_failing_batch] is False
            assert step.batch_size == 0 or tried[step.batch_size] is True
        return step, probes
