"""What a plan's result says of variants, their work, and ways to an effective batch."""

from __future__ import annotations

from plan_samples import GPU, planned, result_of, result_of_variants

from amp_track.records.plan import PlanReport, PrecisionPlan
from amp_track.results.plan import Variant


def variant(name: str, *plans: PrecisionPlan) -> Variant:
    return Variant(changes=(("finetune", name),), report=PlanReport(workload="any.py", precisions=plans))


def test_the_least_work_is_the_cheapest_then_16_bits_then_few_batches() -> None:
    result = result_of_variants(
        variant("all", planned("fp32", flops=900, half_flops=0), planned("amp", flops=900, half_flops=890)),
        variant("head", planned("fp32", flops=300, half_flops=0), planned("amp", flops=300, half_flops=290)),
        variant("none", planned("fp32", flops=100, max_batch=0)),
    )
    assert [(found.variant.name, found.plan.precision) for found in result.ways(GPU)] == [
        ("finetune=head", "amp"),
        ("finetune=head", "fp32"),
        ("finetune=all", "amp"),
        ("finetune=all", "fp32"),
    ]
    assert result.relative_work(result.variants[1].report.precisions[0]) == 300 / 900
    few, many = planned("fp32", way=(512, 1)), planned("fp32", way=(128, 4))
    result = result_of_variants(variant("many", many), variant("few", few))
    assert [found.way.grad_accum for found in result.ways(GPU)] == [1, 4]


def test_work_is_unknown_where_a_recurrent_layer_is_not_counted() -> None:
    plan, recurrent = planned("fp32"), planned("fp32", flops=None)
    result = result_of_variants(variant("all", plan), variant("head", recurrent))
    assert (result.relative_work(plan), result.relative_work(recurrent), result.half_work(recurrent)) == (1, None, None)
    assert [found.variant.name for found in result.ways(GPU)] == ["finetune=all", "finetune=head"]


def test_tf32_comes_before_fp32() -> None:
    result = result_of(planned("fp32", half_flops=0), planned("tf32", half_flops=0), planned("amp"))
    assert [found.plan.precision for found in result.ways(GPU)] == ["amp", "tf32", "fp32"]


def test_a_change_is_without_effect_if_neither_memory_nor_work_differ() -> None:
    first, same, less = (variant("", planned("fp32", flops=flops)) for flops in (9, 9, 8))
    assert same.costs_the_same_as(first)
    assert not less.costs_the_same_as(first)
