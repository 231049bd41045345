"""Simulate the bookkeeping of PyTorch's CUDA caching allocator: what it reserves for what a program allocates.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with its default settings, on one stream: requests are
rounded up to 512 bytes; those of up to 1 MiB are cut out of segments of 2 MiB, those below 10 MiB out of segments of
20 MiB, and larger ones get a segment of their own, rounded up to 2 MiB. A freed block joins its free neighbors and
stays reserved. The smallest free block that is large enough serves the next request. When the device has no room for
another segment, those that are wholly free are given back, and the request is tried again.

Pure Python: no torch, no device. `expandable_segments` and other settings of PYTORCH_CUDA_ALLOC_CONF are not simulated.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

ROUNDING_BYTES = 512
"""`kMinBlockSize`: every block is a multiple of it."""
SMALL_REQUEST_BYTES = 2**20
"""`kSmallSize`: the largest request that comes from the pool of small blocks."""
SMALL_SEGMENT_BYTES = 2 * 2**20
"""`kSmallBuffer`: the segments of that pool."""
LARGE_SEGMENT_BYTES = 20 * 2**20
"""`kLargeBuffer`: the segments that requests below `OWN_SEGMENT_BYTES` are cut out of."""
OWN_SEGMENT_BYTES = 10 * 2**20
"""`kMinLargeAlloc`: a request of at least this size gets a segment of its own."""
SEGMENT_ROUNDING_BYTES = 2 * 2**20
"""`kRoundLarge`: what the size of such a segment is a multiple of."""


class SimulatedOutOfMemory(Exception):
    """A request that the device has no room for, with what torch's own message would say of it, in bytes."""

    def __init__(self, *, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, capacity_bytes: int) -> None:
        super().__init__(
            f"tried to allocate {requested_bytes} bytes with {allocated_bytes} allocated and {reserved_bytes} "
            f"reserved of {capacity_bytes}"
        )
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of one segment, free or allocated, with its neighbors in that segment."""

    address: int
    size_bytes: int
    is_small: bool
    is_free: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)


class _Free(NamedTuple):
    """A free block as its pool sorts it: the smallest first, and of equal ones the one at the lowest address."""

    size_bytes: int
    address: int
    block: Block


class CachingAllocator:
    """The caching allocator of one device.

    Args:
        capacity_bytes: what its segments may take together; None for as much as they want.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = 0
        """What is allocated now, in rounded blocks."""
        self.reserved_bytes = 0
        """What the segments take now."""
        self.train_peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0
        """How often the cache was given back to make room."""
        self.segments: dict[int, int] = {}
        """The size in bytes of each segment that is reserved now, by its address."""
        self._free: dict[bool, list[_Free]] = {True: [], False: []}
        self._next_address = 0

    def allocate(self, size_bytes: int) -> Block:
        """Return a block of at least that size.

        Raises:
            SimulatedOutOfMemory: there is no room, even after the cache was given back.
        """
        assert size_bytes > 0, "torch asks the allocator for nothing where a tensor is empty"
        rounded = -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES
        is_small = rounded <= SMALL_REQUEST_BYTES
        block = self._take_free(rounded, is_small) or self._new_segment(rounded, is_small)
        self._split(block, rounded)
        block.is_free = False
        self.allocated_bytes += block.size_bytes
        self.train_peak_allocated_bytes = max(self.train_peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and join it with its free neighbors."""
        assert not block.is_free, "a block is freed once"
        self.allocated_bytes -= block.size_bytes
        block.is_free = True
        if block.before is not None and block.before.is_free:
            block = self._join(block.before, block)
        if block.after is not None and block.after.is_free:
            block = self._join(block, block.after)
        self._add_free(block)

    def empty_cache(self) -> None:
        """Give back every segment that is wholly free."""
        for pool in self._free.values():
            for free in pool:
                if _is_whole_segment(free.block):
                    self.reserved_bytes -= self.segments.pop(free.address)
            pool[:] = [free for free in pool if not _is_whole_segment(free.block)]

    def free_blocks(self) -> Iterator[Block]:
        """Yield every block that is reserved and not allocated."""
        for pool in self._free.values():
            yield from (free.block for free in pool)

    def _take_free(self, rounded: int, is_small: bool) -> Block | None:
        pool = self._free[is_small]
        index = bisect.bisect_left(pool, (rounded,))
        return pool.pop(index).block if index < len(pool) else None

    def _new_segment(self, rounded: int, is_small: bool) -> Block:
        size_bytes = _segment_bytes(rounded, is_small)
        if not self._has_room(size_bytes):
            self.retries += 1
            self.empty_cache()
        if not self._has_room(size_bytes):
            assert self.capacity_bytes is not None
            raise SimulatedOutOfMemory(
                requested_bytes=size_bytes,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
                capacity_bytes=self.capacity_bytes,
            )
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        block = Block(self._next_address, size_bytes, is_small)
        self.segments[block.address] = size_bytes
        self._next_address += size_bytes
        return block

    def _has_room(self, size_bytes: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + size_bytes <= self.capacity_bytes

    def _split(self, block: Block, rounded: int) -> None:
        """Cut what a request does not need off its block, if the rest is worth keeping apart."""
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
        """Return one block in place of two free neighbors. Whichever of them is in the pool leaves it."""
        for block in (first, second):
            self._remove_free(block)
        first.size_bytes += second.size_bytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _add_free(self, block: Block) -> None:
        bisect.insort(self._free[block.is_small], _Free(block.size_bytes, block.address, block))

    def _remove_free(self, block: Block) -> None:
        pool = self._free[block.is_small]
        index = bisect.bisect_left(pool, (block.size_bytes, block.address))
        if index < len(pool) and pool[index].block is block:
            del pool[index]


def _segment_bytes(rounded: int, is_small: bool) -> int:
    """Return the size of the segment that a request makes the allocator reserve."""
    if is_small:
        return SMALL_SEGMENT_BYTES
    if rounded < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-rounded // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES


def _is_whole_segment(block: Block) -> bool:
    return block.before is None and block.after is None
