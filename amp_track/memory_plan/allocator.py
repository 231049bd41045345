"""Simulate PyTorch's CUDA caching allocator: the memory that it reserves for a program's allocations.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with default settings, on one stream. Requests are rounded up
to 512 bytes. Those of up to 1 MiB are cut from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, and
larger ones get a separate segment, rounded up to 2 MiB. A freed block joins its free neighbors and stays reserved. The
smallest sufficient free block serves the next request. If the device has no memory for another segment, completely free
segments are released, and the request is retried.

Pure Python: no torch, no device. `expandable_segments` and other settings of the environment are not simulated.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

SETTINGS_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that change these rules."""

# The constants of CUDACachingAllocator.cpp.
ROUNDING_BYTES = 512  # kMinBlockSize: every block is a multiple of it
SMALL_REQUEST_BYTES = 2**20  # kSmallSize: the largest request that comes from the pool of small blocks
SMALL_SEGMENT_BYTES = 2 * 2**20  # kSmallBuffer: the segments of that pool
LARGE_SEGMENT_BYTES = 20 * 2**20  # kLargeBuffer: the segments that requests below OWN_SEGMENT_BYTES are cut out of
OWN_SEGMENT_BYTES = 10 * 2**20  # kMinLargeAlloc: a request of at least this size gets a separate segment
SEGMENT_ROUNDING_BYTES = 2 * 2**20  # kRoundLarge: the size of such a segment is a multiple of it


class SimulatedOutOfMemory(Exception):
    """Raised if a request does not fit the capacity."""


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment, free or allocated, with its neighbors in that segment."""

    address: int
    size_bytes: int
    is_small: bool
    is_free: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)

    @property
    def is_whole_segment(self) -> bool:
        return self.before is None and self.after is None


_Free = tuple[int, int, Block]
"""A free block in the sort order of its pool: its size, its address and itself. A plain tuple is compared fastest."""


class CachingAllocator:
    """The caching allocator of one device, with a limit for all segments together, or None."""

    rounding_bytes = ROUNDING_BYTES
    """Every block is a multiple of it."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        """In rounded blocks."""
        self.reserved_bytes = self.peak_reserved_bytes = 0
        """In segments."""
        self.retries = 0
        """How often the cache was released to retry a request."""
        self.segments: dict[int, int] = {}
        """The size in bytes of each reserved segment, by address."""
        self._free: dict[bool, list[_Free]] = {True: [], False: []}
        self._next_address = 0

    def allocate(self, size_bytes: int) -> Block:
        """Return a block of at least that size. Raises SimulatedOutOfMemory if it does not fit."""
        rounded = -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES
        is_small = rounded <= SMALL_REQUEST_BYTES
        block = self._take_free(rounded, is_small) or self._new_segment(rounded, is_small)
        self._split(block, rounded)
        block.is_free = False
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Free a block, and join it with its free neighbors."""
        assert not block.is_free, "a block is freed once"
        self.allocated_bytes -= block.size_bytes
        block.is_free = True
        if block.before is not None and block.before.is_free:
            block = self._join(block.before, block)
        if block.after is not None and block.after.is_free:
            block = self._join(block, block.after)
        self._add_free(block)

    def empty_cache(self) -> None:
        """Release every segment that is completely free."""
        for pool in self._free.values():
            for _, address, block in pool:
                if block.is_whole_segment:
                    self.reserved_bytes -= self.segments.pop(address)
            pool[:] = [free for free in pool if not free[2].is_whole_segment]

    def free_blocks(self) -> Iterator[Block]:
        """Yield every block that is reserved but not allocated."""
        for pool in self._free.values():
            yield from (block for _, _, block in pool)

    def _take_free(self, rounded: int, is_small: bool) -> Block | None:
        pool = self._free[is_small]
        index = bisect.bisect_left(pool, (rounded,))
        return pool.pop(index)[2] if index < len(pool) else None

    def _new_segment(self, rounded: int, is_small: bool) -> Block:
        if is_small:
            size_bytes = SMALL_SEGMENT_BYTES
        elif rounded < OWN_SEGMENT_BYTES:
            size_bytes = LARGE_SEGMENT_BYTES
        else:
            size_bytes = -(-rounded // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
        if not self._has_room(size_bytes):
            self.retries += 1
            self.empty_cache()
            if not self._has_room(size_bytes):
                raise SimulatedOutOfMemory
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        block = Block(self._next_address, size_bytes, is_small)
        self.segments[block.address] = size_bytes
        self._next_address += size_bytes
        return block

    def _has_room(self, size_bytes: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + size_bytes <= self.capacity_bytes

    def _split(self, block: Block, rounded: int) -> None:
        """Split the unneeded rest off a block, if it is large enough to keep."""
        rest_bytes = block.size_bytes - rounded
        if rest_bytes < ROUNDING_BYTES or (not block.is_small and rest_bytes <= SMALL_REQUEST_BYTES):
            return
        rest = Block(block.address + rounded, rest_bytes, block.is_small, is_free=True, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size_bytes = rounded
        self._add_free(rest)

    def _join(self, first: Block, second: Block) -> Block:
        """Join two free neighbors into one block, and remove them from the pool."""
        for block in (first, second):
            pool = self._free[block.is_small]
            index = bisect.bisect_left(pool, (block.size_bytes, block.address))
            if index < len(pool) and pool[index][2] is block:
                del pool[index]
        first.size_bytes += second.size_bytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _add_free(self, block: Block) -> None:
        bisect.insort(self._free[block.is_small], (block.size_bytes, block.address, block))


class PlainAllocator(CachingAllocator):
    """An allocator without a cache: it reserves what is allocated, to the byte, as a CPU's nearly does."""

    rounding_bytes = 1

    def allocate(self, size_bytes: int) -> Block:
        """Return a block of that size. Raises SimulatedOutOfMemory if it does not fit."""
        if not self._has_room(size_bytes):
            raise SimulatedOutOfMemory
        self._next_address += size_bytes
        self._hold(size_bytes)
        return Block(self._next_address - size_bytes, size_bytes, is_small=False)

    def free(self, block: Block) -> None:
        """Free a block."""
        self._hold(-block.size_bytes)

    def _hold(self, size_bytes: int) -> None:
        self.allocated_bytes += size_bytes
        self.reserved_bytes = self.allocated_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_reserved_bytes = self.peak_allocated_bytes


def allocator_kind(*, on_cuda: bool) -> type[CachingAllocator]:
    """Return the class that simulates the allocator of CUDA, or of a CPU."""
    return CachingAllocator if on_cuda else PlainAllocator
