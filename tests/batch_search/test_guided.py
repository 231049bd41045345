"""A search that a plan guides: what tensors take is known before anything is measured, what kernels take is not."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest
from batch_search.devices import FAMILIES
from batch_search.traces import MIB, step_of
from hypothesis import given
from hypothesis import strategies as st
from simulated_memory import Device

from amp_track.batch_search.search import Hint, Limit, MaxBatch, Probe, explore
from amp_track.config.job import Job
from amp_track.memory_plan.allocator import CachingAllocator, SimulatedOutOfMemory
from amp_track.memory_plan.fake_step import FakeStep
from amp_track.memory_plan.gpus import gpu_named
from amp_track.memory_plan.predict import ReplayedMemory, forecast
from amp_track.memory_plan.replay import TraceFamily, fits, on_device, replayed
from amp_track.records.result import JobStatus
from benchmarks import models

BUDGET = 512 * MIB


def hint_of(slope_bytes: float, *, fixed_bytes: float = 0.0, of_budget: float = 0.85) -> Hint:
    """Return the hint of a plan that says so."""
    batch_size = max(int((of_budget * BUDGET - fixed_bytes) / slope_bytes), 1)
    return Hint(batch_size, "the plan", predicted_bytes=int(slope_bytes * batch_size), slope_bytes=slope_bytes)


def linear(slope_bytes: float, fixed_bytes: float, block_bytes: int = 4096) -> Device:
    return Device(lambda batch_size: fixed_bytes + slope_bytes * batch_size, BUDGET, block_bytes)


@given(
    slope=st.floats(20_000, 20_000_000),
    fixed=st.floats(0, 0.14 * BUDGET),
    planned_fixed=st.floats(0, 0.1 * BUDGET),
)
def test_three_probes_where_the_plan_knows_the_slope(slope: float, fixed: float, planned_fixed: float) -> None:
    _, probes = linear(slope, fixed).search(hint=hint_of(slope, fixed_bytes=planned_fixed))
    assert len(probes) <= 5  # one or two more where the meter's pages hide samples: of 20 kB each once in twenty


def test_three_probes_are_the_rule() -> None:
    chance, taken = random.Random(1), []
    for _ in range(1000):
        slope, fixed = chance.uniform(20_000, 200_000), chance.uniform(0, 0.14 * BUDGET)
        _, probes = linear(slope, fixed).search(hint=hint_of(slope, fixed_bytes=chance.uniform(0, 0.1 * BUDGET)))
        taken.append(len(probes))
    assert taken.count(3) >= 950


def test_three_probes_as_a_u_net_takes_them() -> None:
    """Its kernels take 5 % more than its tensors, measured on a CPU."""
    max_batch, probes = linear(5_373_952, 31_300_000).search(hint=hint_of(5_095_424))
    assert (max_batch.batch_size, [probe.batch_size for probe in probes]) == (94, [89, 94, 95])


@given(wrong=st.floats(0.2, 5), slope=st.floats(20_000, 5_000_000), fixed=st.floats(0, 0.5 * BUDGET))
def test_a_plan_that_is_wrong_costs_probes_and_not_the_max_batch(wrong: float, slope: float, fixed: float) -> None:
    _, probes = linear(slope, fixed).search(hint=hint_of(slope * wrong))
    assert len(probes) <= 14


def test_a_kernel_that_takes_less_at_larger_batches_does_not_mislead() -> None:
    """As measured of a ResNet-18 in bf16 on a CPU: 452 MiB at batch 279, 441 at 342, then 1.02 MB for each sample."""

    def need(batch_size: int) -> float:
        return 180e6 + 1_050_000 * batch_size if batch_size < 300 else 536_821_760 - 1_019_000 * (415 - batch_size)

    max_batch, probes = Device(need, BUDGET, 4096).search(hint=hint_of(965_000, of_budget=0.52))
    assert max_batch.batch_size == 415
    assert len(probes) <= 9


def test_more_is_not_tried_than_there_is() -> None:
    max_batch, probes = linear(1000, 0).search(limit=Limit(100, "dataset"), hint=hint_of(1000))
    assert max_batch == MaxBatch(100, None, "dataset")
    assert len(probes) == 1


@pytest.mark.parametrize("later_bytes", [None, 40 * MIB], ids=["", "first steps are measured"])
@pytest.mark.parametrize("wrong", [1.0, 0.95, 1.1], ids=["exact", "5 % too low", "10 % too high"])
@pytest.mark.parametrize("make", FAMILIES)
def test_most_devices_that_are_not_linear_take_eight_probes(
    make: Callable[[random.Random, int, int, float], Device], wrong: float, later_bytes: int | None
) -> None:
    counts = []
    for seed in range(100):
        chance = random.Random(seed)
        max_batch, share = round(10 ** chance.uniform(0.3, 6)), chance.uniform(0.02, 0.9)
        device = dataclasses.replace(make(chance, max_batch, BUDGET, share), later_bytes=later_bytes)
        slope = device.need(1) - share * BUDGET  # of tensors: what kernels take begins at larger batches
        _, probes = device.search(hint=hint_of(slope * wrong, fixed_bytes=share * BUDGET))
        counts.append(len(probes))
    counts.sort()
    assert counts[50] <= 6
    assert counts[93] <= 9
    assert counts[-1] <= 16


def family_of(per_sample: int, weights_bytes: int = MIB) -> TraceFamily:
    traces = (step_of(batch, [per_sample * batch] * 2, weights_bytes=weights_bytes) for batch in (8, 16))
    family = TraceFamily.through(*traces)
    assert family is not None
    return family


def test_a_forecast_is_a_little_below_the_predicted_max_batch() -> None:
    found = forecast(family_of(500_000), BUDGET, most=10_000, on_cuda=False)
    assert 0.8 < found.allocated_bytes / BUDGET <= 0.85
    assert found.slope_bytes == pytest.approx(1_000_000, rel=0.05)
    assert found.batch_size == pytest.approx((0.85 * BUDGET - 24 * MIB) / 1_000_000, rel=0.05)
    assert found.traces is None


def test_on_cuda_a_forecast_is_the_predicted_max_batch() -> None:
    family = family_of(500_000)
    found = forecast(family, BUDGET, most=10_000, on_cuda=True)
    assert found.traces == (family.first, family.second)
    assert fits(family.first, family.sizes_at(found.batch_size), BUDGET)
    assert not fits(family.first, family.sizes_at(found.batch_size + 1), BUDGET)


@pytest.mark.parametrize("on_cuda", [False, True])
def test_a_forecast_ends_at_the_most_there_is(on_cuda: bool) -> None:
    assert forecast(family_of(500_000), BUDGET, most=77, on_cuda=on_cuda).batch_size == 77


def test_a_forecast_of_a_model_that_does_not_fit() -> None:
    found = forecast(family_of(500_000, weights_bytes=BUDGET), BUDGET, most=1000, on_cuda=False)
    assert found.batch_size == 0


def test_half_of_a_small_budget_is_left_to_libraries() -> None:
    """They may take all of it, and take next to nothing with a small model: a search would begin at one sample."""
    found = forecast(family_of(5_000), 16 * MIB, most=10_000, on_cuda=False)
    assert found.batch_size == pytest.approx((0.85 * 16 - 8 - 2) * MIB / 10_000, rel=0.1)


def net_of(seed: int, layers: int) -> TraceFamily:
    """Return a net whose activations differ in size, as those of a network of convolutions do."""
    chance = random.Random(seed)
    per_sample = [chance.choice([1, 2, 4, 8, 12, 24]) * chance.choice([1024, 3136, 4096, 12544]) for _ in range(layers)]
    traces = (step_of(batch, [size * batch for size in per_sample]) for batch in (8, 16))
    family = TraceFamily.through(*traces)
    assert family is not None
    return family


def search_on_a_gpu(
    family: TraceFamily, more_bytes: int, *, budget: int = BUDGET, most: int = 10**6, has_plan: bool = True
) -> tuple[MaxBatch, list[Probe]]:
    """Search on a device whose allocator is the simulated one, and whose libraries take `more_bytes` beside the plan's.

    The search itself sees the peaks that PyTorch reports, and the plan.
    """
    hint = Hint(8)
    if has_plan:
        planned = forecast(family, budget, most=most, on_cuda=True)
        hint = Hint(planned.batch_size, slope_bytes=planned.slope_bytes, memory=ReplayedMemory(family, most=most))
    probes: list[Probe] = []
    while not isinstance(step := explore(probes, Limit(most, "dataset"), budget_bytes=budget, hint=hint), MaxBatch):
        assert step.batch_size not in {probe.batch_size for probe in probes}, "no batch is probed twice"
        allocator = CachingAllocator(budget - more_bytes)
        try:
            replayed(family.first, family.sizes_at(step.batch_size), allocator)
        except SimulatedOutOfMemory:
            probes.append(Probe(step.batch_size, JobStatus.OOM))
        else:
            peaks = allocator.peak_reserved_bytes, allocator.peak_allocated_bytes
            probes.append(Probe(step.batch_size, JobStatus.FITS, *(peak + more_bytes for peak in peaks)))
        assert len(probes) < 100, "the search does not end"
    return step, probes


@given(seed=st.integers(0, 10**6), layers=st.integers(2, 30))
def test_two_probes_where_the_simulated_allocator_is_right(seed: int, layers: int) -> None:
    family = net_of(seed, layers)
    found, probes = search_on_a_gpu(family, 0)
    largest = ReplayedMemory(family, most=10**6).largest_within(BUDGET)
    assert found.batch_size >= largest
    assert len(probes) <= 3, "one more if cached blocks leave room for a larger batch"


@given(seed=st.integers(0, 10**6), layers=st.integers(2, 30), more=st.integers(-40 * MIB, 80 * MIB))
def test_a_constant_error_of_the_simulation_costs_a_few_probes(seed: int, layers: int, more: int) -> None:
    found, probes = search_on_a_gpu(net_of(seed, layers), more)
    tried = {probe.batch_size: probe.fits for probe in probes}
    assert tried[found.batch_size] and not tried[found.batch_size + 1]
    assert len(probes) <= 16


def test_a_constant_error_usually_costs_two_probes() -> None:
    taken = []
    for seed in range(100):
        more = random.Random(seed).randint(-40 * MIB, 80 * MIB)
        taken.append(len(search_on_a_gpu(net_of(seed, 12), more)[1]))
    taken.sort()
    assert taken[50] <= 4
    assert taken[90] <= 7


@pytest.fixture(scope="module")
def nets() -> list[TraceFamily]:
    """Nets whose temporary tensors leave gaps in the segments of the allocator."""
    found = []
    for workload, precision in itertools.product((models.Cnn(), models.UNet(), models.Transformer()), ("fp32", "amp")):
        job = Job(workload="any", learning_rate=1e-3, batch_size=8)
        step = FakeStep(job, workload, workload.example(2), as_cuda=True)
        traces = (
            on_device(step.trace(precision, batch).with_next_step(), gpu_named("H100").kernels()) for batch in (4, 8)
        )
        family = TraceFamily.through(*traces)
        assert family is not None
        found.append(family)
    return found


@pytest.mark.parametrize(
    ("has_plan", "usual", "most"), [pytest.param(True, 4, 6, marks=pytest.mark.slow), (False, 14, 18)]
)
def test_probes_of_nets_with_gaps_between_their_tensors(
    nets: list[TraceFamily], has_plan: bool, usual: int, most: int
) -> None:
    """A line through the measurements took up to 34, with a plan and without."""
    taken = sorted(
        len(search_on_a_gpu(net, more * MIB, budget=6 * 1024 * MIB, has_plan=has_plan)[1])
        for net in nets
        for more in (0, 8, 24, 48)
    )
    assert taken[len(taken) // 2] <= usual
    assert taken[-1] <= most


@given(seed=st.integers(0, 10**6), limit=st.integers(1, 3000), kernel=st.integers(1, 3000))
def test_a_limit_of_a_kernel_or_the_data_ends_a_simulated_search_too(seed: int, limit: int, kernel: int) -> None:
    memory = ReplayedMemory(net_of(seed, 8), most=limit)
    probes: list[Probe] = []
    hint = Hint(memory.largest_within(BUDGET), slope_bytes=1.0, memory=memory)
    while not isinstance(step := explore(probes, Limit(limit, "dataset"), budget_bytes=BUDGET, hint=hint), MaxBatch):
        is_too_large = step.batch_size > kernel
        status = JobStatus.KERNEL_LIMIT if is_too_large else JobStatus.FITS
        peak = None if is_too_large else memory.allocated_bytes(step.batch_size)
        probes.append(Probe(step.batch_size, status, peak, peak))
        assert len(probes) < 60
    assert step.batch_size == min(kernel, limit)
    assert step.bound == ("dataset" if limit <= kernel else "kernel")
