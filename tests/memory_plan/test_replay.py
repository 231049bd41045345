"""The course of one step that a picture shows."""

from __future__ import annotations

from batch_search.traces import MIB, step_of
from hypothesis import given
from hypothesis import strategies as st

from amp_track.memory_plan.replay import predict_peak, timeline
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
