"""Explain the out-of-memory error of a training that is watched: `amp_track.watch(…, on_oom="explain")`.

On CUDA a snapshot of the allocator is written after the error: its history goes back to the failed allocation. In
addition, and on a CPU instead, the memory plan of the model predicts the rest of the step.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import pickle
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_track.memory_plan import gpus, torch_internals
from amp_track.memory_plan.allocator import PlainAllocator
from amp_track.memory_plan.explanation import explained, task_within
from amp_track.memory_plan.live_model import (
    COMPILED,
    RECURRENT,
    Call,
    LiveModel,
    NoPlan,
    is_compiled,
    own_loss,
    without_memory,
)
from amp_track.memory_plan.replay import state_at_failure, state_at_request
from amp_track.memory_plan.snapshot_reader import NOTES, Notes, state_of
from amp_track.records.errors import summary
from amp_track.records.memory_state import MemoryState
from amp_track.records.plan import Category, Kernels, PrecisionPlan
from amp_track.results.explain import ExplainResult
from amp_track.training.amp.tensors import samples_in, tensors, unwrapped
from amp_track.training.devices import memory_history
from amp_track.training.devices.cpu import CpuDevice, process_bytes
from amp_track.training.devices.oom import is_out_of_memory, requested_bytes
from amp_track.training.layers import ForwardHook, running_node_number

if TYPE_CHECKING:
    from amp_track.memory_plan.fake_step import FakeStep

_log = logging.getLogger("amp_track")
_SOURCE = "the watched training"


class OutOfMemoryWatch:
    """Knows the model, the optimizers and the last batch of a training, to explain a failed allocation.

    Raises:
        AttributeError: torch has changed a private interface of `memory_history`.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Optimizer], device: torch.device) -> None:
        self._model = unwrapped(model)
        self._is_compiled = is_compiled(model)
        self._optimizers = list(optimizers.values())
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._kernels = _kernels(device)
        self._is_in_step = False
        self._layers = [""]
        self._step, self._forward_passes = 0, 0
        """The number of the step, and the forward passes in it."""
        self._example: Any = None
        """The arguments of the last forward pass, without memory."""
        self._method = "forward"
        self._batch: list[weakref.ref[Tensor]] = []
        self._is_separate = True
        """Whether each forward pass of the step has a backward pass."""
        self._precision = [""]
        self._failure: Notes | None = None
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._stack = ExitStack()
        weakref.finalize(self, self._stack.close)
        leaves = (each for each in _hookable(self._model) if not list(each.children()) and list(each.parameters()))
        if (leaf := next(leaves, None)) is not None:  # autocast may begin within the model, as in accelerate
            hook = leaf.register_forward_pre_hook(_Precision(self._precision, device.type))
            self._stack.callback(hook.remove)
        if not self._is_cuda:
            self._free_bytes = _free_bytes() + sum(_bytes(each) for _, each in self._tensors_of_model())
            return
        memory_history.observe(self._failed)
        if memory_history.start():
            self._stack.callback(memory_history.stop)
        if not hasattr(model, "_orig_mod"):  # the layers of a compiled model do not run one by one
            self._name_layers()

    def close(self) -> None:
        """Remove the hooks, and end the history if this object has started it."""
        if self._is_cuda:
            memory_history.forget(self._failed)
        self._stack.close()

    def began(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, method: str = "forward", step: int = 0
    ) -> None:
        """Remember the batch of a forward pass of the model in training, which this method of it makes.

        Args:
            args: the arguments of the method.
            kwargs: its keyword arguments.
            method: the name of the method.
            step: the number of the step.
        """
        if method == "forward" and self._method != "forward":
            return  # within that of the other method
        before = self._samples()
        self._is_in_step, self._method, self._failure = True, method, None
        self._batch = [weakref.ref(each) for each in tensors((args, kwargs))]
        self._example = without_memory(Call(args, dict(kwargs)))
        if not self._precision[0] or torch.is_autocast_enabled(self._device.type):  # else it may begin within the model
            self._precision[0] = _precision(self._model, self._device.type)
        if step != self._step or self._samples() != before:  # a smaller batch is another attempt
            self._step, self._forward_passes, self._is_separate = step, 0, True
        self._forward_passes += 1
        if self._forward_passes > 1:  # after a backward pass gradients are accumulated
            first_and_last = (*self._trained[:1], *self._trained[-1:])
            self._is_separate &= any(parameter.grad is not None for parameter in first_and_last)
        if len(self._layers) > 1:  # a forward pass was interrupted
            del self._layers[1:]
            memory_history.set_layer("")

    def updated(self, optimizer: Optimizer) -> None:
        """Note that an optimizer step has ended."""
        self.left()
        if not any(optimizer is known for known in self._optimizers):
            own = set(map(id, self._trained))
            if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
                self._optimizers.append(optimizer)

    def left(self) -> None:
        """Note that what follows belongs to no training step, such as an evaluation."""
        self._is_in_step, self._failure = False, None

    def explanation(self, error: BaseException | None) -> ExplainResult | None:
        """Return the explanation of the error that ended the training; None if it is another one, or not known."""
        if error is None or not is_out_of_memory(error):
            return None
        if not self._is_cuda:
            try:
                with _limits_lifted(), _predicting():  # the tensors of the step are still held
                    return self._predicted(requested_bytes(error))
            except NoPlan as reason:
                _log.warning("amp_track.watch cannot explain the out-of-memory error: %s.", reason)
                return None
        if self._failure is None or not isinstance(error, torch.OutOfMemoryError):
            _log.warning("Out of memory that PyTorch's allocator does not hold: amp_track.watch cannot explain it.")
            return None
        notes = dataclasses.replace(self._failure, owners={**dict(self._owners()), **self._failure.owners})
        data = memory_history.snapshot() | {NOTES: notes.as_dict()}
        state, source = state_of(data), _SOURCE
        file = _new_file()
        try:
            file.write_bytes(pickle.dumps(data))
            source = str(file)
        except OSError as failure:
            _log.warning("amp_track.watch could not write %s: %s", file, failure.strerror)
        plans, no_plan = self._plans_or_reason(state)
        return explained(state, source=source, plans=plans, no_plan=no_plan)

    def _predicted(self, requested: int | None) -> ExplainResult:
        """Return the explanation of a failed allocation on a CPU, by the memory plan of the model.

        Kernels of a CPU use memory that no plan shows. The request that failed tells how much was left for tensors.
        """
        step = self._fake_step()
        trace = step.trace(self._precision[0], self._samples()).with_next_step()
        state = state_at_request(trace, requested) if requested is not None else None
        known_bytes = state.capacity_bytes if state is not None else None
        capacity_bytes = min(known_bytes or self._free_bytes, self._free_bytes)
        state = dataclasses.replace(
            state or state_at_failure(trace, capacity_bytes, kind=PlainAllocator),
            capacity_bytes=capacity_bytes,
            outside_bytes=self._free_bytes - capacity_bytes,
        )
        plans = self._plans(step, capacity_bytes)
        return explained(state, source=_SOURCE, plans=plans, is_cuda=False, is_predicted=True)

    def _name_layers(self) -> None:
        names = {id(module): name for name, module in self._model.named_modules()}
        for module in _hookable(self._model):
            name = names[id(module)]
            entering, leaving = _Entering(self._layers, name), _Leaving(self._layers)
            self._stack.callback(module.register_forward_pre_hook(entering, prepend=True).remove)
            self._stack.callback(module.register_forward_hook(leaving, always_call=True).remove)
        self._stack.callback(memory_history.set_layer, "")

    def _failed(self, device: int, _: int, limit_bytes: int, free_bytes: int) -> None:
        """Note where an allocation has failed. Many failures are caught, as those of cuDNN's attempts."""
        if device != (self._device.index if self._device.index is not None else torch.cuda.current_device()):
            return
        batch = {address: (Category.BATCH.value, "") for weak in self._batch if (address := _address(weak()))}
        self._failure = Notes(
            owners=batch,
            missing=self._missing(),
            batch_size=samples_in(self._example) or None if self._is_in_step else None,
            precision=self._precision[0],
            has_16_bit_weights=_weight_dtype(self._model).itemsize == 2,
            phase="backward" if running_node_number() is not None else "",
            layer=self._layers[-1],
            device_bytes=torch.cuda.get_device_properties(device).total_memory,
            limit_bytes=min(limit_bytes, torch.cuda.memory_reserved(device) + free_bytes),
        )

    def _tensors_of_model(self) -> Iterator[tuple[str, Tensor]]:
        yield from itertools.chain(self._model.named_parameters(), self._model.named_buffers())

    def _owners(self) -> Iterator[tuple[int, tuple[str, str]]]:
        """Yield the address of each known storage, with its category and the layer of its parameter."""
        layers = {}
        for name, tensor in self._tensors_of_model():
            layer = layers[id(tensor)] = name.rpartition(".")[0]
            yield _address(tensor), (Category.PARAMETERS.value, layer)
            yield _address(tensor.grad), (Category.GRADIENTS.value, layer)
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                for tensor in tensors(state):
                    yield _address(tensor), (Category.OPTIMIZER_STATE.value, layers.get(id(parameter), ""))

    def _missing(self) -> dict[str, int]:
        """Return the bytes of the gradients that do not exist yet, by category.

        The optimizer state of a first step is left out: only the memory plan knows it.
        """
        size_bytes = sum(_bytes(parameter) for parameter in self._trained if parameter.grad is None)
        return {Category.GRADIENTS.value: size_bytes} if size_bytes else {}

    def _plans_or_reason(self, state: MemoryState) -> tuple[Sequence[PrecisionPlan], str]:
        """Return the memory plans within the memory that other tensors leave, or none and the reason."""
        if state.capacity_bytes is None:
            return (), "the capacity is unknown"
        others = other_bytes(state, self._kernels.blas_workspace_bytes)
        try:
            with _predicting():
                plans = self._plans(self._fake_step(), state.capacity_bytes - others)
        except NoPlan as reason:
            return (), str(reason)
        if plans[0].trace.recurrent:
            return (), RECURRENT
        return plans, ""

    def _fake_step(self) -> FakeStep:
        """Return the step of the model and its optimizer on the last batch. Raises NoPlan."""
        if not self._is_in_step or not self._samples():
            raise NoPlan("it failed outside of a step of the model on a batch of tensors")
        if self._is_compiled:
            raise NoPlan(COMPILED)
        if _weight_dtype(self._model) == torch.float16:
            raise NoPlan("a model with float16 weights has none")
        if len(self._optimizers) != 1:
            raise NoPlan("it is known for one optimizer only: give watch that of the model")
        (optimizer,) = self._optimizers
        model = LiveModel(self._model, optimizer, _loss_or_sum, method=self._method)
        if not self._is_separate:
            raise NoPlan("the model runs several times in a step")
        grad_accum = 2 if self._forward_passes > 1 else 1
        return model.step(self._example, as_cuda=self._is_cuda, grad_accum=grad_accum)

    def _samples(self) -> int:
        """Return the first dimension of the last batch, or 0."""
        return samples_in(self._example)

    def _plans(self, step: FakeStep, capacity_bytes: int) -> Sequence[PrecisionPlan]:
        """Return the memory plans of the step at its precision and at a lower one, within the capacity."""
        from amp_track.memory_plan.predict import plan_precision

        precision = self._precision[0]
        precisions = (precision, *(["bf16"] if precision == "fp32" else []))
        task = task_within(
            capacity_bytes,
            precisions=precisions,
            batch_size=self._samples(),
            is_cuda=self._is_cuda,
            kernels=self._kernels,
        )
        return [plan_precision(step, each, task) for each in task.precisions]


