"""Functions over the tensors in nested tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def move(batch: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Return the same structure with its tensors on `device`, without waiting for the copies.

    `channels_last` gives four-dimensional tensors that memory order.
    """

    def moved(tensor: Tensor) -> Tensor:
        if channels_last and tensor.dim() == 4:
            return tensor.to(device, non_blocking=True, memory_format=torch.channels_last)
        return tensor.to(device, non_blocking=True)

    return map_tensors(moved, batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return the same structure of tuples, named tuples, lists and dicts, with `function` applied to each tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: map_tensors(function, value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        values = [map_tensors(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor in a structure of tuples, lists and dicts, in their order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors(value)


def sum_of_scores(scores: Tensor, samples: int) -> Tensor:
    """Return the sum of one score for each sample. Raises ValueError if there are more or fewer, such as their mean."""
    if scores.numel() != samples:
        raise ValueError(
            f"score: got a tensor of shape {tuple(scores.shape)}, expected one number for each of the {samples} "
            f"samples, shape ({samples},); return them without taking their mean"
        )
    return scores.sum()


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums over an epoch: float64, which keeps a long epoch's last digits, but MPS lacks it."""
    return torch.float32 if device.type == "mps" else torch.float64


def batch_length(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor."""
    return len(next(tensors(batch)))
