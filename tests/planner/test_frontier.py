"""Simulated devices: what fits is decided by a formula, the search sees only what a real meter would show."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.planner.frontier import Edge, Hint, Limit, Next, Probe, explore, line_of
from amp_track.records.outcome import Verdict

MEBIBYTE = 2**20
UNLIMITED = Limit(2**24, "dataset")


@dataclass
class Device:
    """Takes `need(batch)` bytes, in whole blocks, of a budget. Where it counts in large blocks it has a finer meter
    too, as PyTorch's caching allocator has (reserved and allocated)."""

    need: Callable[[int], float]
    budget_bytes: int
    block_bytes: int = 1
    failure: Verdict = Verdict.OOM

    def reserved(self, batch_size: int) -> int:
        return math.ceil(self.need(batch_size) / self.block_bytes) * self.block_bytes

    def fits(self, batch_size: int) -> bool:
        return batch_size == 0 or self.reserved(batch_size) <= self.budget_bytes

    def probe(self, batch_size: int) -> Probe:
        if self.fits(batch_size):
            fine = int(self.need(batch_size)) if self.block_bytes > 4096 else None
            return Probe(batch_size, Verdict.FITS, self.reserved(batch_size), fine)
        # What a failed allocation tells is rough, and sometimes it tells nothing.
        chance = random.Random(batch_size)
        wanted = max(self.need(batch_size) * chance.uniform(0.97, 1.2), self.budget_bytes + 1)
        return Probe(batch_size, self.failure, int(wanted) if chance.random() < 0.7 else None)

    def search(self, *, limit: Limit = UNLIMITED, hint: Hint | None = None) -> tuple[Edge, list[Probe]]:
        probes: list[Probe] = []
        while not isinstance(step := explore(probes, limit, budget_bytes=self.budget_bytes, hint=hint), Edge):
            assert step.batch_size not in {probe.batch_size for probe in probes}, "no batch is probed twice"
            assert 1 <= step.batch_size <= limit.batch_size
            assert step.reason
            probes.append(self.probe(step.batch_size))
            assert len(probes) < 100, "it ends"
        if step.first_failing_batch is not None:
            tried = {probe.batch_size: probe.fits for probe in probes}
            assert step.first_failing_batch == step.largest_batch + 1
            assert tried[step.first_failing_batch] is False
            assert step.largest_batch == 0 or tried[step.largest_batch] is True
        return step, probes


EDGES = st.one_of(st.integers(1, 64), st.floats(0, 6).map(lambda power: int(10**power)))
"""From 1 to a million, as many small as large."""
BUDGETS = st.integers(2**28, 2**37)
SHARES = st.floats(0, 0.95)
"""Of the budget: what no batch at all takes."""
FIRST = st.integers(8, 32).map(Hint)
"""The workload's own batch size."""


def line(edge: int, budget: int, share: float) -> tuple[float, float]:
    """Fixed bytes and bytes for each sample, so that `edge` and a half fill the budget."""
    fixed = share * budget
    return fixed, (budget - fixed) / (edge + 0.5)


@given(edge=EDGES, budget=BUDGETS, share=SHARES, hint=FIRST)
def test_an_exactly_linear_device_takes_five_probes(edge: int, budget: int, share: float, hint: Hint) -> None:
    fixed, each = line(edge, budget, share)
    found, probes = Device(lambda batch: fixed + each * batch, budget).search(hint=hint)
    assert found == Edge(edge, edge + 1, "memory")
    assert len(probes) <= 5


@given(edge=EDGES, budget=BUDGETS, hint=FIRST)
def test_a_device_full_of_parameters_takes_six(edge: int, budget: int, hint: Hint) -> None:
    fixed, each = line(edge, budget, 0.99)
    found, probes = Device(lambda batch: fixed + each * batch, budget).search(hint=hint)
    assert found.largest_batch == edge
    assert len(probes) <= 6  # meters count whole bytes: at a million samples that is worth one more


