"""The search for max batches on simulated devices: it ends, and each number that it reports is proven by a job."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from dataclasses import dataclass

import optuna
import pytest
from batch_search.traces import step_of
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState

from amp_track.batch_search.search import Limit
from amp_track.memory_plan.allocator import CachingAllocator, SimulatedOutOfMemory
from amp_track.memory_plan.predict import forecast
from amp_track.memory_plan.replay import TraceFamily, replayed
from amp_track.records.plan import Forecast
from amp_track.records.result import JobResult, JobStatus
from amp_track.results.max_batch import PrecisionResult
from amp_track.study import max_batches, trials
from amp_track.study.batch_sampler import BatchSampler, Busy, Goal
from amp_track.study.max_batch_jobs import Proposal

MIB = 2**20


@dataclass(frozen=True)
class Device:
    """Memory is linear in the batch, rounded up to blocks, with noise of a few pages; speed is noisy too."""

    budget_bytes: int
    fixed_bytes: int
    sample_bytes: int
    block_bytes: int
    eval_sample_bytes: int
    size_ratio: float | None
    drawn_ratio: float
    longer_bytes: int
    noise: int
    seed: int

    def run(self, proposal: Proposal, number: int) -> JobResult:
        noise = random.Random(self.seed * 1000 + number)
        is_evaluation, is_typical = proposal.kind == "eval", proposal.kind == "typical"
        trained = proposal.training_batch_size if is_evaluation else proposal.batch_size
        ratio = self.drawn_ratio if is_typical else self.size_ratio or 1.0
        longer = self.longer_bytes if proposal.kind == "confirm" else 0
        base = self.fixed_bytes + longer + 4096 * noise.randint(0, self.noise)
        train = base + int(ratio * self.sample_bytes * trained)
        evaluation = base + self.eval_sample_bytes * (proposal.batch_size if is_evaluation else trained)
        needed = -(-max(train, evaluation) // self.block_bytes) * self.block_bytes
        if needed > self.budget_bytes:
            return JobResult(status=JobStatus.OOM, train_peak_allocated_bytes=self.budget_bytes, requested_bytes=4096)
        return JobResult(
            status=JobStatus.FITS,
            peak_bytes=needed,
            train_peak_allocated_bytes=train,
            eval_peak_allocated_bytes=evaluation,
            size_ratio=self.size_ratio if not is_typical else None,
            samples_per_second=1000 * (1 - 1 / (trained + 1)) * noise.uniform(0.9, 1.0),
        )


@dataclass(frozen=True)
class LinePlans:
    """Memory plans on a CPU: the line of a device, whose slope is wrong by a factor, up to 85 % of the budget."""

    device: Device
    factor: float
    seconds: float | None = None

    def __call__(self) -> dict[str, Forecast]:
        device, slope_bytes = self.device, self.factor * self.device.sample_bytes
        batch_size = max(int((0.85 * device.budget_bytes - device.fixed_bytes) / device.sample_bytes), 0)
        allocated_bytes = device.fixed_bytes + round(slope_bytes * batch_size)
        plan = Forecast(batch_size=batch_size, allocated_bytes=allocated_bytes, slope_bytes=slope_bytes)
        return {"fp32": plan, "bf16": plan}


def search(
    device: Device, *, is_resumed: bool = False, **settings: object
) -> tuple[dict[str, PrecisionResult], list[Proposal]]:
    """Run a search; `is_resumed`: each job in another process, which has only the study."""
    goal = Goal(
        **{
            "precisions": ("fp32", "bf16"),
            "limit": Limit(5000, "dataset"),
            "budget_bytes": device.budget_bytes,
            "first_batch": 8,
            "multiple_of": 1,
            "confirm": True,
            "recommends": True,
        }
        | settings,  # type: ignore[arg-type]
    )
    study = optuna.create_study(direction="maximize", sampler=(sampler := BatchSampler(goal)))
    proposals = []
    while max_batches.is_anything_left(study, sampler):
        if is_resumed:
            study.sampler = sampler = BatchSampler(goal)
        trial = study.ask()
        proposals.append(proposal := sampler.suggest(trial))
        value = max_batches.record(trial, proposal, device.run(proposal, trial.number), "run", device.budget_bytes)
        study.tell(trial, value)
        assert len(proposals) < 150, "it does not end"
    return max_batches.proven(study, sampler), proposals


devices = st.builds(
    Device,
    budget_bytes=st.integers(8, 512).map(MIB.__mul__),
    fixed_bytes=st.integers(0, 16).map(MIB.__mul__),
    sample_bytes=st.integers(1_000, 4 * MIB),
    block_bytes=st.sampled_from([4096, 2 * MIB]),
    eval_sample_bytes=st.integers(500, MIB),
    size_ratio=st.one_of(st.none(), st.floats(1.01, 8.0), st.floats(8.0, 1000.0)),
    drawn_ratio=st.sampled_from([1.0, 1.0, 1.2, 3.0]),
    longer_bytes=st.sampled_from([0, 0, 50_000, 2 * MIB]),
    noise=st.sampled_from([0, 0, 1, 4]),
    seed=st.integers(0, 100),
)


@given(
    device=devices,
    limit=st.sampled_from([1, 7, 64, 5000, 10**6]),
    beyond=st.sampled_from([0, 3]),
    multiple_of=st.sampled_from([1, 8]),
    effective=st.sampled_from([None, None, 64, 96, 97]),
    has_headroom=st.booleans(),
    evaluates=st.booleans(),
    confirm=st.booleans(),
    planned=st.sampled_from([None, 0.0, 0.8, 0.93, 1.0, 1.1]),
)
def test_every_search_ends_and_reports_only_what_ran(
    device: Device,
    limit: int,
    beyond: int,
    multiple_of: int,
    effective: int | None,
    has_headroom: bool,
    evaluates: bool,
    confirm: bool,
    planned: float | None,
) -> None:
    results, proposals = search(
        device,
        limit=Limit(limit, "dataset"),
        beyond=beyond,
        multiple_of=multiple_of,
        effective_batch_size=effective,
        recommended_bytes=int(0.95 * device.budget_bytes) if has_headroom else None,
        most_evaluated=Limit(300, "dataset") if evaluates else None,
        confirm=confirm,
        forecasts=LinePlans(device, planned) if planned is not None else None,
    )
    assert set(results) == {"fp32", "bf16"}
    for name, found in results.items():
        most = found.max_batch.batch_size
        ran = {(each.kind, each.batch_size) for each in proposals if each.precision == name}
        if not most:
            assert found.typical_max_batch is found.eval_max_batch is None
            continue
        assert (("confirm", most) in ran) if confirm else most in {batch for _, batch in ran}
        recommended = found.recommended_batch
        assert recommended is not None or multiple_of > 1, "any effective batch is a multiple of 1"
        if recommended is not None:
            assert 1 <= recommended <= most
            assert recommended % multiple_of == 0
            assert effective is None or effective % recommended == 0
            assert recommended in {batch for kind, batch in ran if kind not in ("typical", "eval")}
        assert (found.typical_max_batch is not None) == (device.size_ratio is not None)
        if found.typical_max_batch is not None:
            assert found.typical_max_batch.batch_size >= most
            assert ("typical", found.typical_max_batch.batch_size) in ran
        assert (found.eval_max_batch is not None) == evaluates
        if found.eval_max_batch is not None and found.eval_max_batch.batch_size:
            assert ("eval", found.eval_max_batch.batch_size) in ran


EXACT = Device(
    budget_bytes=64 * MIB, fixed_bytes=2 * MIB, sample_bytes=40_000, block_bytes=4096, eval_sample_bytes=20_000,
    size_ratio=1.5, drawn_ratio=1.0, longer_bytes=0, noise=0, seed=0,
)  # fmt: skip
SAME_SIZE = dataclasses.replace(EXACT, size_ratio=None)


def test_a_confirmation_run_follows_a_batch_that_fits() -> None:
    """Nothing else tells how long its steps take, and so how many it may have."""
    device = dataclasses.replace(SAME_SIZE, fixed_bytes=0, sample_bytes=40 * MIB)
    kinds = [(each.kind, each.batch_size) for each in search(device, first_batch=2)[1] if each.precision == "fp32"]
    assert kinds[:3] == [("probe", 2), ("probe", 1), ("confirm", 1)]


def with_a_plan(planned: float, device: Device, **settings: object) -> list[tuple[str, int]]:
    """Return the jobs of a search after a plan whose slope is `planned` times the device's."""
    given = {"precisions": ("fp32",), "recommends": False, "sure_bytes": device.budget_bytes}
    results, proposals = search(device, forecasts=LinePlans(device, planned), **given | settings)
    assert results["fp32"].max_batch.batch_size == (device.budget_bytes - device.fixed_bytes) // device.sample_bytes
    return [(each.kind, each.batch_size) for each in proposals]


