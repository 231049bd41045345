"""Merging of what processes count; that they train alike is in test_data_parallel.py, with real processes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.training.amp.step import StepTotals
from amp_track.training.peers import merge_totals

OF_ONE = StepTotals(
    first_step=1,
    step_losses=(1.0, 2.0),
    step_samples=(3, 3),
    score_sum=None,
    non_finite_losses=(),
    skipped_steps=(2,),
    scale_changes=((2, 32768.0),),
    diagnosed=(),
)


@given(
    batches=st.lists(
        st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 8)), min_size=2, max_size=4), min_size=1, max_size=9
    ).filter(lambda steps: len({len(step) for step in steps}) == 1 and all(any(n for _, n in step) for step in steps))
)
def test_losses_are_means_over_all_samples(batches: list[list[tuple[float, int]]]) -> None:
    by_rank = zip(*batches, strict=True)
    totals = [
        dataclasses.replace(OF_ONE, step_losses=tuple(x for x, _ in own), step_samples=tuple(n for _, n in own))
        for own in by_rank
    ]
    merged = merge_totals(totals)
    for loss, samples, step in zip(merged.step_losses, merged.step_samples, batches, strict=True):
        assert samples == sum(n for _, n in step)
        assert loss == pytest.approx(sum(x * n for x, n in step) / samples)


def test_a_step_that_one_alone_skipped_ends_the_job() -> None:
    other = dataclasses.replace(OF_ONE, skipped_steps=(), scale_changes=())
    with pytest.raises(RuntimeError, match=r"process 1 skipped steps \(\), process 0 \(2,\): some gradients are not"):
        merge_totals([OF_ONE, other])


def test_steps_that_one_alone_made_end_the_job() -> None:
    other = dataclasses.replace(OF_ONE, step_losses=(1.0,), step_samples=(3,))
    with pytest.raises(RuntimeError, match="process 1 has made steps that process 0 has not"):
        merge_totals([OF_ONE, other])


def test_a_loss_that_is_not_finite_in_any_process_is_counted() -> None:
    other = dataclasses.replace(OF_ONE, non_finite_losses=((1, 1), (2, 1)))
    assert merge_totals([OF_ONE, other]).non_finite_losses == ((1, 1), (2, 1))
