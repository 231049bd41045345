"""Functions on tensors in nested tuples, lists and mappings, and on return values of losses and scores."""

from __future__ import annotations

import functools
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_track.records.errors import InvalidReturnValue


def move(batch: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Return the same structure on `device`, without waiting; `channels_last` is for four-dimensional tensors."""
    if isinstance(batch, Tensor):
        if channels_last and batch.dim() == 4:
            return batch.to(device, non_blocking=True, memory_format=torch.channels_last)
        return batch.to(device, non_blocking=True)
    return map_tensors(functools.partial(move, device=device, channels_last=channels_last), batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return the same structure with `function` applied to each tensor.

    Tuples, named tuples, lists and mappings are searched. A UserDict keeps its type, because subclasses such as
    transformers' BatchEncoding have attributes that models read; any other mapping becomes a dict.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        mapped = {name: map_tensors(function, value) for name, value in batch.items()}
        if not isinstance(batch, UserDict):
            return mapped
        same_type = UserDict.__copy__(batch)  # not the subclass's copy, and without setting items: it may be read-only
        same_type.data = mapped
        return same_type
    if isinstance(batch, list | tuple):
        values = [map_tensors(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor in a structure of tuples, lists and mappings, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors(value)


def call(model: nn.Module, input: Any) -> Any:
    """Return the model's output. A mapping is passed as keywords if its names are parameters of `forward`.

    All of them must be, or one if `forward` takes any keywords. A module that passes on all arguments to the only one
    that it holds, as wrappers do, is judged by that one.
    """
    if isinstance(input, Tensor):
        return model(input)
    args, kwargs = arguments(model, input)
    return model(*args, **kwargs)


def arguments(model: nn.Module, input: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments and keyword arguments with which `call` passes an input to the model."""
    if isinstance(input, Mapping) and _takes(unwrapped(model), input):
        return (), input
    return (input,), {}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model within DistributedDataParallel and `torch.compile`, whose `forward` takes any arguments."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return getattr(model, "_orig_mod", model)


def _takes(model: nn.Module, names: Iterable[Any]) -> bool:
    if isinstance(model, torch.jit.ScriptModule):  # it has no signature
        return False
    parameters, takes_any = _keywords_of(type(model).forward)
    held = list(model.children())
    if takes_any and not parameters and len(held) == 1:
        return _takes(held[0], names)
    is_known = [name in parameters for name in names]
    return all(is_known) or (takes_any and any(is_known))


@functools.cache
def _keywords_of(forward: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Return the names that may be keywords, and whether any other name may be one, too."""
    _, *parameters = inspect.signature(forward).parameters.values()  # the first one is self
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return frozenset(each.name for each in parameters if each.kind in named), takes_any


def check_loss(loss: Any) -> Tensor:
    """Return the loss. Raises InvalidReturnValue if it is not a scalar tensor. Does not wait for the device."""
    expected = "a scalar tensor, the mean over the batch"
    if not isinstance(loss, Tensor):
        raise InvalidReturnValue.of_type("loss()", loss, expected)
    if loss.dim() or not loss.is_floating_point():
        dtype = "" if loss.is_floating_point() else f" and dtype {str(loss.dtype).removeprefix('torch.')}"
        raise InvalidReturnValue(
            f"loss() returned a tensor of shape {tuple(loss.shape)}{dtype}; it must return {expected}"
        )
    return loss


def sum_of_scores(scores: Any, samples: int, dtype: torch.dtype) -> Tensor:
    """Return the sum of scores, which may be float16. Raises InvalidReturnValue unless there is one per sample."""
    if isinstance(scores, Tensor) and scores.numel() == samples:
        return scores.sum(dtype=dtype)
    expected = f"one number for each of the {samples} samples, shape ({samples},), and not their mean"
    if not isinstance(scores, Tensor):
        raise InvalidReturnValue.of_type("score()", scores, expected)
    raise InvalidReturnValue(f"score() returned a tensor of shape {tuple(scores.shape)}; it must return {expected}")


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums over an epoch: float64, to keep a long epoch's last digits, or float32 on MPS."""
    return torch.float32 if device.type == "mps" else torch.float64


def samples_in(batch: Any) -> int:
    """Return the first dimension of the first tensor in anything; 0 if there is none."""
    first = next(tensors(batch), None)
    return len(first) if first is not None and first.dim() else 0


def batch_length(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor."""
    first = batch if isinstance(batch, Tensor) else next(tensors(batch))
    return first.size(0)
