"""Watch the operations that torch runs, and map each one to the layer of the model that it belongs to.

The operations include those that autocast and autograd add, such as casts. Only this module uses torch's private
interfaces for watching (torch ≥ 2.11).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_track.records.diagnosis import MODEL


@dataclass(frozen=True)
class Operation:
    """One call of an operation. Keep no reference to it: it holds its tensors."""

    name: str
    """The aten name without the overload: `addmm`, `native_batch_norm`, `relu_`."""
    is_view: bool
    """Whether it only changes shape or strides."""
    inputs: tuple[Tensor, ...]
    """Its tensor arguments in order, including those in lists."""
    outputs: tuple[Tensor, ...]


@contextmanager
def watching_operations(saw: Callable[[Operation], None]) -> Iterator[None]:
    """Call `saw` after every operation that runs within the block.

    This includes the backward pass, on any thread. Code compiled with `torch.compile` runs uncompiled.

    Relies on `TorchDispatchMode` and on attributes of `OpOverload`. If torch renames them, this raises ImportError or
    AttributeError; if a mode stops following the backward pass, the operations of that pass are missing.
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
    """Return the number of the next autograd node of this thread. Numbers increase during a forward pass.

    Relies on `torch.autograd._get_sequence_nr`; raises AttributeError if torch renames it.
    """
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def running_node_number() -> int | None:
    """Return the number of the autograd node that this thread runs in a backward pass; None outside of one.

    Relies on `torch._C._current_autograd_node`; raises AttributeError if torch renames it.
    """
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else None


class LayerWatch:
    """Tracks the layer whose operation runs.

    In the forward pass this is the innermost layer being called. In the backward pass it is the layer whose call
    created the running autograd node: nodes are numbered in order of creation, so it is enough to store the numbers at
    which each layer began and ended. If a tensor is used twice, its gradients are added in the layer of the second
    gradient. (Nodes that a reentrant checkpoint creates in the backward pass have no such number.)

    Args:
        model: the model to watch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name or MODEL, module) for name, module in model.named_modules()]
        self._outside = MODEL
        self._calls: list[str] = []
        """The layers being called, the innermost last."""
        self._first_nodes: list[int] = []
        self._layers_of_nodes: list[str] = []
        """For each number in `_first_nodes`, the layer of the nodes starting at that number."""
        self._note()

    def outside_of_layers(self, name: str) -> None:
        """Set the name for operations outside of all layers."""
        self._outside = name
        self._note()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Track the model's calls within the block."""
        with ExitStack() as stack:
            for name, module in self._modules:
                # Around the model's hooks; also for a call whose exception the caller catches.
                stack.callback(module.register_forward_pre_hook(self._entering(name), prepend=True).remove)
                stack.callback(module.register_forward_hook(self._leaving, always_call=True).remove)
            yield

    def layer(self) -> str:
        """Return the layer whose operation is running."""
        node_number = running_node_number()
        if node_number is not None and not self._calls:
            return self._layers_of_nodes[bisect_right(self._first_nodes, node_number) - 1]
        return self._calls[-1] if self._calls else self._outside

    def _entering(self, layer: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._calls.append(layer)
            self._note()

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls.pop()
        self._note()

    def _note(self) -> None:
        """Store the layer of the next nodes."""
        if running_node_number() is None:  # otherwise a checkpoint recomputes its layers, on another thread
            self._first_nodes.append(next_node_number())
            self._layers_of_nodes.append(self._calls[-1] if self._calls else self._outside)
