"""A model of this process as a workload: its training step is traced on copies of it that have no memory."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Number
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_track.config.job import Job
from amp_track.memory_plan import torch_internals
from amp_track.memory_plan.fake_step import FakeStep
from amp_track.records.errors import BadInput, summary
from amp_track.training.amp.tensors import map_tensors, samples_in, unwrapped
from amp_track.workload import Workload

COMPILED = "torch.compile changes what a step allocates"
RECURRENT = "cuDNN keeps more of a recurrent layer than is known"
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class NoPlan(Exception):
    """The memory plan of a model is impossible; the message is the reason."""


class Call(NamedTuple):
    """The arguments of the method that makes the forward pass of a live model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LiveModel(Workload):
    """A model with its optimizer and loss, as a workload whose batches have a Call as input.

    It keeps a copy on the meta device: the model itself stays as it is, and its later changes have no effect.

    Args:
        model: the model, on any device.
        optimizer: an optimizer of the model, or a function of parameters that returns one; None for that of a
            LightningModule.
        loss: the loss of an output and a target; None for the model's own loss, or else the cross entropy.
        method: the name of the method that makes the forward pass.

    Raises:
        NoPlan: the model cannot be copied, or the optimizer trains other parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | MakeOptimizer | None,
        loss: Callable[[Any, Any], Tensor] | None,
        *,
        method: str = "forward",
    ) -> None:
        self._template = _copy(model, "meta")
        for module in self._template.modules():
            wrapper, wrapped = vars(module).pop("forward", None), vars(module).pop("_original_forward", None)
            if wrapper is not None and wrapped is None:  # it may run the model instead of its copy
                raise NoPlan("a module has another forward than its class")  # accelerate keeps the original one
        self._make_optimizer = _equal_optimizers(optimizer, model) if isinstance(optimizer, Optimizer) else optimizer
        self._loss, self._method = loss, method
        self._copy: weakref.ref[nn.Module] | None = None

    def step(
        self,
        call: Call,
        target: Any = None,
        *,
        as_cuda: bool,
        grad_accum: int = 1,
        channels_last: bool = False,
        max_grad_norm: float | None = None,
    ) -> FakeStep:
        """Return the training step on a batch, which may have no memory."""
        job = Job(
            workload=type(self._template).__name__,
            batch_size=samples_in(call),
            learning_rate=1e-3,
            grad_accum=grad_accum,
            channels_last=channels_last,
            max_grad_norm=max_grad_norm,
        )
        return FakeStep(job, self, (call, target), as_cuda=as_cuda, keeps_gradients=is_lightning(self._template))

    def model(self) -> nn.Module:
        """Return a copy of the model, without memory within `fake_tensors`."""
        copied: Any = _copy(self._template, "cpu")
        of_class, run = copied.forward, getattr(copied, self._method)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], Call):
                output = run(*args[0].args, **args[0].kwargs)
                own = own_loss(output) if self._loss is None else None
                return output if own is None else own  # `model(input).loss` frees the rest of the output
            return of_class(*args, **kwargs)  # called by the method

        copied.forward = _without_autocast_cache(forward) if is_lightning(copied) else forward
        if is_lightning(copied):
            copied.log = copied.log_dict = lambda *args, **kwargs: None  # it has no Trainer
        self._copy = weakref.ref(copied)
        return copied  # type: ignore[no-any-return]

    def train_data(self) -> Any:
        raise AssertionError("a plan has an example instead")

    eval_data = train_data

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
        """Return the optimizer of the last copy. Raises NoPlan if a LightningModule makes none, or several."""
        if self._make_optimizer is not None:
            return self._make_optimizer(parameters)
        copied: Any = self._copy() if self._copy is not None else None
        try:
            configured = copied.configure_optimizers()
        except Exception as error:  # it may use its Trainer
            raise NoPlan(
                f"configure_optimizers() raised {summary(error).rstrip('.')}. Pass the optimizer, such as "
                "torch.optim.AdamW, instead of None"
            ) from error
        return _single_optimizer(configured)

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss. Raises BadInput if it has none, and the model neither."""
        if self._loss is not None:
            return self._loss(output, target)
        own = own_loss(output)
        if own is not None:
            return own
        if target is None:
            raise BadInput(
                "loss: the model's output has no loss. Give loss=, an example (input, target), or the labels that the "
                "model needs to compute its loss."
            )
        return super().loss(output, target)


