"""The memory of real steps on a CPU, as torch's profiler sees it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from amp_track.memory_plan.torch_internals import operations_with_kernel
from amp_track.training.amp.step import TrainStep
from amp_track.training.amp.tensors import map_tensors
from amp_track.workload import Workload


def profiled_peak(run: Callable[[], object]) -> int:
    """Return the most bytes that torch's profiler sees allocated during a call.

    What a kernel frees before it returns, such as the copies that a convolution makes in a layout of its own, is left
    out: no tensor holds it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    allocations: list[tuple[int, int, int, int]] = []
    for root in profiled.profiler.kineto_results.experimental_event_tree():  # type: ignore[union-attr]
        collect(root, 0, allocations)
    return most_alive_after_kernels(sorted(allocations))


def profiled_training(workload: Workload, precision: str, batch_size: int) -> int:
    """Return that number for two steps of a workload, with its model."""
    input, target = workload.example(batch_size)

    def train() -> None:
        model = workload.model().train()
        step = TrainStep(model, workload.optimizer(model.parameters(), 1e-3), workload.loss, precision)
        for _ in range(2):
            step(map_tensors(torch.clone, input), map_tensors(torch.clone, target))

    return profiled_peak(train)


def most_alive_after_kernels(allocations: list[tuple[int, int, int, int]]) -> int:
    """Return the largest sum of allocations that outlive the kernel that asked for them."""
    freed_at: dict[int, int] = {}
    alive = most = 0
    lasting = []
    for time, size, address, end_of_kernel in reversed(allocations):
        if size < 0:
            freed_at[address] = time
        elif freed_at.pop(address, end_of_kernel + 1) <= end_of_kernel:
            continue
        lasting.append((size, address))
    known: set[int] = set()
    for size, address in reversed(lasting):
        if size > 0:
            known.add(address)
        elif address not in known:
            continue
        else:
            known.remove(address)
        alive += size
        most = max(most, alive)
    return most


def collect(event: Any, end_of_kernel: int, allocations: list[tuple[int, int, int, int]]) -> None:
    """Append (time, bytes, address, when the kernel returns that asked for them) for all below an event."""
    if event.tag == torch._C._profiler._EventType.Allocation:
        fields = event.extra_fields
        allocations.append((event.start_time_ns, fields.alloc_size, fields.ptr, end_of_kernel))
    if event.tag == torch._C._profiler._EventType.TorchOp and not end_of_kernel and is_kernel(event.name):
        end_of_kernel = event.end_time_ns
    for child in event.children:
        collect(child, end_of_kernel, allocations)


@functools.cache
def composites() -> set[str]:
    """Return the operations that are made of others, which tensors outlive."""
    return {f"aten::{name.partition('.')[0]}" for name in operations_with_kernel("CompositeImplicitAutograd")}


def is_kernel(name: str) -> bool:
    """Return whether an event is an operation that is not made of others: what it calls belongs to it."""
    return name.startswith("aten::") and name not in composites()
