"""Merging of what processes count; that they train alike is in test_data_parallel.py, with real processes."""

import dataclasses
import datetime
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch.distributed import HashStore

from amp_track.config.job import Rank
from amp_track.training.amp import random_state
from amp_track.training.amp.step import StepTotals
from amp_track.training.process_group import JSON, RankGroup, merge_totals

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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"skipped_steps": ()}, r"rank 1 skipped steps \(\), rank 0 skipped \(2,\): some gradients were"),
        ({"step_losses": (1.0,), "step_samples": (3,)}, "rank 1 and rank 0 made different steps"),
    ],
)
def test_steps_that_one_alone_made_or_skipped_end_the_job(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        merge_totals([OF_ONE, dataclasses.replace(OF_ONE, **changes)])


def test_a_loss_that_is_not_finite_in_any_process_is_counted() -> None:
    other = dataclasses.replace(OF_ONE, non_finite_losses=((1, 1), (2, 1)))
    assert merge_totals([OF_ONE, other]).non_finite_losses == ((1, 1), (2, 1))


class Exploit:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def test_ranks_gather_values_and_unpickle_nothing(tmp_path: Path) -> None:
    """Other users of the machine can connect to gloo's sockets."""
    file = tmp_path / "ran"
    store = HashStore()
    totals = dataclasses.replace(OF_ONE, step_losses=(math.nan, 0.5), non_finite_losses=((1, 1),))
    generators = {"torch": torch.get_rng_state(), "device": None, "python": (3, [1, 2], None)}

    def join(index: int) -> distributed.ProcessGroup:
        return distributed.ProcessGroupGloo(store, index, 2, datetime.timedelta(seconds=20))

    def rank_one() -> None:
        group = RankGroup(Rank(index=1, count=2), groups[1])
        group.sum([3, math.inf])
        group.agree(False)
        group.merge(totals)
        group.gather(random_state.to_json(generators), JSON)
        send_bytes(groups[1], pickle.dumps(Exploit(file)))

    def rank_zero() -> None:
        group = RankGroup(Rank(index=0, count=2), groups[0])
        assert group.sum([0.1, 1.0]) == [3.1, math.inf]
        assert group.agree(True)
        merged = group.merge(totals)
        assert math.isnan(merged.step_losses[0]), "JSON has no NaN of its own"
        assert merged.step_losses[1:] == (0.5,)
        known = [random_state.from_json(each) for each in group.gather(random_state.to_json(generators), JSON)]
        assert all(torch.equal(each["torch"], generators["torch"]) for each in known)
        with pytest.raises(ValueError, match="Invalid JSON"):
            group.agree(True)

    with ThreadPoolExecutor() as pool:
        groups = list(pool.map(join, (0, 1)))
        for each in [pool.submit(rank_zero), pool.submit(rank_one)]:
            each.result()
    assert not file.exists()


def send_bytes(group: distributed.ProcessGroup, data: bytes) -> None:
    """Take part in one gathering with other bytes than a value's."""
    for tensor in (torch.tensor([len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8)):
        group.allgather([[torch.empty_like(tensor), torch.empty_like(tensor)]], [tensor]).wait()
