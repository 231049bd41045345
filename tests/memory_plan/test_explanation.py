"""The max batch and the ways out are those of the memory plan, as far as an estimate can be."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from workloads.choices import Choices

from amp_track.config.job import Job
from amp_track.memory_plan.allocator import PlainAllocator, allocator_kind
from amp_track.memory_plan.explanation import explained
from amp_track.memory_plan.fake_step import FakeStep
from amp_track.memory_plan.predict import plan_precision
from amp_track.memory_plan.replay import state_at_failure
from amp_track.records.memory_state import MemoryState, WayOut
from amp_track.records.plan import Category, Holding, Kernels, PlanTarget, PlanTask, PrecisionPlan
from amp_track.results.explain import ExplainResult

MIB = 2**20
CAPACITY = 40 * MIB
BATCH = 8192


def fake_step(on_cuda: bool, **options: Any) -> FakeStep:
    workload = Choices(**options)
    job = Job(workload="any", learning_rate=1e-3, batch_size=8)
    return FakeStep(job, workload, workload.example(2), as_cuda=on_cuda)


@functools.cache
def plans(*precisions: str, on_cuda: bool = False, **options: Any) -> list[PrecisionPlan]:
    target = PlanTarget(name="", capacity_bytes=CAPACITY, kernels=Kernels())
    task = PlanTask(
        precisions=precisions, batch_size=BATCH, targets=(target,), kernels=Kernels(), on_cuda=on_cuda
    )  # fmt: skip
    return [plan_precision(fake_step(on_cuda, **options), precision, task) for precision in precisions]


def explanation(*precisions: str, on_cuda: bool = False, **options: Any) -> ExplainResult:
    found = plans(*precisions, on_cuda=on_cuda, **options)
    state = state_at_failure(found[0].trace, CAPACITY, kind=allocator_kind(on_cuda=on_cuda))
    return explained(state, source="any", plans=found, is_cuda=on_cuda, is_predicted=True, happened=False)


def way(result: ExplainResult, word: str) -> WayOut:
    (found,) = (one for one in result.ways_out if word in one.change)
    return found


@pytest.mark.parametrize("on_cuda", [False, True])
def test_the_max_batch_is_that_of_the_plan(on_cuda: bool) -> None:
    result = explanation("fp32", on_cuda=on_cuda)
    largest = result.max_batch
    assert largest is not None
    assert not result.is_upper_bound
    at, above = (
        state_at_failure(
            fake_step(on_cuda).trace("fp32", size).with_next_step(), CAPACITY, kind=allocator_kind(on_cuda=on_cuda)
        )
        for size in (largest, largest + 1)
    )
    assert at.failed is None
    assert above.failed is not None


def test_checkpointing_saves_what_a_plan_with_checkpoints_saves() -> None:
    result = explanation("fp32")
    ((checkpointed,), (plain,)) = plans("fp32", checkpointing=True), plans("fp32")
    saved = plain.peak.allocated_bytes - checkpointed.peak.allocated_bytes
    found = way(result, "checkpointing of 4 blocks")
    assert found.saved_bytes == pytest.approx(saved, rel=0.02)
    assert found.max_batch == pytest.approx(checkpointed.max_batches[0].batch_size, rel=0.02)


def test_a_lower_precision_saves_what_its_plan_says() -> None:
    result = explanation("fp32", "bf16")
    fp32, bf16 = plans("fp32", "bf16")
    found = way(result, "bf16")
    assert found.saved_bytes == fp32.peak.reserved_bytes - bf16.peak.reserved_bytes
    assert found.max_batch == bf16.max_batches[0].batch_size


def test_the_estimate_without_a_plan_is_close_to_the_plan_of_bf16() -> None:
    (fp32, bf16) = plans("fp32", "bf16")
    peak = state_at_failure(fp32.trace, None, kind=PlainAllocator)
    result = explained(dataclasses.replace(peak, capacity_bytes=CAPACITY), source="any", happened=False)
    saved = fp32.peak.allocated_bytes - bf16.peak.allocated_bytes
    assert way(result, "autocast").saved_bytes == pytest.approx(saved, rel=0.35)


def test_smaller_states_save_a_part_of_the_optimizer_state() -> None:
    (plan,) = plans("fp32")
    result = explanation("fp32")
    states = dict(plan.peak.by_category)[Category.OPTIMIZER_STATE]
    assert way(result, "bfloat16 optimizer").saved_bytes == states // 2
    assert way(result, "8-bit").saved_bytes == pytest.approx(0.746 * states, rel=0.001)
    assert not [one for one in explanation("fp32", optimizer_name="sgd").ways_out if "state" in one.change]


def test_accumulation_keeps_the_effective_batch() -> None:
    result = explanation("fp32")
    assert result.max_batch is not None
    assert 2048 <= result.max_batch < 4096
    assert way(result, "per optimizer step").change == "batch 2,048, 4 batches per optimizer step"


FAILED = Holding(layer="1", operation="", category=Category.ACTIVATIONS, size_bytes=16 * MIB)


OF_24 = (
    Holding(layer="0", operation="", category=Category.ACTIVATIONS, size_bytes=48 * MIB, count=2),
    Holding(layer="0", operation="", category=Category.PARAMETERS, size_bytes=8 * MIB),
)


def state(**changes: Any) -> MemoryState:
    holdings = (
        Holding(layer="0", operation="", category=Category.ACTIVATIONS, size_bytes=32 * MIB, count=2),
        Holding(layer="0", operation="", category=Category.PARAMETERS, size_bytes=8 * MIB),
    )
    values = {
        "holdings": holdings, "failed": FAILED, "phase": "backward", "allocated_bytes": 40 * MIB,
        "reserved_bytes": 46 * MIB, "capacity_bytes": 50 * MIB, "batch_size": 16, "precision": "fp32",
    }  # fmt: skip
    return MemoryState(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "max_batch"),
    [
        ({}, 14),  # 8 MiB + 3 MiB for each sample
        ({"missing": ((Category.GRADIENTS, 8 * MIB),)}, 11),
        ({"capacity_bytes": 100 * MIB}, 15),  # fragmentation: the estimate contradicts the failure
        ({"batch_size": None}, None),
        ({"capacity_bytes": None}, None),
        ({"capacity_bytes": 7 * MIB}, 0),
        # torch records the request rounded up to 512 bytes
        ({"failed": dataclasses.replace(FAILED, size_bytes=16 * MIB + 512), "batch_size": 24, "holdings": OF_24}, 15),
    ],
)
def test_the_max_batch_of_a_snapshot_is_an_upper_bound(changes: dict[str, Any], max_batch: int | None) -> None:
    result = explained(state(**changes), source="any")
    assert (result.max_batch, result.is_upper_bound) == (max_batch, True)


@pytest.mark.parametrize("on_cuda", [False, True])
def test_no_way_out_is_smaller_than_the_max_batch(on_cuda: bool) -> None:
    result = explanation("fp32", "bf16", on_cuda=on_cuda)
    assert result.max_batch is not None
    assert len(result.ways_out) > 3
    ratios = [way.max_batch / result.max_batch for way in result.ways_out if way.max_batch is not None]
    assert len(ratios) > 2
    assert all(0.9 < ratio < 3 for ratio in ratios)


def test_a_failure_that_contradicts_the_plan_overrules_it() -> None:
    found = plans("fp32", "bf16")
    peak = state_at_failure(found[0].trace, None, kind=PlainAllocator)
    failed = dataclasses.replace(peak, capacity_bytes=CAPACITY, batch_size=1000)
    result = explained(failed, source="any", plans=found, is_cuda=False)
    assert (result.max_batch, result.is_upper_bound) == (999, True)
    assert all(way.max_batch is None for way in result.ways_out)


def test_lines_of_code_are_no_blocks_to_checkpoint() -> None:
    lines = tuple(
        Holding(layer=layer, operation="", category=Category.ACTIVATIONS, size_bytes=32 * MIB, count=2)
        for layer in ("model.py:42 forward", "layers.py:7 forward", "(loss)")
    )
    assert not [one for one in explained(state(holdings=lines), source="any").ways_out if "checkpoint" in one.change]


def test_the_first_optimizer_state_counts_if_it_failed() -> None:
    failed = Holding(layer="(optimizer)", operation="", category=Category.OPTIMIZER_STATE, size_bytes=16 * MIB)
    assert way(explained(state(failed=failed), source="any"), "bfloat16 optimizer").saved_bytes == 8 * MIB
    of_16_bit = explained(state(failed=failed, has_16_bit_weights=True), source="any")
    assert not [one for one in of_16_bit.ways_out if "optimizer states" in one.change]


def test_unused_memory_is_a_way_out_if_it_would_be_enough() -> None:
    def changes(**values: Any) -> list[str]:
        return [one.change for one in explained(state(**values), source="any").ways_out]

    def expandable(names: list[str]) -> bool:
        return any("expandable_segments" in name for name in names)

    assert not expandable(changes())
    assert expandable(changes(reserved_bytes=60 * MIB))
    assert not expandable(changes(reserved_bytes=60 * MIB, expandable_segments=True))
    assert not expandable(changes(reserved_bytes=60 * MIB, largest_free_bytes=20 * MIB))  # another stream has it


def test_an_optimizer_with_many_temporaries_is_named() -> None:
    temporaries = Holding(layer="(optimizer)", operation="adam", category=Category.TEMPORARIES, size_bytes=8 * MIB)
    result = explained(state(phase="optimizer", failed=temporaries), source="any")
    assert way(result, "foreach=False").saved_bytes == 8 * MIB


@pytest.mark.parametrize("precision", ["amp", "bf16"])
def test_16_bit_is_no_way_out_of_16_bit(precision: str) -> None:
    assert not [
        one for one in explained(state(precision=precision), source="any").ways_out if "autocast" in one.change
    ]  # fmt: skip