@pytest.mark.parametrize("block", [2 * MEBIBYTE, 20 * MEBIBYTE])
@given(edge=EDGES, budget=BUDGETS, share=SHARES, hint=FIRST)
def test_a_device_that_takes_memory_in_blocks_takes_eight(
    block: int, edge: int, budget: int, share: float, hint: Hint
) -> None:
    usable = budget // block * block
    fixed, each = line(edge, usable, share)
    found, probes = Device(lambda batch: fixed + each * batch, budget, block).search(hint=hint)
    assert found.largest_batch == edge
    assert len(probes) <= 8


def bent(edge: int, budget: int, share: float, at: float, factor: float) -> Device:
    """From `at · edge` on, each sample takes `factor` times as much."""
    fixed, bend = share * budget, at * edge
    each = (budget - fixed) / (bend + factor * (edge + 0.5 - bend))
    return Device(lambda b: fixed + each * min(b, bend) + factor * each * max(b - bend, 0), budget)


def jumping(edge: int, budget: int, share: float, at: float, height: float) -> Device:
    """From `at · edge` on, a workspace takes `height` of what the samples may."""
    fixed = share * budget
    jump = height * (budget - fixed)
    each = (budget - fixed - jump) / (edge + 0.5)
    return Device(lambda b: fixed + each * b + (jump if b >= at * edge else 0), budget)


def wavering(edge: int, budget: int, share: float, samples: float) -> Device:
    """Takes up to so many samples' worth more or less, each batch its own."""
    fixed, each = line(edge, budget, share)
    return Device(lambda b: fixed + each * (b + samples * (random.Random(b).random() - 0.5)), budget)


@given(
    edge=EDGES, budget=BUDGETS, share=SHARES, hint=FIRST, at=st.floats(0, 1), factor=st.floats(2 / 3, 1.5)
)  # fmt: skip
def test_a_bend_is_found_exactly(
    edge: int, budget: int, share: float, hint: Hint, at: float, factor: float
) -> None:  # fmt: skip
    found, _ = bent(edge, budget, share, at, factor).search(hint=hint)
    assert found.largest_batch == edge


@given(edge=EDGES, budget=BUDGETS, share=SHARES, hint=FIRST, at=st.floats(0, 1), height=st.floats(0, 0.3))
def test_a_jump_is_found_exactly(
    edge: int, budget: int, share: float, hint: Hint, at: float, height: float
) -> None:  # fmt: skip
    found, _ = jumping(edge, budget, share, at, height).search(hint=hint)
    assert found.largest_batch == edge


@given(edge=EDGES, budget=BUDGETS, share=SHARES, hint=FIRST, part=st.floats(0, 0.05))
def test_a_device_of_whims_ends_with_a_proof(edge: int, budget: int, share: float, hint: Hint, part: float) -> None:
    fixed, each = line(edge, budget, share)
    device = Device(lambda b: (fixed + each * b) * (1 + part * (random.Random(b).random() - 0.5)), budget)
    found, probes = device.search(hint=hint)
    assert found.first_failing_batch == found.largest_batch + 1
    assert len(probes) <= 12 + 2 * math.log2(2**24)


@pytest.mark.parametrize(
    "make",
    [
        lambda chance: ((chance.random(), chance.uniform(2 / 3, 1.5)), bent),
        lambda chance: ((chance.uniform(0, 0.9), chance.uniform(0, 0.3)), jumping),
        lambda chance: ((chance.uniform(0, 3),), wavering),
    ],
    ids=["bent", "jumping", "wavering"],
)
def test_most_devices_that_are_not_linear_take_eight_probes(
    make: Callable[[random.Random], tuple[tuple[float, ...], Callable[..., Device]]],
) -> None:
    """Some must take more: which of n batches is the one where memory jumps cannot be told in less than log2(n)."""
    counts = []
    for seed in range(1000):
        chance = random.Random(seed)
        edge, budget = int(10 ** chance.uniform(0, 6)), int(2 ** chance.uniform(28, 37))
        shape, family = make(chance)
        device = family(edge, budget, chance.uniform(0, 0.95), *shape)
        _, probes = device.search(hint=Hint(chance.randint(8, 32)))
        counts.append(len(probes))
    counts.sort()
    assert counts[500] <= 7
    assert counts[939] <= 8, "94 % take at most 8, as the README says"
    assert counts[-1] <= 14


