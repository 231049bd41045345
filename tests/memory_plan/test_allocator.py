"""The simulated caching allocator: torch's rules by example, and what must hold for any program."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.memory_plan.allocator import Block, CachingAllocator, SimulatedOutOfMemory

MIB = 2**20


def allocate(allocator: CachingAllocator, *sizes: int) -> list[Block]:
    return [allocator.allocate(size) for size in sizes]


@pytest.mark.parametrize(
    ("request_bytes", "allocated_bytes", "reserved_bytes"),
    [
        pytest.param(1, 512, 2 * MIB, id="the smallest block"),
        pytest.param(512, 512, 2 * MIB, id="exactly one block"),
        pytest.param(513, 1024, 2 * MIB, id="rounded up"),
        pytest.param(MIB, MIB, 2 * MIB, id="the largest small request"),
        pytest.param(MIB + 1, MIB + 512, 20 * MIB, id="the smallest large request"),
        pytest.param(10 * MIB - 512, 10 * MIB - 512, 20 * MIB, id="the largest that shares a segment"),
        pytest.param(10 * MIB, 10 * MIB, 10 * MIB, id="a segment of its own"),
        pytest.param(12 * MIB + 512, 12 * MIB + 512, 14 * MIB, id="whose size is rounded to 2 MiB"),
        pytest.param(11 * MIB, 12 * MIB, 12 * MIB, id="too little is left to split it off"),
    ],
)
def test_one_request(request_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(request_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated_bytes, reserved_bytes)


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = allocate(allocator, 40 * MIB, 20 * MIB, 30 * MIB)
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(25 * MIB).address == blocks[2].address
    assert allocator.reserved_bytes == 90 * MIB


def test_freed_neighbors_become_one_block_again() -> None:
    allocator = CachingAllocator()
    blocks = allocate(allocator, 4 * MIB, 4 * MIB, 4 * MIB)
    for index in (0, 2, 1):
        allocator.free(blocks[index])
    assert [block.size_bytes for block in allocator.free_blocks()] == [20 * MIB]


def test_the_cache_is_given_back_before_memory_runs_out() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(40 * MIB)
    assert allocator.retries == 1
    assert allocator.reserved_bytes == 40 * MIB


def test_a_segment_with_a_block_in_use_is_not_given_back() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    first, _ = allocate(allocator, 15 * MIB, 15 * MIB)
    allocator.free(first)
    with pytest.raises(SimulatedOutOfMemory):
        allocator.allocate(26 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (16 * MIB, 16 * MIB)


sizes = st.one_of(
    st.integers(1, 4096), st.integers(MIB - 1024, MIB + 1024), st.integers(9 * MIB, 11 * MIB), st.integers(1, 64 * MIB)
)
programs = st.lists(st.one_of(sizes, st.integers(-30, -1)), max_size=60)
"""Sizes to allocate; a number below 0 frees one of the blocks that are alive."""


def run(allocator: CachingAllocator, program: list[int]) -> tuple[list[Block], int]:
    """Return the blocks that are alive at the end, and how many requests failed."""
    alive: list[Block] = []
    failed = 0
    for step in program:
        if step < 0:
            if alive:
                allocator.free(alive.pop(step % len(alive)))
            continue
        try:
            alive.append(allocator.allocate(step))
        except SimulatedOutOfMemory:
            failed += 1
        check(allocator, alive)
    return alive, failed


def check(allocator: CachingAllocator, alive: list[Block]) -> None:
    """Assert what must hold after every request."""
    blocks = sorted([*alive, *allocator.free_blocks()], key=lambda block: block.address)
    for before, after in itertools.pairwise(blocks):
        assert before.address + before.size_bytes <= after.address, "blocks overlap"
    assert allocator.allocated_bytes == sum(block.size_bytes for block in alive)
    assert allocator.reserved_bytes == sum(block.size_bytes for block in blocks), "memory leaks"
    assert allocator.allocated_bytes <= allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes
    assert allocator.reserved_bytes <= allocator.peak_reserved_bytes
    assert all(block.size_bytes % 512 == 0 for block in blocks)
    if allocator.capacity_bytes is not None:
        assert allocator.peak_reserved_bytes <= allocator.capacity_bytes


@given(programs)
def test_any_program(program: list[int]) -> None:
    allocator = CachingAllocator()
    alive, failed = run(allocator, program)
    assert not failed
    for block in alive:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
    assert not list(allocator.free_blocks())


@given(programs, st.integers(2 * MIB, 200 * MIB))
def test_any_program_within_a_capacity(program: list[int], capacity_bytes: int) -> None:
    run(CachingAllocator(capacity_bytes), program)


@given(programs)
def test_what_it_reserves_is_a_capacity_that_suffices(program: list[int]) -> None:
    unlimited = CachingAllocator()
    run(unlimited, program)
    if unlimited.peak_reserved_bytes:
        limited = CachingAllocator(unlimited.peak_reserved_bytes)
        _, failed = run(limited, program)
        assert (failed, limited.retries) == (0, 0)
