"""Map each operation that torch runs to the layer of the model that it belongs to. Uses torch ≥ 2.9."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from amp_track.records.result import MODEL


def running_node_number() -> int | None:
    """Return the number of the autograd node that this thread runs in a backward pass; None outside of one.

    Relies on `torch._C._current_autograd_node`; raises AttributeError if torch renames it.
    """
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else None


class ForwardHook:
    """A hook of a module's forward pass that a copy of the module does not have, and torch.compile does not trace."""

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            self.run(module, *arguments)

    def run(self, module: nn.Module, *arguments: Any) -> None:
        """Do nothing: the hook of a copied module."""

    def __reduce__(self) -> Any:
        return ForwardHook, ()


class LayerWatch:
    """Tracks the layer whose operation runs.

    In the forward pass this is the innermost layer being called. In the backward pass it is the layer whose call
    created the running autograd node: nodes are numbered in order of creation, so it is enough to store the numbers at
    which each layer began and ended. If a tensor is used twice, its gradients are added in the layer of the second
    gradient. (Nodes that a reentrant checkpoint creates in the backward pass have no such number.)
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name or MODEL, module) for name, module in model.named_modules()]
        self._calls = [MODEL]
        """The layers being called, the innermost last, after the name for operations outside of all layers."""
        self._first_nodes: list[int] = []
        self._layers_of_nodes: list[str] = []
        """For each number in `_first_nodes`, the layer of the nodes starting at that number."""
        self._note()

    def outside_of_layers(self, name: str) -> None:
        """Set the name for operations outside of all layers."""
        self._calls[0] = name
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
        if node_number is not None and len(self._calls) == 1:
            return self._layers_of_nodes[bisect_right(self._first_nodes, node_number) - 1]
        return self._calls[-1]

    def _entering(self, layer: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._calls.append(layer)
            self._note()

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls.pop()
        self._note()

    def _note(self) -> None:
        """Store the layer of the next nodes. Relies on `torch.autograd._get_sequence_nr`."""
        if running_node_number() is None:  # otherwise a checkpoint recomputes its layers, on another thread
            self._first_nodes.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self._layers_of_nodes.append(self._calls[-1])