@pytest.mark.parametrize(
    ("planned", "confirms_soon", "jobs"),
    [
        (1.0, True, [("probe", 52), ("confirm", 62), ("probe", 63)]),
        (0.9, True, [("probe", 52), ("confirm", 63), ("confirm", 62)]),
        (1.1, True, [("probe", 52), ("confirm", 61), ("probe", 62), ("probe", 63), ("confirm", 62)]),
        (1.0, False, [("probe", 52), ("probe", 63), ("confirm", 62)]),
    ],
)
def test_the_first_run_at_a_planned_max_batch_is_its_confirmation_if_that_is_short(
    planned: float, confirms_soon: bool, jobs: list[tuple[str, int]]
) -> None:
    """A plan's slope is too small rather than too large: then one job less fails."""
    device = dataclasses.replace(SAME_SIZE, sample_bytes=MIB)
    assert with_a_plan(planned, device, confirms_soon=confirms_soon) == jobs


def test_after_a_failed_confirmation_smaller_batches_are_tried_by_the_usual_error_of_a_plan() -> None:
    jobs = with_a_plan(0.93, dataclasses.replace(SAME_SIZE, sample_bytes=MIB // 4))
    assert jobs == [("probe", 209), ("confirm", 250), ("confirm", 249), ("confirm", 247), ("confirm", 248)]


def test_one_sample_is_the_last_that_is_tried_after_a_failed_confirmation() -> None:
    """A training with BatchNorm may reject a single sample, which would end the search."""

    class Evaluates(Device):
        def run(self, proposal: Proposal, number: int) -> JobResult:
            job_result = super().run(proposal, number)
            return job_result if job_result.fits else dataclasses.replace(job_result, requested_bytes=5 * MIB)

    device = Evaluates(**(vars(SAME_SIZE) | {"fixed_bytes": 60 * MIB, "longer_bytes": 5 * MIB}))
    _, proposals = search(device, precisions=("fp32",), recommends=False)
    confirmed = [each.batch_size for each in proposals if each.kind == "confirm"]
    assert confirmed[-2:] == [2, 1]


def test_one_sample_more_than_a_planned_max_batch_is_tried_whatever_the_line_says() -> None:
    """As measured of an MLP in bf16: 571 took 34.6 MiB and 1,020 took 39.8 of 40, but 1,021 did not fit."""

    class Bent(Device):
        def run(self, proposal: Proposal, number: int) -> JobResult:
            steep = dataclasses.replace(self, fixed_bytes=0, sample_bytes=self.budget_bytes // 62 + 1)
            return Device(**vars(steep if proposal.batch_size > 62 else self)).run(proposal, number)

    device = Bent(**(vars(SAME_SIZE) | {"fixed_bytes": 12 * MIB, "sample_bytes": 3 * MIB // 4}))
    _, proposals = search(
        device,
        precisions=("fp32",),
        recommends=False,
        sure_bytes=device.budget_bytes,
        forecasts=LinePlans(device, 2.05),
    )
    assert [(each.kind, each.batch_size) for each in proposals] == [("probe", 56), ("confirm", 62), ("probe", 63)]


def test_a_plan_whose_memory_does_not_rise_is_no_line() -> None:
    """The optimizer step may take more than the samples of the planned batches."""
    jobs = with_a_plan(0.0, dataclasses.replace(SAME_SIZE, sample_bytes=MIB))
    assert jobs[0] == ("probe", 52)


def test_far_below_a_failed_confirmation_run_a_probe_is_first() -> None:
    jobs = with_a_plan(0.97, dataclasses.replace(SAME_SIZE, sample_bytes=MIB // 40))
    assert jobs[:3] == [("probe", 2096), ("confirm", 2491), ("probe", 2481)]


def test_another_search_worker_does_not_confirm_before_a_batch_has_fitted() -> None:
    device = dataclasses.replace(SAME_SIZE, sample_bytes=MIB)
    goal = Goal(
        precisions=("fp32",),
        limit=Limit(5000, "dataset"),
        budget_bytes=device.budget_bytes,
        first_batch=8,
        multiple_of=1,
        confirm=True,
        forecasts=LinePlans(device, 1.0),
    )
    study = optuna.create_study(direction="maximize", sampler=(sampler := BatchSampler(goal)))
    proposals = [sampler.suggest(study.ask()) for _ in range(2)]
    assert [(each.kind, each.batch_size) for each in proposals] == [("probe", 52), ("probe", 63)]


def test_readings_of_one_batch_are_numbered() -> None:
    reasons = [each.reason for each in search(EXACT)[1] if each.kind == "timing" and each.precision == "fp32"]
    first = "to time it: it may be recommended"
    assert reasons[:4] == [first, "to time it: reading 2 of at most 3", "to time it: reading 3 of at most 3", first]


def test_precisions_are_timed_in_turn() -> None:
    timed = [each.precision for each in search(SAME_SIZE)[1] if each.kind == "timing"]
    assert timed[:4] == ["fp32", "bf16", "fp32", "bf16"]


def test_a_max_batch_is_repeated_until_two_runs_take_equal_memory() -> None:
    """The second precision starts from the max batch of the first, which is its own here: that probe counts."""
    results, proposals = search(SAME_SIZE, recommends=False)
    assert {found.runs_at_max_batch for found in results.values()} == {2}
    kinds = {name: [each.kind for each in proposals if each.precision == name] for name in results}
    assert kinds["fp32"][-3:] == ["probe", "confirm", "repeat"]
    assert kinds["bf16"] == ["probe", "probe", "confirm"]


@pytest.mark.parametrize("more_bytes", [0, 1])
def test_a_max_batch_that_leaves_enough_memory_is_not_repeated(more_bytes: int) -> None:
    confirmed = search(SAME_SIZE, precisions=("fp32",), recommends=False)[0]["fp32"].confirmation
    assert confirmed is not None and confirmed.peak_bytes is not None
    sure_bytes = confirmed.peak_bytes - more_bytes
    _, proposals = search(SAME_SIZE, precisions=("fp32",), recommends=False, sure_bytes=sure_bytes)
    assert any(each.kind == "repeat" for each in proposals) == bool(more_bytes)


def test_where_a_repeat_has_failed_no_max_batch_goes_without() -> None:
    class Failing(Device):
        def run(self, proposal: Proposal, number: int) -> JobResult:
            if proposal.kind == "repeat" and proposal.batch_size > smaller:
                return JobResult(status=JobStatus.OOM)
            return Device(**vars(self)).run(proposal, number)

    smaller = search(SAME_SIZE, recommends=False)[0]["fp32"].max_batch.batch_size - 1
    device = Failing(**vars(SAME_SIZE))
    sure_bytes = SAME_SIZE.budget_bytes - SAME_SIZE.sample_bytes // 2
    results, _ = search(device, precisions=("fp32",), recommends=False, sure_bytes=sure_bytes)
    assert results["fp32"].max_batch.batch_size == smaller
    assert results["fp32"].runs_at_max_batch == 5


def test_a_precision_vouches_for_no_other() -> None:
    """float32 takes the same memory in every run, bfloat16 does not."""

    class Mixed(Device):
        def run(self, proposal: Proposal, number: int) -> JobResult:
            varies = dataclasses.replace(self, noise=1000) if proposal.precision == "bf16" else self
            return Device(**vars(varies)).run(proposal, number)

    results, _ = search(Mixed(**(vars(SAME_SIZE) | {"sample_bytes": 5 * MIB})), recommends=False)
    assert {name: found.runs_at_max_batch for name, found in results.items()} == {"fp32": 2, "bf16": 5}


def test_memory_that_varies_takes_five_runs() -> None:
    """Each run of a max batch takes a few pages more or less; so none proves anything about the next."""
    results, _ = search(dataclasses.replace(SAME_SIZE, noise=1000, sample_bytes=40 * MIB), recommends=False)
    assert {found.runs_at_max_batch for found in results.values()} == {5}


def test_each_number_is_exact_on_a_device_without_noise() -> None:
    results, _ = search(EXACT, most_evaluated=Limit(5000, "dataset"))
    room = EXACT.budget_bytes - EXACT.fixed_bytes
    for found in results.values():
        assert found.max_batch.batch_size == int(room // (1.5 * EXACT.sample_bytes))
        assert found.typical_max_batch is not None
        assert found.typical_max_batch.batch_size == room // EXACT.sample_bytes
        assert found.eval_max_batch is not None
        assert found.eval_max_batch.batch_size == room // EXACT.eval_sample_bytes


def test_a_probe_that_leaves_too_little_headroom_is_followed_by_a_smaller_one() -> None:
    """Memory that bends slightly makes the first prediction too large."""

    @dataclass(frozen=True)
    class Bent(Device):
        def run(self, proposal: Proposal, number: int) -> JobResult:
            found = super().run(proposal, number)
            if not found.fits or found.peak_bytes is None:
                return found
            bent = int(found.peak_bytes * (1 + 0.03 * math.sin(math.pi * found.peak_bytes / self.budget_bytes)))
            return dataclasses.replace(found, peak_bytes=bent, train_peak_allocated_bytes=bent)

    device = Bent(**(vars(EXACT) | {"size_ratio": None}))
    room = int(0.95 * device.budget_bytes)
    results, proposals = search(device, recommended_bytes=room)
    assert [job.kind for job in proposals if job.precision == "fp32"].count("headroom") == 2
    for found in results.values():
        assert found.leaves_headroom
        assert found.compared[0] >= 0.92 * found.max_batch.batch_size


def test_a_few_samples_leave_headroom_without_a_probe_for_it() -> None:
    device = dataclasses.replace(SAME_SIZE, budget_bytes=55 * MIB, fixed_bytes=0, sample_bytes=11 * MIB)
    for found in search(device, recommended_bytes=52 * MIB)[0].values():
        assert (found.max_batch.batch_size, found.recommended_batch, found.leaves_headroom) == (5, 4, True)


def test_the_evaluation_leaves_the_headroom_too() -> None:
    room = int(0.95 * EXACT.budget_bytes)
    results, _ = search(EXACT, recommended_bytes=room, most_evaluated=Limit(5000, "dataset"))
    for found in results.values():
        assert found.eval_max_batch is not None
        assert found.eval_max_batch.batch_size == (room - EXACT.fixed_bytes) // EXACT.eval_sample_bytes


def test_a_wrong_size_of_the_data_set_does_not_repeat_a_batch() -> None:
    @dataclass(frozen=True)
    class Short(Device):
        def run(self, proposal: Proposal, number: int) -> JobResult:
            if proposal.batch_size > 50:
                return JobResult(status=JobStatus.OVER_DATASET, training_samples=100)
            return super().run(proposal, number)

    results, proposals = search(Short(**vars(SAME_SIZE)))
    assert {found.max_batch.batch_size for found in results.values()} == {50}
    too_large = [each.precision for each in proposals if each.batch_size > 50]
    assert set(too_large) == {"fp32"}, "the other precision knows it"


def test_a_batch_that_runs_out_of_memory_as_drawn_is_no_max_batch() -> None:
    device = Device(**(vars(EXACT) | {"drawn_ratio": 2.0}))
    results, _ = search(device)
    drawn = (device.budget_bytes - device.fixed_bytes) // (2 * device.sample_bytes)
    for found in results.values():
        assert found.typical_max_batch is not None
        assert (found.max_batch.batch_size, found.max_batch.first_failing_batch) == (drawn, drawn + 1)
        assert found.typical_max_batch.batch_size == drawn


def test_a_failure_as_drawn_between_confirmation_run_and_probe_repeats_no_job() -> None:
    """Batches as drawn fail above the max batch that confirmation runs have proven, but below a probe that fits."""
    device = Device(**(vars(EXACT) | {"size_ratio": 1.01, "drawn_ratio": 1.025, "longer_bytes": 2 * MIB}))
    room = device.budget_bytes - device.fixed_bytes
    results, proposals = search(device, recommends=False)
    for found in results.values():
        assert found.typical_max_batch is not None
        assert found.typical_max_batch.batch_size == room // 41_000
        assert found.max_batch.batch_size == (room - device.longer_bytes) // 40_400
    confirmations = [(each.precision, each.batch_size) for each in proposals if each.kind == "confirm"]
    assert len(confirmations) == len(set(confirmations))


@pytest.mark.parametrize(("ratio", "most"), [(None, 40), (1.05, 52), (4.0, 56)])
def test_the_second_max_batch_costs_few_probes(ratio: float | None, most: int) -> None:
    device = Device(**(vars(EXACT) | {"size_ratio": ratio}))
    _, proposals = search(device)
    assert len(proposals) <= most
    assert (sum(each.kind == "typical" for each in proposals) > 0) == (ratio is not None)


@dataclass(frozen=True)
class CachingDevice:
    """A GPU: a caching allocator within a limit, which reserves all that it may, and is slow at its limit."""

    budget_bytes: int
    less_bytes: int
    """The limit of a probe that is to leave headroom."""
    family: TraceFamily
    more_bytes: int = 8 * MIB
    """Memory that libraries take beside the plan's."""

    def run(self, proposal: Proposal, number: int) -> JobResult:
        limit = self.less_bytes if proposal.kind == "headroom" else self.budget_bytes
        allocator = CachingAllocator(limit - self.more_bytes)
        try:
            replayed(self.family.first, self.family.sizes_at(proposal.batch_size), allocator)
        except SimulatedOutOfMemory:
            return JobResult(status=JobStatus.OOM, train_peak_allocated_bytes=limit, requested_bytes=4096)
        is_timed = proposal.kind not in ("probe", "headroom")
        is_slow = allocator.peak_allocated_bytes > 0.96 * self.budget_bytes
        speed = {"fp32": 700.0, "bf16": 1000.0}[proposal.precision] * (0.25 if is_slow else 1)
        return JobResult(
            status=JobStatus.FITS,
            peak_bytes=limit,
            train_peak_allocated_bytes=allocator.peak_allocated_bytes + self.more_bytes,
            samples_per_second=speed if is_timed else None,
            cold_samples_per_second=None if is_timed else speed / 2,
        )


class Planned:
    """Memory plans of a family, on CUDA."""

    seconds = None

    def __init__(self, family: TraceFamily, budget_bytes: int) -> None:
        self._forecast = forecast(family, budget_bytes, most=5000, on_cuda=True)

    def __call__(self) -> dict[str, Forecast]:
        return dict.fromkeys(("fp32", "bf16"), self._forecast)


FAMILY = TraceFamily(*(step_of(batch, [200_000 * batch, 37_000 * batch, 411_000 * batch]) for batch in (8, 16)))


def search_on_a_gpu(
    *, less_bytes: int = 486 * MIB, is_resumed: bool = False, has_plan: bool = True, **settings: object
) -> tuple[dict[str, PrecisionResult], list[Proposal]]:
    device = CachingDevice(budget_bytes=512 * MIB, less_bytes=less_bytes, family=FAMILY)
    return search(
        device,  # type: ignore[arg-type]
        is_resumed=is_resumed,
        **{
            "recommended_bytes": 486 * MIB,
            "forecasts": Planned(FAMILY, device.budget_bytes) if has_plan else None,
            "whole_probes": False,
        }
        | settings,
    )


@pytest.mark.parametrize("has_plan", [True, False])
def test_the_recommended_batch_ran_within_less_memory_if_the_allocator_reserves_all_it_may(has_plan: bool) -> None:
    results, proposals = search_on_a_gpu(has_plan=has_plan)
    for name, found in results.items():
        headroom = [job.batch_size for job in proposals if job.kind == "headroom" and job.precision == name]
        assert found.leaves_headroom
        assert found.compared[0] == headroom[-1] >= 0.92 * found.max_batch.batch_size
        assert len(headroom) <= 2
        probes = [job for job in proposals if job.precision == name and job.kind == "probe"]
        assert len(probes) <= found.probes <= (6 if has_plan else 12)  # and confirmation runs that failed


def test_a_simulated_allocator_saves_the_probes_of_larger_batches() -> None:
    """Where it says that none of them needs less memory than the first one that failed."""
    tried = {
        has_plan: [job.batch_size for job in search_on_a_gpu(beyond=3, has_plan=has_plan)[1] if job.kind == "beyond"]
        for has_plan in (True, False)
    }
    assert not tried[True]
    assert tried[False]


@pytest.mark.parametrize("limit", [7, 17, 5000])
def test_another_process_goes_on_as_the_first_would(limit: int) -> None:
    settings = {"limit": Limit(limit, "dataset"), "beyond": 3}
    assert search_on_a_gpu(is_resumed=True, **settings)[1] == search_on_a_gpu(**settings)[1]


def test_headroom_that_a_first_prediction_does_not_leave_is_left_by_a_smaller_batch() -> None:
    results, proposals = search_on_a_gpu(less_bytes=482 * MIB)
    for name, found in results.items():
        tried = [job.batch_size for job in proposals if job.kind == "headroom" and job.precision == name]
        assert len(tried) == 2
        assert tried[0] > tried[1]
        assert found.leaves_headroom
        assert found.compared[0] == tried[1]


def test_every_precision_is_timed_before_one_is_too_slow() -> None:
    """A run at the limit of the memory has a quarter of the speed, so bf16 seems slower there than fp32 elsewhere."""
    results, proposals = search_on_a_gpu()
    assert {job.precision for job in proposals if job.kind == "timing"} == {"fp32", "bf16"}
    assert {name: found.best_speed for name, found in results.items()} == {"fp32": 700.0, "bf16": 1000.0}


def test_a_single_candidate_is_timed() -> None:
    results, _ = search_on_a_gpu(limit=Limit(7, "dataset"))
    for found in results.values():
        assert found.recommended_batch in found.readings


def test_waiting_for_another_search_worker_ends_at_the_deadline() -> None:
    goal = Goal(
        precisions=("fp32",),
        limit=Limit(1, "dataset"),
        budget_bytes=64 * MIB,
        first_batch=1,
        multiple_of=1,
        confirm=False,
    )
    study = optuna.create_study(direction="maximize", sampler=(sampler := BatchSampler(goal)))
    sampler.suggest(study.ask())
    with pytest.raises(Busy):
        sampler.next(study.get_trials())
    sampler.deadline = time.monotonic()
    assert max_batches.is_anything_left(study, sampler, sampler.deadline), "the caller ends then"
    with trials.next_trial(study) as asked:
        sampler.suggest(asked.trial)
    assert [trial.state for trial in study.trials] == [TrialState.RUNNING, TrialState.PRUNED]
