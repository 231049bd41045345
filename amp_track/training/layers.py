"""Tell which layer of a model an operation belongs to, in the forward pass and in the backward pass."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from amp_track.records.diagnosis import MODEL
from amp_track.training import operations


class LayerWatch:
    """Knows the layer whose code runs now.

    In the forward pass that is the innermost layer being called. In the backward pass it is the one whose call made
    the autograd node that runs: nodes are numbered in the order in which they are made, so it is enough to remember at
    which number each layer began and ended. Where a tensor is used twice, its gradients are added in the layer that the
    second one comes from. (Nodes that a checkpoint of the reentrant kind makes in the backward pass have no such
    number.)

    Args:
        model: the model to watch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name or MODEL, module) for name, module in model.named_modules()]
        self._outside = MODEL
        self._calls: list[str] = []
        """Names of the layers being called, the innermost last."""
        self._first_nodes: list[int] = []
        self._layers_of_nodes: list[str] = []
        """For each number in `_first_nodes`, the layer of the nodes from that number on."""
        self._note()

    def outside_of_layers(self, name: str) -> None:
        """Give what runs outside of any layer this name from now on."""
        self._outside = name
        self._note()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the model's calls within the block."""
        with ExitStack() as stack:
            for name, module in self._modules:
                # Outside of the model's own hooks; also for a call that raises what its caller catches.
                stack.callback(module.register_forward_pre_hook(self._entering(name), prepend=True).remove)
                stack.callback(module.register_forward_hook(self._leaving, always_call=True).remove)
            yield

    def layer(self) -> str:
        """Return the layer whose operation runs now."""
        node_number = operations.running_node_number()
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
        """Remember whose nodes come next."""
        if operations.running_node_number() is None:  # otherwise a checkpoint calls its layers again, on another thread
            self._first_nodes.append(operations.next_node_number())
            self._layers_of_nodes.append(self._calls[-1] if self._calls else self._outside)
