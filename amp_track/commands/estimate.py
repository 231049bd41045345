"""estimate: predict the memory of a model's training step from Python objects, in this process."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_track.config.precisions import Precision
from amp_track.memory_plan import gpus, live_model, torch_internals
from amp_track.memory_plan.allocator import allocator_kind
from amp_track.memory_plan.fake_step import FakeStep
from amp_track.memory_plan.live_model import Call, LiveModel, MakeOptimizer, NoPlan
from amp_track.memory_plan.predict import Prediction
from amp_track.memory_plan.replay import fits, on_device, predict_peak
from amp_track.records.errors import AmpTrackError, BadInput, describe_type
from amp_track.records.plan import LARGEST_PLANNED, Kernels, PlannedMaxBatch, PlanTarget, StepTrace
from amp_track.records.result import MODEL
from amp_track.results.estimate import Estimate
from amp_track.targets.base import cannot_be_planned
from amp_track.training.amp import random_state
from amp_track.training.amp.tensors import arguments, samples_in, unwrapped
from amp_track.workload import is_pair

Loss = Callable[[Any, Any], Tensor]


def estimate(
    model: nn.Module | Callable[[], nn.Module],
    example: Any,
    optimizer: Optimizer | MakeOptimizer | None,
    loss: Loss | None,
    *,
    precision: str | Precision,
    on_cuda: bool,
    **settings: Any,
) -> Estimate:
    """Predict the memory of a training step. Raises as `amp_track.estimate` does.

    Args:
        model: as for `amp_track.estimate`, as all others.
        example: one batch.
        optimizer: the optimizer, or what makes it.
        loss: the loss; None for the default.
        precision: the precision, or its name.
        on_cuda: whether to predict for CUDA.
        **settings: those of `LiveModel.step`.
    """
    try:
        name = Precision.named(precision).name
    except ValueError as error:
        raise BadInput(str(error)) from None
    if loss is not None and not callable(loss):
        raise BadInput(f"loss: got {loss!r}, expected a function of output and target, such as torch.nn.MSELoss()")
    with _planning("model"):
        module = _built(model)
        if live_model.is_compiled(module):
            raise BadInput(f"model: {live_model.COMPILED}. Give the module before torch.compile.")
        module = unwrapped(module)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise BadInput("model: no parameter requires a gradient, so a step trains nothing. Unfreeze some.")
        is_lightning = live_model.is_lightning(module)
        if is_lightning and loss is not None:
            raise BadInput("loss: a LightningModule has its own, in training_step. Leave it out.")
        call, target = _call(module, example)
        method = "training_step" if is_lightning else "forward"
        live = LiveModel(module, _checked(optimizer, module), loss, method=method)
        step = live.step(call, target, as_cuda=on_cuda, **settings)
    return _Predictor(step, name, samples_in(call), on_cuda=on_cuda).estimate()


class _Predictor:
    """Predicts peaks of a step at one precision. Traces are kept."""

    def __init__(self, step: FakeStep, precision: str, batch_size: int, *, on_cuda: bool) -> None:
        self._step, self._precision, self._batch_size, self._on_cuda = step, precision, batch_size, on_cuda
        self._kind = allocator_kind(on_cuda=on_cuda)
        self._trace_at = functools.cache(self._traced)

    def _traced(self, batch_size: int) -> StepTrace:
        with _planning("model"):
            trace = self._step.trace(self._precision, batch_size).with_next_step()
        if trace.recurrent and self._on_cuda:
            layers = ", ".join(name or MODEL for name in trace.recurrent)
            raise BadInput(
                f"{layers}: {live_model.RECURRENT}. Measure with amp-track max-batch, or predict for a CPU with "
                "on_cuda=False."
            )
        return trace

    def estimate(self) -> Estimate:
        trace = on_device(self._trace_at(self._batch_size), gpus.USUAL_KERNELS if self._on_cuda else Kernels())
        peak = predict_peak(trace, kind=self._kind)
        read = ", ".join(trace.values_read)
        return Estimate(
            precision=self._precision,
            batch_size=self._batch_size,
            peak_bytes=peak.reserved_bytes,
            peak_allocated_bytes=peak.allocated_bytes,
            by_kind={str(category): size for category, size in peak.by_category},
            by_layer=dict(peak.by_layer),
            notes=(f"{read}: reads a number from a tensor; the plan assumes 1.",) if read else (),
            predictor=self,
        )

    def fits(self, device: str | int) -> bool:
        target = self._target(device)
        trace = self._trace_on(target, self._batch_size)
        return fits(trace, trace.sizes, target.safe_bytes, kind=self._kind)

    def max_batch(self, device: str | int) -> PlannedMaxBatch:
        target = self._target(device)
        prediction = Prediction(functools.partial(self._trace_on, target), kind=self._kind)
        return prediction.max_batch(target, most=LARGEST_PLANNED)

    def _trace_on(self, target: PlanTarget, batch_size: int) -> StepTrace:
        return on_device(self._trace_at(batch_size), target.kernels if self._on_cuda else Kernels())

    def _target(self, device: str | int) -> PlanTarget:
        """Return the target of a GPU's name, a size or bytes. Raises BadInput."""
        try:
            if isinstance(device, bool) or (isinstance(device, str) and device.isdigit()):  # 4090 names a GPU
                raise TypeError(device)
            return gpus.target_of_size(device if isinstance(device, str) else str(operator.index(device)))
        except (TypeError, ValueError):
            if not isinstance(device, str) or not self._on_cuda:
                name = "the name of a GPU, " if self._on_cuda else ""
                raise BadInput(
                    f"device: got {device!r}, expected {name}a size such as 6GiB, or a number of bytes, at least 1 MiB"
                ) from None
        target = gpus.gpu_named(device, flag="device", otherwise="give a size such as 6GiB").target()
        if reason := dict(target.lacks).get(self._precision):
            raise BadInput(f"{self._precision} {reason}. Estimate at another precision.")
        return target


