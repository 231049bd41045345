"""Watch the operations that torch runs, after autocast and autograd have added theirs: casts are operations too.

This is the only module that touches the private interfaces of torch that watching needs (torch ≥ 2.11).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Operation:
    """One call of an operation. It holds its tensors, so keep no reference to it."""

    name: str
    """The aten name without the overload: `addmm`, `native_batch_norm`, `relu_`."""
    is_view: bool
    """Whether it only changes shape or strides."""
    inputs: tuple[Tensor, ...]
    """Its tensor arguments in their order, those in lists included."""
    outputs: tuple[Tensor, ...]


@contextmanager
def watching(saw: Callable[[Operation], None]) -> Iterator[None]:
    """Call `saw` after every operation that runs within the block.

    Operations of the backward pass are seen too, on whichever thread runs them. Code compiled with `torch.compile` runs
    uncompiled.

    Relies on `TorchDispatchMode` and on attributes of `OpOverload`. If torch renames them, the result is an ImportError
    or AttributeError here; if a mode stops following the backward pass, it is a backward pass without operations.
    """
    with _Watching(saw):
        yield


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, saw: Callable[[Operation], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saw = saw

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = bool(func.is_view) or torch.Tag.inplace_view in func.tags
        self._saw(Operation(func.overloadpacket.__name__, is_view, _tensors((args, kwargs)), _tensors(result)))
        return result


def _tensors(values: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def next_node_number() -> int:
    """Return the number that autograd will give to the next node of this thread. Numbers rise through a forward pass.

    Relies on `torch.autograd._get_sequence_nr`, which is an AttributeError if torch renames it.
    """
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def running_node_number() -> int | None:
    """Return the number of the autograd node whose backward function this thread is running; None outside of any.

    Relies on `torch._C._current_autograd_node`, which is an AttributeError if torch renames it.
    """
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else None
