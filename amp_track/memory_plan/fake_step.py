"""Run a workload's training step on fake tensors, and return the trace of its memory."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from amp_track.config.job import Job, scaled_learning_rate
from amp_track.config.precisions import Precision
from amp_track.memory_plan import cuda_emulation, torch_internals
from amp_track.memory_plan.storage_trace import StorageTracker
from amp_track.records.dtypes import LOSS
from amp_track.records.plan import Category, StepTrace
from amp_track.training.amp.step import TrainStep
from amp_track.training.amp.tensors import batch_length, check_loss, map_tensors, tensors
from amp_track.training.layers import LayerWatch
from amp_track.workload import Workload, new_model, new_optimizer, new_schedule

_HOST = torch.device("meta")
"""The device of fake batches before they are copied: any device but the one whose memory counts."""
_DEVICE = torch.device("cpu")
"""Fake CPU tensors stand for those of the device: a torch without CUDA supports no others."""


class FakeStep:
    """The training step of a resolved job, as it would run on a CUDA device or on a CPU.

    `example` is one batch (input, target) of the real shapes and dtypes. With `keeps_gradients`, those of a step are
    freed after the next forward pass, as by Lightning's Trainer, instead of before it.
    """

    def __init__(
        self,
        job: Job,
        workload: Workload,
        example: tuple[Any, Any],
        *,
        as_cuda: bool,
        keeps_gradients: bool = False,
    ) -> None:
        self._as_cuda = as_cuda
        self._job = job
        self._workload = workload
        self._example = example
        self._keeps_gradients = keeps_gradients
        self._has_fixed_sizes: set[str] = set()
        """Precisions at which a step that reads numbers was found to have the same sizes with others."""
        self._changes_masks = False
        """Whether the step writes unknown values into a mask of ones that it created."""
        self._batches = min(job.grad_accum, 2)
        """Two are enough to show the memory of accumulation: gradients are held while the next batch runs."""

    def trace(self, precision_name: str, batch_size: int, *, steps: int = 1) -> StepTrace:
        """Return the trace of the first `steps`. Exceptions of the workload's code pass through unchanged.

        Raises SizeFromValue, from the line that reads the number, if sizes depend on values.
        """
        found = self._traced(precision_name, batch_size, steps)
        if found.values_read and precision_name not in self._has_fixed_sizes:
            try:
                other = self._traced(precision_name, batch_size, steps, number=2)
                is_fixed = (other.events, other.sizes) == (found.events, found.sizes)
            except Exception:  # two may be more than a dimension has
                is_fixed = False
            if not is_fixed:
                self._traced(precision_name, batch_size, steps, number=None)
            self._has_fixed_sizes.add(precision_name)
        return found

    def _traced(self, precision_name: str, batch_size: int, steps: int, *, number: int | None = 1) -> StepTrace:
        if not self._changes_masks:
            try:
                return self._traced_with(torch_internals.MasksOfOnes(), precision_name, batch_size, steps, number)
            except torch_internals.ConstantChanged:
                self._changes_masks = True
        return self._traced_with(contextlib.nullcontext(), precision_name, batch_size, steps, number)

    def _traced_with(
        self,
        constants: contextlib.AbstractContextManager[object],
        precision_name: str,
        batch_size: int,
        steps: int,
        number: int | None,
    ) -> StepTrace:
        precision = Precision.named(precision_name)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet())
            stack.enter_context(torch_internals.fake_tensors())
            stack.enter_context(torch_internals.every_update_made())
            if self._as_cuda:
                stack.enter_context(torch_internals.foreach_optimizers())
                stack.enter_context(torch_internals.autocast_of_cuda_on_cpu())
            with torch_internals.SmallConstants():
                model = precision.prepare(new_model(self._workload)).train()
            if self._job.channels_last:
                model = model.to(memory_format=torch.channels_last)
            layers = LayerWatch(model)
            layers.outside_of_layers(LOSS)
            tracker = StorageTracker(_DEVICE.type, layers.layer, as_cuda=self._as_cuda, number=number)
            _add_model(model, tracker)
            with self._kernels(precision), constants, tracker, layers.watching():
                step = self._train(model, precision, tracker, layers, batch_size, steps)  # kept: or its storages die
            modules = step.model.named_modules()
            recurrent = tuple(name for name, module in modules if isinstance(module, nn.RNNBase))
            return StepTrace(
                precision=precision_name,
                batch_size=batch_size,
                storages=tuple(tracker.storages),
                events=_with_deaths_in_order(tracker.events),
                phases=tuple(tracker.phases),
                recurrent=recurrent,
                values_read=tuple(tracker.values_read),
                grouped_channels_last=self._job.channels_last and tracker.has_grouped_convolutions,
                samples=batch_size * self._batches,
                flops=None if recurrent or tracker.flops is None else tracker.flops // steps,
                half_flops=tracker.half_flops // steps,
            )

    def _kernels(self, precision: Precision) -> contextlib.AbstractContextManager[None]:
        if not self._as_cuda:
            return torch_internals.kernels(cuda_emulation.REAL_TENSOR_KERNELS)
        return torch_internals.kernels(cuda_emulation.replacements(precision.autocast_dtype))

    def _train(
        self,
        model: nn.Module,
        precision: Precision,
        tracker: StorageTracker,
        layers: LayerWatch,
        batch_size: int,
        steps: int,
    ) -> TrainStep:
        tracker.begin("model", 0)
        kept: list[Tensor] = []
        optimizer = new_optimizer(self._workload, model, scaled_learning_rate(self._job, self._workload.batch_size))

        def loss(output: Any, target: Any) -> Tensor:
            """Compute the workload's loss. Storages alive after it are activations, which the backward pass needs."""
            value = check_loss(self._workload.loss(output, target))
            kept.clear()
            tracker.assign_living(Category.ACTIVATIONS)
            tracker.begin("backward", step.steps)
            return value

        def before_update(*_: Any) -> None:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            tracker.assign((p.grad for p in parameters if p.grad is not None), Category.GRADIENTS)
            tracker.begin("optimizer", step.steps)

        optimizer.register_step_pre_hook(before_update)  # ahead of the hook of TrainStep that makes momentum buffers
        step = TrainStep(
            model,
            optimizer,
            loss,
            precision,
            schedule=new_schedule(self._workload, steps),
            max_grad_norm=self._job.max_grad_norm,
            channels_last=self._job.channels_last,
        )
        for _ in range(steps):
            for batch in range(1, self._batches + 1):
                tracker.begin("forward", step.steps)
                if self._keeps_gradients and batch == 1:
                    kept += _kept_gradients(optimizer, model, tracker, layers)
                step(*self._batch(batch_size, tracker), share=1 / self._batches, update=batch == self._batches)
            tracker.assign(tensors(list(optimizer.state.values())), Category.OPTIMIZER_STATE)
        return step

    def _batch(self, batch_size: int, tracker: StorageTracker) -> tuple[Any, Any]:
        """Return a fake batch on the host, with the shapes of the workload's example."""
        samples = batch_length(self._example)

        def resized(tensor: Tensor) -> Tensor:
            shape = (batch_size, *tensor.shape[1:]) if tensor.dim() and tensor.shape[0] == samples else tensor.shape
            return torch.empty(shape, dtype=tensor.dtype, device=_HOST if self._as_cuda else _DEVICE)

        input, target = map_tensors(resized, self._example)
        tracker.assign(tensors((input, target)), Category.BATCH)
        return input, target


