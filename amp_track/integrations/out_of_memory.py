"""Explain the out-of-memory error of a training that is watched: `amp_track.watch(…, on_oom="explain")`.

On CUDA a snapshot of the allocator is written when an allocation fails. In addition, and on a CPU instead, the memory
plan of the model predicts the rest of the step.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import logging
import os
import pickle
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_track.config.job import Job
from amp_track.memory_plan import gpus
from amp_track.memory_plan.allocator import PlainAllocator
from amp_track.memory_plan.explanation import explained
from amp_track.memory_plan.replay import state_at_failure, state_at_request
from amp_track.memory_plan.snapshot_reader import NOTES, Notes, read_snapshot
from amp_track.records.errors import summary
from amp_track.records.plan import Category, PlanTarget, PlanTask, PrecisionPlan
from amp_track.results.explain import ExplainResult
from amp_track.training.amp.tensors import batch_length, map_tensors, tensors
from amp_track.training.devices import memory_history
from amp_track.training.devices.cpu import CpuDevice, process_bytes
from amp_track.training.devices.oom import is_out_of_memory, requested_bytes
from amp_track.training.layers import running_node_number
from amp_track.workload import Workload

if TYPE_CHECKING:
    from amp_track.memory_plan.fake_step import FakeStep

_log = logging.getLogger("amp_track")
_SOURCE = "the watched training"
_OPTIMIZER = "optimizer"
_FORWARD = "forward"


class OutOfMemoryWatch:
    """Knows the model, the optimizers and the last batch of a training, to explain a failed allocation."""

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Optimizer], device: torch.device) -> None:
        self.file: Path | None = None
        """The snapshot of the last failed allocation on CUDA."""
        self._model = _base(model)
        self._optimizers = list(optimizers.values())
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._phase = ""
        self._layers = [""]
        self._batch: list[weakref.ref[Tensor]] = []
        self._example: Any = None
        self._precision = ""
        self._accumulates = False
        self._stack = ExitStack()
        if self._is_cuda:
            if memory_history.start():
                self._stack.callback(memory_history.stop)
            memory_history.observe(self._failed)
            if self._model is model:  # the layers of a compiled model do not run one by one
                self._name_layers()
        else:
            # What a failed allocation leaves may not suffice for these imports.

            import amp_track.memory_plan.fake_step  # noqa: F401

            self._free_bytes = _free_bytes() + sum(_bytes(each) for _, each in self._tensors_of_model())
        for optimizer in self._optimizers:
            for hook in (optimizer.register_step_pre_hook(self._in_update),):
                self._stack.callback(hook.remove)

    def close(self) -> None:
        """Remove the hooks, and end the history if this object has started it."""
        self._stack.close()

    def began(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember the batch of a forward pass of the model."""
        self._phase = _FORWARD
        self._batch = [weakref.ref(each) for each in tensors((args, kwargs))]
        self._example = map_tensors(lambda each: torch.empty_like(each, device="meta"), (args, dict(kwargs)))
        self._precision = _precision(self._model, self._device)
        self._accumulates = any(parameter.grad is not None for parameter in self._model.parameters())

    def explanation(self, error: BaseException | None) -> ExplainResult | None:
        """Return the explanation of the error that ended the training; None if it is another one.

        On CUDA, a failed allocation that was caught is explained, too.
        """
        if self.file is not None:
            state = read_snapshot(self.file)
            return explained(state, source=str(self.file), plans=self._plans_or_none(state.capacity_bytes))
        if self._is_cuda or error is None or not is_out_of_memory(error):
            return None
        with _limits_lifted():  # the tensors of the step are still held
            return self._predicted(requested_bytes(error))

    def _predicted(self, requested: int | None) -> ExplainResult:
        """Return the explanation of a failed allocation on a CPU, by the memory plan of the model.

        Kernels of a CPU use memory that no plan shows. The request that failed tells how much was left for tensors.
        """
        step = self._fake_step()
        trace = step.trace(self._precision, self._samples()).with_next_step()
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

    def _in_update(self, *_: Any) -> None:
        self._phase = _OPTIMIZER

    def _name_layers(self) -> None:
        for name, module in self._model.named_modules():
            entering, leaving = _Entering(self._layers, name), _Leaving(self._layers)
            self._stack.callback(module.register_forward_pre_hook(entering, prepend=True).remove)
            self._stack.callback(module.register_forward_hook(leaving, always_call=True).remove)
        self._stack.callback(memory_history.set_layer, "")

    def _failed(self, device: int, _: int, limit_bytes: int, free_bytes: int) -> None:
        """Write a snapshot with notes, before the exception of the failed allocation is raised."""
        if device != (self._device.index if self._device.index is not None else torch.cuda.current_device()):
            return
        is_backward = running_node_number() is not None
        notes = Notes(
            owners=dict(self._owners()),
            missing=self._missing(),
            batch_size=self._samples() if self._example is not None else None,
            precision=self._precision,
            phase="backward" if is_backward else self._phase,
            layer="" if is_backward or self._phase == _OPTIMIZER else self._layers[-1],
            device_bytes=torch.cuda.get_device_properties(device).total_memory,
            limit_bytes=min(limit_bytes, torch.cuda.memory_reserved(device) + free_bytes),
        )
        file = Path(f"amp_track-oom-{os.getpid()}.pickle").absolute()
        with file.open("wb") as opened:
            pickle.dump(memory_history.snapshot() | {NOTES: notes.as_dict()}, opened)
        self.file = file
        _log.warning("Out of memory: %s has what held it. amp-track explain shows it.", file)

    def _samples(self) -> int:
        """Return the first dimension of the last batch."""
        return batch_length(self._example)

    def _tensors_of_model(self) -> Iterator[tuple[str, Tensor]]:
        yield from itertools.chain(self._model.named_parameters(), self._model.named_buffers())

    def _owners(self) -> Iterator[tuple[int, tuple[str, str]]]:
        """Yield the address of each known storage, with its category and the layer of its parameter."""
        layers = {}
        for name, tensor in self._tensors_of_model():
            layer = layers[id(tensor)] = name.rpartition(".")[0]
            yield _address(tensor), (Category.PARAMETERS.value, layer)
            if tensor.grad is not None:
                yield _address(tensor.grad), (Category.GRADIENTS.value, layer)
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                for tensor in tensors(state):
                    yield _address(tensor), (Category.OPTIMIZER_STATE.value, layers.get(id(parameter), ""))
        for weak in self._batch:
            if (alive := weak()) is not None:
                yield _address(alive), (Category.BATCH.value, "")

    def _missing(self) -> dict[str, int]:
        """Return the bytes of the gradients that do not exist yet, by category.

        The optimizer state of a first step is left out: only the memory plan knows it.
        """
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        size_bytes = sum(_bytes(parameter) for parameter in trained if parameter.grad is None)
        return {Category.GRADIENTS.value: size_bytes} if size_bytes else {}

    def _plans_or_none(self, capacity_bytes: int | None) -> Sequence[PrecisionPlan]:
        """Return the memory plans, or none if there is no capacity, or the model cannot be planned."""
        if capacity_bytes is None:
            return ()
        try:
            plans = self._plans(self._fake_step(), capacity_bytes)
            return () if plans[0].trace.recurrent else plans  # cuDNN keeps more of such a layer than is planned
        except Exception as failure:  # of any model; the snapshot tells enough without
            _log.info("no memory plan of the watched model: %s", summary(failure))
            return ()

    def _fake_step(self) -> FakeStep:
        """Return the step of the model and its optimizer on the last batch. Raises whatever the model raises."""
        from amp_track.memory_plan.fake_step import FakeStep

        (optimizer,) = self._optimizers  # several ones train in an order that is unknown here
        input = _one_argument(self._model, *self._example)
        job = Job(
            workload=_SOURCE, batch_size=self._samples(), learning_rate=1e-3, grad_accum=1 + self._accumulates
        )  # fmt: skip
        target = torch.empty(self._samples(), device="meta")
        return FakeStep(job, _Watched(self._model, optimizer), (input, target), as_cuda=self._is_cuda)

    def _plans(self, step: FakeStep, capacity_bytes: int) -> Sequence[PrecisionPlan]:
        """Return the memory plans of the step at its precision and at a lower one, within the capacity."""
        from amp_track.memory_plan.predict import plan_precision

        workspace_bytes = gpus.blas_workspace_bytes() if self._is_cuda else 0
        task = PlanTask(
            precisions=(self._precision, *(["bf16"] if self._precision == "fp32" else [])),
            batch_size=self._samples(),
            targets=(PlanTarget(name="", capacity_bytes=capacity_bytes, blas_workspace_bytes=workspace_bytes),),
            blas_workspace_bytes=workspace_bytes,
            on_cuda=self._is_cuda,
        )
        return [plan_precision(step, precision, task) for precision in task.precisions]