def own_loss(output: Any) -> Tensor | None:
    """Return the loss that a model has computed: its output if that is a number, or `loss` within; None without one."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) and not first.dim() and first.is_floating_point() else None


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model or a part of it runs through torch.compile."""
    modules = [model, *unwrapped(model).modules()]
    return any(map(torch_internals.is_compiled, modules))


def is_lightning(model: nn.Module) -> bool:
    """Return whether it is a LightningModule, without importing lightning."""
    return any(kind.__name__ == "LightningModule" for kind in type(model).__mro__)


def without_memory(batch: Any) -> Any:
    """Return the same structure, with tensors without memory; None if it holds objects other than numbers and texts."""
    try:
        example = map_tensors(lambda each: torch.empty_like(each, device="meta"), batch)
    except Exception:  # of a structure that rejects other tensors, such as a PackedSequence
        return None
    return example if _is_plain(example) else None


def _is_plain(batch: Any) -> bool:
    if isinstance(batch, Mapping):
        return all(map(_is_plain, batch.values()))
    if isinstance(batch, list | tuple):
        return all(map(_is_plain, batch))
    return batch is None or isinstance(batch, Tensor | Number | str)


def _copy(model: nn.Module, device: str) -> nn.Module:
    """Return a copy with uninitialized tensors on a device, and only those hooks that torch itself needs."""
    hooks = (each for module in model.modules() for each in torch_internals.hooks(module))
    memo: dict[int, Any] = {id(each): OrderedDict(_own_hooks(each)) for each in hooks}

    empty = torch_internals.copied_by(
        lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    )
    with mock.patch.object(Tensor, "__deepcopy__", empty), mock.patch.object(nn.Parameter, "__deepcopy__", empty):
        return copy.deepcopy(model, memo)


def _own_hooks(hooks: OrderedDict[int, Any]) -> Iterator[tuple[int, Any]]:
    """Yield the hooks that compute a weight, such as that of `nn.utils.weight_norm`."""
    return ((key, hook) for key, hook in hooks.items() if type(hook).__module__.startswith("torch.nn.utils."))


def _without_autocast_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass in which autocast casts a weight at each use, as in Lightning."""

    def run(*args: Any, **kwargs: Any) -> Any:
        was_enabled = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(was_enabled)

    return run


def _equal_optimizers(optimizer: Optimizer, model: nn.Module) -> MakeOptimizer:
    """Return a function that makes optimizers of the same kind, with the same groups and settings, for copies."""
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    if any(id(parameter) not in places for group in optimizer.param_groups for parameter in group["params"]):
        raise NoPlan("the optimizer trains parameters that are not the model's")
    kind, defaults = type(optimizer), optimizer.defaults
    groups = [
        group | {"params": [places[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    if defaults.get("fused"):  # it has no temporary tensors, as the implementation for one tensor nearly has
        groups = [group | {"fused": None, "foreach": False} for group in groups]
        defaults = defaults | {"fused": None, "foreach": False}
    known = inspect.signature(kind).parameters
    settings = {name: value for name, value in defaults.items() if name in known}

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        copies = list(parameters)
        of_copies = [group | {"params": [copies[place] for place in group["params"]]} for group in groups]
        return kind(of_copies, **settings)

    return make


def _single_optimizer(configured: Any) -> Optimizer:
    """Return the only optimizer of what `configure_optimizers` returned. Raises NoPlan if it is not one."""
    if isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], list):
        configured, _ = configured  # with schedulers
    if isinstance(configured, list | tuple) and len(configured) == 1:
        (configured,) = configured
    if isinstance(configured, Mapping):
        configured = configured.get("optimizer")
    if not isinstance(configured, Optimizer):
        raise NoPlan("configure_optimizers() does not return a single optimizer")
    return configured