@contextmanager
def _planning(target: str) -> Iterator[None]:
    """Run code of the user without changes of the process. Raises BadInput if it fails on fake tensors."""
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            random_state.seeded(0),
            torch_internals.without_optimizer_hooks(),
            mock.patch.object(torch.cuda, "is_available", return_value=False),  # an optimizer would initialize it
        ):
            yield
    except AmpTrackError:
        raise
    except NoPlan as error:
        raise BadInput(f"The model has no memory plan: {error}.") from error
    except Exception as error:
        raise cannot_be_planned(error, target) from error


def _built(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the model, built without memory if it is a function."""
    if isinstance(model, nn.Module):
        return model
    built: object = None
    if callable(model):
        with torch_internals.fake_tensors(), torch_internals.SmallConstants():
            built = model()
    if not isinstance(built, nn.Module):
        found = f"a function that returned {describe_type(built)}" if callable(model) else describe_type(model)
        raise BadInput(f"model: got {found}, expected a torch.nn.Module or a function that returns one")
    return built


def _checked(optimizer: Optimizer | MakeOptimizer | None, model: nn.Module) -> Optimizer | MakeOptimizer | None:
    """Return the optimizer, or what makes it. Raises BadInput if it is neither."""
    if isinstance(optimizer, Optimizer) or (optimizer is None and live_model.is_lightning(model)):
        return optimizer
    if not callable(optimizer):
        raise BadInput(
            f"optimizer: got {describe_type(optimizer)}, expected an optimizer of the model or a class such as "
            "torch.optim.AdamW"
        )
    make = optimizer

    def checked(parameters: Iterable[nn.Parameter]) -> Optimizer:
        given = list(parameters)
        made: object = make(given)
        if not isinstance(made, Optimizer):
            raise BadInput(f"optimizer: it returned {describe_type(made)}, expected a torch.optim.Optimizer")
        known = set(map(id, given))
        if any(id(each) not in known for group in made.param_groups for each in group["params"]):
            raise BadInput(
                "optimizer: the function made one of other parameters than those it was given. Use its argument, or "
                "give the optimizer itself."
            )
        return made

    return checked


def _call(model: nn.Module, example: Any) -> tuple[Call, Any]:
    """Return the forward pass of a batch, and its target, without memory. Raises BadInput if it is no batch."""
    batch, takes_any = live_model.without_memory(example), live_model.is_lightning(model)
    if not samples_in(batch) or not (takes_any or is_pair(batch) or isinstance(batch, Tensor | Mapping)):
        raise BadInput(
            f"example: got {describe_type(example)}, expected one batch, (input, target) or a tensor or mapping that "
            "the model takes: tensors whose first dimension is the batch, at least 1"
        )
    if takes_any:
        return _training_step(model, batch), None
    input, target = batch if is_pair(batch) else (batch, None)
    args, kwargs = arguments(model, input)
    return Call(args, dict(kwargs)), target


def _training_step(model: Any, batch: Any) -> Call:
    """Return the call of a LightningModule's training step. Raises NoPlan if it steps its optimizers itself."""
    if not model.automatic_optimization:
        raise NoPlan("it steps its optimizers itself (automatic_optimization is False)")
    return Call((batch, 0)[: len(inspect.signature(model.training_step).parameters)], {})