def other_bytes(state: MemoryState, blas_workspace_bytes: int) -> int:
    """Return the size of other tensors, without cuBLAS's workspaces of up to two threads, which are in a plan."""
    others = [each for each in state.holdings if each.category is Category.OTHER]
    found = sum(each.count for each in others if each.size_bytes == each.count * blas_workspace_bytes)
    return sum(each.size_bytes for each in others) - min(found, 2) * blas_workspace_bytes


def _kernels(device: torch.device) -> Kernels:
    """Return the kernels of a device."""
    if device.type != "cuda":
        return Kernels()
    properties = torch.cuda.get_device_properties(device)
    capability = None if torch.version.hip else (properties.major, properties.minor)
    threads = properties.multi_processor_count * properties.max_threads_per_multi_processor
    return gpus.kernels_of(capability, threads // gpus.THREADS_PER_BLOCK)


class _Precision(ForwardHook):
    """Notes the precision in which a layer runs if autocast is on."""

    def __init__(self, found: list[str], device_type: str) -> None:
        self._found, self._device_type = found, device_type

    def run(self, module: nn.Module, *_: Any) -> None:
        if torch.is_autocast_enabled(self._device_type):
            self._found[0] = _precision(module, self._device_type)


class _Entering(ForwardHook):
    """Names the layer of the allocations that follow."""

    def __init__(self, layers: list[str], name: str = "") -> None:
        self._layers, self._name = layers, name

    def run(self, module: nn.Module, *_: Any) -> None:
        self._layers.append(self._name)
        memory_history.set_layer(self._name)


class _Leaving(_Entering):
    """Names the layer around the one that has returned."""

    def run(self, module: nn.Module, *_: Any) -> None:
        if len(self._layers) > 1:
            self._layers.pop()
            memory_history.set_layer(self._layers[-1])


def _loss_or_sum(output: Any, _: Any) -> Tensor:
    """Return the loss that the model has computed, or the sum of its output: the loss of the training is unknown."""
    own = own_loss(output)
    if own is not None:
        return own
    return torch.stack([each.float().sum() for each in tensors(output) if each.is_floating_point()]).sum()


def _hookable(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that may have hooks."""
    return (each for each in model.modules() if not isinstance(each, torch.jit.ScriptModule))


def _weight_dtype(model: nn.Module) -> torch.dtype:
    return next((parameter.dtype for parameter in model.parameters()), torch.float32)


def _precision(model: nn.Module, device_type: str) -> str:
    """Return the precision in which a model runs now: that of autocast, or of its weights."""
    is_enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if is_enabled else _weight_dtype(model)
    return {torch.float16: "amp", torch.bfloat16: "bf16"}.get(dtype, "fp32")


@contextmanager
def _predicting() -> Iterator[None]:
    """Run no optimizer hooks of the training within the block. Raise NoPlan for any exception of its model."""
    try:
        with torch_internals.without_optimizer_hooks():
            yield
    except NoPlan:
        raise
    except Exception as error:
        raise NoPlan(f"its step cannot be predicted: {summary(error).rstrip('.')}") from error


def _new_file() -> Path:
    """Return a file of the working folder that does not exist yet."""
    names = (f"amp_track-oom-{os.getpid()}{f'-{number}' if number else ''}.pickle" for number in itertools.count())
    return next(file for name in names if not (file := Path(name).absolute()).exists())


def _address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's storage; 0 if it has none, as a sparse one."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor is not None else 0
    except (NotImplementedError, RuntimeError):
        return 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _limits() -> Iterator[tuple[int, tuple[int, int], int]]:
    """Yield the memory limits of this process: the resource, its soft and hard limit, and the bytes that count."""
    if sys.platform != "linux":
        return
    import resource

    for limit, key in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        soft_and_hard = resource.getrlimit(limit)
        held = process_bytes(key)
        if soft_and_hard[0] != resource.RLIM_INFINITY and held is not None:
            yield limit, soft_and_hard, held


def _free_bytes() -> int:
    """Return the main memory that this process may still allocate."""
    free_bytes = CpuDevice(torch.device("cpu")).free_bytes()
    return max(min([free_bytes, *(soft - held for _, (soft, _), held in _limits())]), 0)


@contextmanager
def _limits_lifted() -> Iterator[None]:
    """Raise the soft memory limits of this process to the hard ones within the block."""
    limits = list(_limits())
    if limits:
        import resource
    for limit, (_, hard), _ in limits:
        resource.setrlimit(limit, (hard, hard))
    try:
        yield
    finally:
        for limit, soft_and_hard, _ in limits:
            resource.setrlimit(limit, soft_and_hard)
