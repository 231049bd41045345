"""The estimated speed: arithmetic and memory traffic at the peak rates."""

from __future__ import annotations

import dataclasses
import json

import pytest
from batch_search.traces import MIB, step_of
from memory_plan.workloads import Wide
from support import ROOT

from amp_track.config.job import Job
from amp_track.memory_plan.fake_step import FakeStep
from amp_track.memory_plan.gpus import GPUS, RATES
from amp_track.memory_plan.speed import (
    EFFICIENCY,
    MOVED_PER_ALLOCATED,
    allocated_bytes,
    samples_per_second,
    seconds_per_step,
)
from amp_track.records.plan import FAR_OFF, SPEED_ERROR, Category, PeakRates, StepTrace

GPU = PeakRates(gb_per_s=1000, fp32_tflops=10, half_tflops=100)


def step_at(batch_size: int, *, half_flops: int = 0) -> StepTrace:
    trace = step_of(batch_size, [MIB, 2 * batch_size * MIB])
    flops = 10**9 * batch_size
    return dataclasses.replace(trace, samples=batch_size, flops=flops, half_flops=half_flops * batch_size)


def test_arithmetic_and_traffic_are_added() -> None:
    trace = step_of(1, [500 * 10**6, 500 * 10**6], weights_bytes=0)
    trace = dataclasses.replace(trace, samples=1, flops=3 * 10**11, half_flops=2 * 10**11)
    expected = (0.01 + 0.002 + MOVED_PER_ALLOCATED * 0.001) / EFFICIENCY
    assert seconds_per_step(trace, GPU) == pytest.approx(expected)


def test_only_the_last_step_counts_without_workspaces_of_convolutions() -> None:
    trace = step_of(1, [MIB, MIB])
    assert allocated_bytes(trace) == 6 * MIB  # with the optimizer state
    assert allocated_bytes(trace.with_next_step()) == 2 * MIB
    workspace = dataclasses.replace(trace.storages[2], category=Category.CONVOLUTIONS)
    trace = dataclasses.replace(trace, storages=(*trace.storages[:2], workspace, *trace.storages[3:]))
    assert allocated_bytes(trace) == 5 * MIB


@pytest.mark.parametrize("batch_size", [1, 5, 8, 100])
def test_it_is_that_of_a_trace_at_this_batch_size(batch_size: int) -> None:
    trace = step_at(batch_size)
    assert samples_per_second(step_at, batch_size, GPU) == pytest.approx(batch_size / seconds_per_step(trace, GPU))


def test_a_single_sample_which_batch_norm_rejects_is_not_traced() -> None:
    def at_two_or_more(batch_size: int) -> StepTrace:
        assert batch_size > 1
        return step_at(batch_size)

    assert samples_per_second(at_two_or_more, 1, GPU) == pytest.approx(samples_per_second(step_at, 1, GPU))


def test_accumulated_batches_are_samples_too() -> None:
    def twice(batch_size: int) -> StepTrace:
        return dataclasses.replace(step_at(batch_size), samples=2 * batch_size)

    assert samples_per_second(twice, 16, GPU) == pytest.approx(2 * samples_per_second(step_at, 16, GPU))


def test_it_is_unknown_without_rates_or_operations() -> None:
    no_tensor_cores = dataclasses.replace(GPU, half_tflops=None)
    assert samples_per_second(step_at, 8, None) is None
    assert samples_per_second(step_at, 0, GPU) is None
    assert samples_per_second(lambda size: dataclasses.replace(step_at(size), flops=None), 8, GPU) is None
    assert samples_per_second(step_at, 8, no_tensor_cores) is not None
    assert samples_per_second(lambda size: step_at(size, half_flops=1), 8, no_tensor_cores) is None


def test_amp_is_faster_than_fp32_on_tensor_cores_by_less_than_their_rate() -> None:
    step = FakeStep(
        Job(workload="", learning_rate=0.1, batch_size=8), Wide(width=256), Wide(width=256).example(2), as_cuda=True
    )
    speeds = {
        precision: samples_per_second(lambda size, name=precision: step.trace(name, size).with_next_step(), 4096, GPU)
        for precision in ("fp32", "amp")
    }
    assert speeds["fp32"] < speeds["amp"] < 10 * speeds["fp32"]


@pytest.mark.parametrize("name", RATES)
def test_peak_rates(name: str) -> None:
    rates = RATES[name]
    (gpu,) = [gpu for gpu in GPUS if gpu.name == name]
    assert gpu.target().rates is rates
    assert 300 <= rates.gb_per_s <= 5000
    assert 8 <= rates.fp32_tflops <= 105
    assert rates.half_tflops is None or 1.9 <= rates.half_tflops / rates.fp32_tflops <= 17


def test_the_error_that_a_plan_states_is_the_measured_one() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "plan-speed.json").read_text())
    timm = result["timm, RTX 3090, amp"]["sum (in use)"]["all"]
    assert timm["median_error"] == pytest.approx(SPEED_ERROR, abs=0.05)
    assert 1 - timm["within_1.5"] == pytest.approx(FAR_OFF, abs=0.05)
    assert result["efficiency_in_use"] == EFFICIENCY == pytest.approx(result["efficiency_by_all_rows"], abs=0.03)
