"""Replays of a traced step, and the course of one step that a plot shows."""

from __future__ import annotations

import dataclasses

from batch_search.traces import MIB, step_of
from hypothesis import given
from hypothesis import strategies as st

from amp_track.memory_plan.allocator import CachingAllocator
from amp_track.memory_plan.replay import STEPS, predict_peak, replayed, timeline
from amp_track.records.plan import Category

activations = st.lists(st.integers(1, 30 * MIB), min_size=1, max_size=8)


@given(activations)
def test_its_peak_is_that_of_the_trace(sizes: list[int]) -> None:
    trace = step_of(8, sizes)
    course, peak = timeline(trace), predict_peak(trace)
    assert course.allocated_bytes[course.peak] == peak.allocated_bytes
    assert max(course.reserved_bytes) == peak.reserved_bytes
    assert {name: held[course.peak] for name, held in course.by_category.items() if held[course.peak]} == dict(
        peak.by_category
    )


@given(activations)
def test_tensors_take_no_more_than_their_blocks(sizes: list[int]) -> None:
    course = timeline(step_of(8, sizes))
    for held, allocated, reserved in zip(
        zip(*course.by_category.values(), strict=True), course.allocated_bytes, course.reserved_bytes, strict=True
    ):
        assert sum(held) <= allocated <= reserved


def test_only_the_last_step_is_shown_with_what_was_there_before_it() -> None:
    trace = step_of(8, [3 * MIB, 5 * MIB]).with_next_step()
    course = timeline(trace)
    assert [name for name, _ in course.phases] == ["forward", "backward"]
    assert course.phases[0][1] == 0
    assert len(course.allocated_bytes) == 4, "two activations are born and die"
    assert course.by_category[Category.OPTIMIZER_STATE] == [4 * MIB] * 4


@given(st.lists(st.integers(1, 30 * MIB), min_size=2, max_size=12), st.randoms())
def test_five_steps_are_replayed(sizes: list[int], random) -> None:
    """Fragmentation may grow from step to step; the replay stops early only where it does not."""
    trace = step_of(8, sizes)
    births, deaths = [*range(2, len(sizes) + 2)], [~index for index in range(2, len(sizes) + 2)]
    random.shuffle(births)
    random.shuffle(deaths)
    half = len(births) // 2  # some are freed before the others are allocated
    early = [death for death in deaths if ~death in births[:half]]
    events = (0, *births[:half], *early, *births[half:], 1, *(death for death in deaths if death not in early))
    every_step = twice = dataclasses.replace(trace, events=events).with_next_step()
    for _ in range(STEPS - 2):
        every_step = every_step.with_next_step()
    phases = every_step.phases[:1]  # one step: nothing is repeated
    expected = replayed(dataclasses.replace(every_step, phases=phases), every_step.sizes, CachingAllocator())
    assert twice.repeated_from is not None
    assert predict_peak(twice).reserved_bytes == expected.peak_reserved_bytes


def test_a_step_that_keeps_a_storage_is_not_repeated() -> None:
    trace = step_of(8, [MIB])
    assert trace.repeated_from is None, "the optimizer state stays"
    assert trace.with_next_step().repeated_from == len(trace.events)
