"""Tensors in nested tuples, lists and dicts: moved, mapped, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def move(batch: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """The same structure with its tensors on `device`, without waiting. `channels_last` changes the memory order of
    four-dimensional tensors."""

    def moved(tensor: Tensor) -> Tensor:
        if channels_last and tensor.dim() == 4:
            return tensor.to(device, non_blocking=True, memory_format=torch.channels_last)
        return tensor.to(device, non_blocking=True)

    return map_tensors(moved, batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The same structure of tuples, named tuples, lists and dicts with its tensors replaced."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: map_tensors(function, value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        values = [map_tensors(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def tensors(batch: Any) -> Iterator[Tensor]:
    """Every tensor in a structure of tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors(value)


def sum_dtype(device: torch.device) -> torch.dtype:
    """For sums over an epoch: float64 keeps a long one's last digits; MPS does not have it."""
    return torch.float32 if device.type == "mps" else torch.float64


def batch_length(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor."""
    return len(next(tensors(batch)))
