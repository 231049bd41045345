"""What a plan's result says of variants, their work, and ways to an effective batch."""

from __future__ import annotations

import dataclasses

from batch_search.traces import MIB, step_of

from amp_track.memory_plan.replay import predict_peak
from amp_track.records.plan import PlannedMaxBatch, PlanReport, PlanTarget, PrecisionPlan, Way
from amp_track.results.plan import PlanResult, Variant

TARGET = PlanTarget(name="6GiB", capacity_bytes=6 * 2**30, blas_workspace_bytes=0)


def planned(
    precision: str, *, flops: int, half_flops: int = 0, way: tuple[int, int] | None = (128, 4)
) -> PrecisionPlan:
    trace = dataclasses.replace(step_of(8, [MIB]), samples=8, flops=flops, half_flops=half_flops)
    peak = predict_peak(trace)
    found = Way(micro_batch=way[0], grad_accum=way[1], peak=peak) if way is not None else None
    batch = way[0] if way else 0
    max_batch = PlannedMaxBatch(
        target="6GiB",
        batch_size=batch,
        safe_batch_size=batch,
        most_batch_size=batch,
        bound="memory",
        peak=peak,
        at_one_bytes=None,
        way=found,
    )
    return PrecisionPlan(
        precision=precision, batch_size=8, peak=peak, peak_with_workspaces=peak, trace=trace, max_batches=(max_batch,)
    )


def result_of(*variants: tuple[str, list[PrecisionPlan]]) -> PlanResult:
    return PlanResult(
        variants=tuple(
            Variant(changes=(("finetune", name),), report=PlanReport(workload="any", precisions=tuple(plans)))
            for name, plans in variants
        ),
        targets=(TARGET,),
        effective_batch_size=512,
    )


def test_the_least_work_is_the_cheapest_then_16_bits_then_few_batches() -> None:
    result = result_of(
        ("all", [planned("fp32", flops=900), planned("amp", flops=900, half_flops=890, way=(512, 1))]),
        ("head", [planned("fp32", flops=300, way=(256, 2)), planned("amp", flops=300, half_flops=290)]),
        ("none", [planned("fp32", flops=100, way=None)]),
    )
    assert [(found.variant.name, found.plan.precision) for found in result.ways(TARGET)] == [
        ("finetune=head", "amp"),
        ("finetune=head", "fp32"),
        ("finetune=all", "amp"),
        ("finetune=all", "fp32"),
    ]
    assert result.relative_work(result.variants[1].report.precisions[0]) == 300 / 900


def test_work_is_unknown_where_a_recurrent_layer_is_not_counted() -> None:
    plan = planned("fp32", flops=900)
    recurrent = dataclasses.replace(plan, trace=dataclasses.replace(plan.trace, flops=None))
    result = result_of(("all", [plan]), ("head", [recurrent]))
    assert result.relative_work(plan) == 1
    assert (result.relative_work(recurrent), result.half_work(recurrent)) == (None, None)
    assert [found.variant.name for found in result.ways(TARGET)] == ["finetune=all", "finetune=head"]


def test_tf32_comes_before_fp32() -> None:
    result = result_of(
        ("all", [planned("fp32", flops=9), planned("tf32", flops=9), planned("amp", flops=9, half_flops=8)])
    )
    assert [found.plan.precision for found in result.ways(TARGET)] == ["amp", "tf32", "fp32"]


def test_a_change_is_without_effect_if_neither_memory_nor_work_differ() -> None:
    first, same, less = (
        Variant(changes=(), report=PlanReport(workload="any", precisions=(plan,)))
        for plan in (planned("fp32", flops=9), planned("fp32", flops=9), planned("fp32", flops=8))
    )
    assert same.costs_the_same_as(first)
    assert not less.costs_the_same_as(first)
