"""Plans of a made-up workload on a GPU."""

from __future__ import annotations

import dataclasses

from batch_search.traces import MIB, step_of

from amp_track.memory_plan.replay import predict_peak
from amp_track.records.plan import Kernels, PlannedMaxBatch, PlanReport, PlanTarget, PrecisionPlan, Way
from amp_track.results.plan import PlanResult, Variant

GPU = PlanTarget(name="A card", capacity_bytes=2**30, kernels=Kernels(), is_gpu=True, lacks=(("bf16", "too old"),))


def planned(
    precision: str,
    *,
    max_batch: int = 640,
    workspace_mib: int = 0,
    flops: int | None = 100,
    half_flops: int = 90,
    way: tuple[int, int] = (512, 2),
) -> PrecisionPlan:
    """Return a plan with a max batch, which is 0 if nothing fits, and a way to an effective batch."""
    trace = step_of(8, [20 * MIB]).with_next_step()
    trace = dataclasses.replace(trace, samples=8, flops=flops, half_flops=half_flops)
    peak = predict_peak(trace)
    more = dataclasses.replace(peak, reserved_bytes=peak.reserved_bytes + workspace_mib * MIB)
    found = PlannedMaxBatch(
        target=GPU.name, batch_size=max_batch, safe_batch_size=max(max_batch - 40, 0), bound="memory",
        most_batch_size=max_batch and max_batch + 60, peak=peak if max_batch else None,
        at_one_bytes=None if max_batch else 2**31,
        way=Way(micro_batch=way[0], grad_accum=way[1], peak=peak) if max_batch else None,
    )  # fmt: skip
    return PrecisionPlan(
        precision=precision, batch_size=8, peak=peak, peak_with_workspaces=more, trace=trace,
        max_batches=() if precision in dict(GPU.lacks) else (found,),
    )  # fmt: skip


def result_of(*plans: PrecisionPlan, variants: int = 1, effective_batch_size: int | None = None) -> PlanResult:
    """Return the result of variants that cost the same."""
    changes = [() if index == 0 else (("depth", str(index)),) for index in range(variants)]
    return result_of_variants(
        *(Variant(changes=change, report=PlanReport(workload="any.py", precisions=plans)) for change in changes),
        effective_batch_size=effective_batch_size,
    )


def result_of_variants(*variants: Variant, effective_batch_size: int | None = 512) -> PlanResult:
    return PlanResult(variants=variants, targets=(GPU,), effective_batch_size=effective_batch_size)
