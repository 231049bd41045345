"""The largest batch that is predicted to fit: exact by the simulator, from few traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from batch_search.traces import MIB, step_of, traced_by
from hypothesis import given
from hypothesis import strategies as st

from amp_track.memory_plan.predict import Prediction, bisect_down, bisect_largest
from amp_track.memory_plan.replay import TraceFamily, on_device, predict_peak
from amp_track.records.plan import BLAS_WORKSPACE, Category, Kernels, PlannedMaxBatch, PlanTarget

MOST = 4096


PER_SAMPLE = [340992, 35840, 261120, 71680, 256000, 242688, 323584, 204800]
"""With 291 MiB, 163 fit and 156 do not: the smaller one leaves its segments in worse pieces."""
Activations = Callable[[int], list[int]]
lines = st.lists(st.integers(1, 300_000), min_size=1, max_size=6)


def on_a_line(per_sample: list[int]) -> Activations:
    return lambda batch: [size * batch for size in per_sample]


def target(capacity_bytes: int) -> PlanTarget:
    return PlanTarget(name="", capacity_bytes=capacity_bytes, kernels=Kernels())


def fits(batch_size: int, activations: Activations, capacity_bytes: int) -> bool:
    return predict_peak(step_of(batch_size, activations(batch_size))).reserved_bytes <= capacity_bytes


def check(found: PlannedMaxBatch, activations: Activations, capacity_bytes: int, most: int = MOST) -> None:
    """Assert that the max batch fits, with the peak that it states, and that one more sample does not."""
    if found.batch_size:
        assert fits(found.batch_size, activations, capacity_bytes)
        assert found.peak is not None
        assert found.peak.reserved_bytes <= capacity_bytes
    if found.bound == "memory":
        assert not fits(found.batch_size + 1, activations, capacity_bytes)
    else:
        assert (found.bound, found.batch_size) == ("max_batch_size", most)


def planned(activations: Activations, capacity_bytes: int, most: int = MOST) -> tuple[PlannedMaxBatch, set[int]]:
    """Return a max batch, after checking it, and the batch sizes that were traced for it."""
    traced: list[int] = []
    found = Prediction(traced_by(activations, traced)).max_batch(target(capacity_bytes), most=most)
    check(found, activations, capacity_bytes, most)
    return found, set(traced)


@given(lines, st.integers(40 * MIB, 2000 * MIB))
def test_on_a_line_it_is_the_max_batch_after_three_traces(per_sample: list[int], capacity_bytes: int) -> None:
    found, traced = planned(on_a_line(per_sample), capacity_bytes)
    assert found.batch_size
    assert len(traced) <= 3


@given(st.integers(1, 3000), st.integers(1, 200_000), st.integers(40 * MIB, 2000 * MIB))
def test_off_the_line_it_is_the_max_batch_after_some_more(square: int, linear: int, capacity_bytes: int) -> None:
    _, traced = planned(lambda batch: [square * batch * batch, linear * batch], capacity_bytes)
    assert len(traced) <= 24


def test_a_step_that_does_something_else_at_some_sizes_is_bisected() -> None:
    assert planned(lambda batch: [MIB * batch] * (1 + batch % 2), 400 * MIB)[0].batch_size


def test_nothing_fits() -> None:
    """One sample is not traced: batch norm rejects it in training."""
    found, traced = planned(on_a_line([50 * MIB]), 40 * MIB)
    assert (found.batch_size, found.most_batch_size, found.bound, found.peak) == (0, None, "memory", None)
    assert found.at_one_bytes is not None
    assert found.at_one_bytes > 40 * MIB
    assert 1 not in traced
    assert planned(on_a_line([50 * MIB]), 80 * MIB)[0].batch_size == 1


@pytest.mark.parametrize("most", [1, 3, 4, 5, 8, 100])
def test_no_larger_batch_is_traced_than_asked_for(most: int) -> None:
    found, traced = planned(on_a_line([MIB]), 10**12, most)
    assert found.bound == "max_batch_size"
    assert max(traced) <= most


def test_a_family_is_exact_between_and_beyond_its_traces() -> None:
    def at(batch: int):
        return step_of(batch, [7 * batch + 3, 1000 * batch])

    family = TraceFamily.through(at(4), at(8))
    assert family is not None
    assert all(family.at(batch) == at(batch) for batch in (1, 5, 8, 1000))
    assert family.holds(at(77))
    assert not family.holds(step_of(77, [77 * 77, 77_000]))


def test_no_family_through_steps_that_differ_or_through_one_step() -> None:
    assert TraceFamily.through(step_of(4, [4]), step_of(8, [8, 8])) is None
    assert TraceFamily.through(step_of(4, [4]), step_of(4, [4])) is None


def test_the_peak_says_what_holds_it() -> None:
    peak = predict_peak(step_of(2, [3 * MIB, 3 * MIB], weights_bytes=MIB))
    assert dict(peak.by_category) == {
        Category.ACTIVATIONS: 6 * MIB, Category.PARAMETERS: MIB, Category.OPTIMIZER_STATE: MIB,
    }  # fmt: skip
    assert peak.allocated_bytes == 8 * MIB
    assert peak.reserved_bytes == 22 * MIB
    assert [(one.layer, one.size_bytes) for one in peak.largest[:2]] == [("0", 3 * MIB), ("1", 3 * MIB)]


def test_workspaces_have_the_size_of_the_device() -> None:
    trace = step_of(2, [MIB])
    workspace = dataclasses.replace(
        trace.storages[0], size_bytes=1, category=Category.WORKSPACES, operation=BLAS_WORKSPACE
    )
    trace = dataclasses.replace(
        trace, storages=(*trace.storages, workspace), events=(len(trace.storages), *trace.events)
    )
    traces = [on_device(trace, Kernels(blas_workspace_bytes=size)) for size in (MIB, 9)]
    sizes = [dict(predict_peak(each).by_category)[Category.WORKSPACES] for each in traces]
    assert sizes == [MIB, 9]


def test_a_way_of_single_samples_which_batch_norm_rejects_is_not_traced() -> None:
    traced: list[int] = []
    prediction = Prediction(traced_by(on_a_line([MIB]), traced))
    prediction.max_batch(target(64 * MIB), most=MOST)
    way = prediction.way_to(7, 5, 64 * MIB)
    assert way is not None and (way.micro_batch, way.grad_accum) == (1, 7)
    assert 1 not in traced


def test_a_way_is_a_batch_that_fits_even_where_smaller_ones_do_not() -> None:
    prediction = Prediction(traced_by(on_a_line(PER_SAMPLE), []))
    way = prediction.way_to(312, 163, 291 * MIB)
    assert way is not None
    assert (way.micro_batch, way.grad_accum) == (104, 3)
    assert way.peak.reserved_bytes <= 291 * MIB
    assert prediction.way_to(7, 6, 0) is None
    assert prediction.way_to(7, 0, 291 * MIB) is None


@given(st.integers(0, 1000), st.integers(0, 2**20), st.integers(1, 2**20))
def test_it_is_the_max_batch_after_few_questions(above: int, max_batch: int, distance: int) -> None:
    asked = []

    def fits(number: int) -> bool:
        assert above < number < above + distance
        asked.append(number)
        return number <= max_batch

    assert bisect_largest(fits, above=above, below=above + distance) == max(min(max_batch, above + distance - 1), above)
    assert len(asked) <= 2 * distance.bit_length()
    assert len(set(asked)) == len(asked)


@given(st.sets(st.integers(1, 99)))
def test_where_what_fits_is_not_monotone_it_is_next_to_one_that_does_not(fitting: set[int]) -> None:
    found = bisect_largest(fitting.__contains__, above=0, below=100)
    assert found in fitting | {0}
    assert found + 1 not in fitting


def test_a_safe_batch_has_no_hole_below_and_leaves_a_margin() -> None:
    found, _ = planned(on_a_line(PER_SAMPLE), 291 * MIB)
    assert (found.batch_size, found.hole) == (163, 156)
    assert found.most_batch_size is not None
    assert found.safe_batch_size < 156 < found.most_batch_size
    for batch in range(round(0.9 * found.safe_batch_size), found.safe_batch_size + 1):
        assert fits(batch, on_a_line(PER_SAMPLE), int(0.96 * 291 * MIB))


@given(lines, st.integers(60 * MIB, 1000 * MIB))
def test_safe_expected_and_at_most_are_in_order(per_sample: list[int], capacity_bytes: int) -> None:
    activations = on_a_line(per_sample)
    range_bytes = int(0.98 * capacity_bytes), int(1.01 * capacity_bytes)
    found = Prediction(traced_by(activations, [])).max_batch(
        dataclasses.replace(target(capacity_bytes), range_bytes=range_bytes), most=MOST
    )
    assert found.most_batch_size is not None
    assert found.safe_batch_size <= found.batch_size <= found.most_batch_size
    if found.most_batch_size < MOST:  # more than all memory is alive
        more = step_of(found.most_batch_size + 1, activations(found.most_batch_size + 1))
        assert predict_peak(more).allocated_bytes > range_bytes[1]
    if found.safe_batch_size:
        assert fits(found.safe_batch_size, activations, int(0.96 * range_bytes[0]))


@given(st.sets(st.integers(1, 300)), st.integers(0, 40), st.integers(0, 300))
def test_downwards_it_is_the_last_that_fits_before_one_that_does_not(fitting: set[int], above: int, rest: int) -> None:
    start = above + rest
    found = bisect_down(fitting.__contains__, above=above, start=start)
    assert above <= found <= start
    assert found == above or found in fitting
    assert found == start or found + 1 not in fitting


def test_smaller_targets_need_no_more_traces() -> None:
    traced: list[int] = []
    activations = on_a_line([100_000, 70_000])
    prediction = Prediction(traced_by(activations, traced))
    for capacity_bytes in (400 * MIB, 200 * MIB, 100 * MIB):
        check(prediction.max_batch(target(capacity_bytes), most=MOST), activations, capacity_bytes)
    assert len(set(traced)) == 3


def test_a_step_whose_operations_depend_on_the_batch_is_traced_at_few_and_no_large_batches() -> None:
    found, traced = planned(lambda batch: [2 * MIB] * batch, 400 * MIB, 2**24)
    assert found.most_batch_size is None
    assert max(traced) <= 4 * found.batch_size
    assert len(traced) < 40