class _Entering:
    """A hook that names the layer of the allocations that follow. A copy of the model has one without effect."""

    def __init__(self, layers: list[str], name: str = "") -> None:
        self._layers, self._name = layers, name

    def __call__(self, *_: Any) -> None:
        self._layers.append(self._name)
        memory_history.set_layer(self._name)

    def __reduce__(self) -> Any:
        return type(self), ([],)


class _Leaving(_Entering):
    """A hook that names the layer around the one that has returned."""

    def __call__(self, *_: Any) -> None:
        if len(self._layers) > 1:
            self._layers.pop()
            memory_history.set_layer(self._layers[-1])


class _Watched(Workload):
    """A watched model and its optimizer as a workload, whose loss is the model's own or the sum of its output."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def model(self) -> nn.Module:
        """Return a copy of the model, without memory within `fake_tensors`."""
        memo: dict[int, Any] = {}
        for module in self._model.modules():
            held = itertools.chain(vars(module).values(), module._parameters.values(), module._buffers.values())
            for tensor in held:
                if isinstance(tensor, Tensor):
                    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return copy.deepcopy(self._model, memo)

    def train_data(self) -> Any:
        raise NotImplementedError("a plan has an example instead")

    eval_data = train_data

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
        """Return an optimizer of the same kind, with the same groups of parameters."""
        copies = dict(zip(map(id, self._model.parameters()), parameters, strict=True))
        groups = [
            group | {"params": [copies[id(parameter)] for parameter in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        defaults = self._optimizer.defaults
        if defaults.get("fused"):  # it has no temporary tensors, as the implementation for one tensor nearly has
            groups = [group | {"fused": None, "foreach": False} for group in groups]
            defaults = defaults | {"fused": None, "foreach": False}
        known = inspect.signature(type(self._optimizer)).parameters
        return type(self._optimizer)(groups, **{name: value for name, value in defaults.items() if name in known})

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss that the model has computed, or the sum of its output."""
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, Tensor):
            return own
        return torch.stack([each.float().sum() for each in tensors(output) if each.is_floating_point()]).sum()


def _base(model: nn.Module) -> nn.Module:
    """Return the model within DistributedDataParallel and `torch.compile`."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return getattr(model, "_orig_mod", model)


def _one_argument(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a forward pass as the input of a batch: one argument, or keywords."""
    if len(args) == 1 and not kwargs:
        return args[0]
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


def _precision(model: nn.Module, device: torch.device) -> str:
    """Return the precision of the forward pass that begins: that of autocast, or of the weights."""
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return {torch.float16: "amp", torch.bfloat16: "bf16"}.get(dtype, "fp32")


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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