@given(truth=st.integers(0, 10**6), limit=st.integers(1, 10**6))
def test_a_limit_is_named(truth: int, limit: int) -> None:
    device = Device(lambda batch: 1000 * batch, 1000 * truth + 500)
    edge, _ = device.search(limit=Limit(limit, "max_batch_size"))
    if truth < limit:
        assert edge == Edge(truth, truth + 1, "memory")
    else:
        assert edge == Edge(limit, None, "max_batch_size")


def test_all_of_a_small_data_set_is_tried_at_once_when_it_should_fit() -> None:
    _, probes = Device(lambda batch: 1000 + batch, 10**6).search(limit=Limit(500, "dataset"))
    assert [probe.batch_size for probe in probes][-1] == 500
    assert len(probes) <= 3


def test_a_kernel_limit_is_named_and_found_by_bisection() -> None:
    device = Device(lambda batch: 1000.0 * batch if batch <= 777 else 10**9, 10**8, failure=Verdict.KERNEL_LIMIT)
    edge, probes = device.search()
    assert edge == Edge(777, 778, "kernel")
    assert len(probes) <= 20


@given(truth=st.integers(1, 10**6))
def test_without_a_meter_it_doubles_and_bisects(truth: int) -> None:
    probes: list[Probe] = []
    while not isinstance(step := explore(probes, UNLIMITED, hint=Hint(1)), Edge):
        probes.append(Probe(step.batch_size, Verdict.FITS if step.batch_size <= truth else Verdict.OOM))
    assert step.largest_batch == truth
    assert len(probes) <= 2 * math.log2(truth + 1) + 2


def test_a_batch_that_ran_and_failed_counts_as_failed() -> None:
    probes = [Probe(4, Verdict.FITS, 40), Probe(5, Verdict.FITS, 50), Probe(5, Verdict.OOM)]
    assert explore(probes, UNLIMITED, budget_bytes=55) == Edge(4, 5, "memory")


@given(st.permutations([Probe(b, Verdict.FITS if b <= 20 else Verdict.OOM, 10 * b) for b in (1, 2, 8, 19, 22, 32)]))
def test_the_order_of_probes_does_not_matter(probes: list[Probe]) -> None:
    assert explore(probes, UNLIMITED, budget_bytes=205) == Next(20, "where the budget should end", 200)


def test_another_precisions_line_spares_a_probe() -> None:
    """bf16 begins at the edge of fp32, with its line's fixed part."""
    full = Device(lambda batch: 10_000 + 100 * batch, 100_000)
    edge, probes = full.search()
    taught = line_of(probes)
    assert taught is not None
    assert taught.fixed_bytes == pytest.approx(10_000)
    half = Device(lambda batch: 12_000 + 50 * batch, 100_000)
    found, with_hint = half.search(hint=Hint(edge.largest_batch, "fp32's edge", taught.fixed_bytes))
    assert found.largest_batch == 1760
    assert len(with_hint) <= 4
    assert with_hint[0].batch_size == edge.largest_batch == 900


def test_predictions_are_what_the_line_says() -> None:
    probes = [Probe(10, Verdict.FITS, 1100), Probe(20, Verdict.FITS, 2100)]
    step = explore(probes, UNLIMITED, budget_bytes=3150)
    assert step == Next(30, "where the budget should end", 3100)


def test_every_step_of_a_search_can_be_gone_on_from() -> None:
    """Stateless: what is asked next depends on the probes alone."""
    device = Device(lambda batch: 5e6 + 1e5 * batch, 10**8)
    _, probes = device.search()
    for known, following in itertools.pairwise(range(len(probes) + 1)):
        step = explore(probes[:known][::-1], UNLIMITED, budget_bytes=device.budget_bytes)
        assert isinstance(step, Next)
        assert step.batch_size == probes[following - 1].batch_size