def _kept_gradients(
    optimizer: torch.optim.Optimizer, model: nn.Module, tracker: StorageTracker, layers: LayerWatch
) -> list[Tensor]:
    """Return the gradients of the step before. They exist in the first step, too, so that all steps are alike."""
    names = {parameter: name.rpartition(".")[0] for name, parameter in model.named_parameters()}
    gradients = []
    for parameter in (each for group in optimizer.param_groups for each in group["params"] if each.requires_grad):
        layers.outside_of_layers(names.get(parameter, ""))
        gradients.append(torch.empty_like(parameter))
    layers.outside_of_layers(LOSS)
    tracker.assign(gradients, Category.GRADIENTS)
    return gradients


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Collect the garbage of the last trace, and none within the block, so that only the step frees storages.

    Older objects are not scanned, which takes seconds in a process that has many.
    """
    gc.collect(1)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _with_deaths_in_order(events: list[int]) -> tuple[int, ...]:
    """Sort consecutive deaths of storages by the order of their births.

    Autocast frees its cached weights in arbitrary order; the allocator's free blocks are the same afterwards.
    """
    runs = itertools.groupby(events, key=lambda event: event < 0)
    return tuple(event for is_death, run in runs for event in (sorted(run, reverse=True) if is_death else run))


def _add_model(model: nn.Module, tracker: StorageTracker) -> None:
    """Record weights and buffers in the order in which `model.to(device)` moves them: children first."""

    def add(module: nn.Module, name: str) -> None:
        for child, of_child in module.named_children():
            add(of_child, f"{name}.{child}" if name else child)
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tracker.add(tensor, Category.PARAMETERS, name)

    add(model, "")
