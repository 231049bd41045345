"""Find where gradients overflow and underflow float16, by layer, every N steps.

Values are counted on the device, before the gradients are unscaled, and fetched with the losses. A diagnosed step waits
for the device twice, to measure how long the diagnosis takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amp_track.records.result import MODEL, LayerGradients
from amp_track.training.amp.tensors import tensors

SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal
"""2⁻¹⁴ = 6.1e-5: smaller float16 numbers lose bits; below 2⁻²⁵ they become zero."""
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
_PIECE = 2**20
"""Number of gradient values counted at once, so that the masks need megabytes at most."""


class GradientDiagnosis:
    """Counts inf, NaN and underflow in every layer's gradients and outputs at steps 1, N + 1, 2N + 1, …

    Args:
        model: the model; a layer is any of its modules that owns parameters, or that contains no other module.
        every: N, in optimizer steps.
        outputs: also check the layers' outputs, through forward hooks. Not for a compiled model, which they would make
            torch compile again.
    """

    def __init__(self, model: nn.Module, every: int, *, outputs: bool = True) -> None:
        self.every = every
        self.seconds = 0.0
        """Seconds spent on the diagnosis. On an accelerator they include counting gradients, but not outputs."""
        self._parameters: dict[str, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            self._parameters.setdefault(name.rpartition(".")[0] or MODEL, []).append(parameter)
        self._watched = {
            name or MODEL: module
            for name, module in model.named_modules()
            if outputs and (not any(module.children()) or any(True for _ in module.parameters(recurse=False)))
        }
        self._layers = [name or MODEL for name, _ in model.named_modules()]
        self._arrived: dict[str, None] = {}
        self._outputs: dict[str, Tensor] = {}
        self._pending: list[_Look] = []

    def is_due(self, step: int) -> bool:
        """Return True if this optimizer step, counted from 1, is due for diagnosis."""
        return (step - 1) % self.every == 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record outputs and the order of layers in the forward and backward pass that completes a diagnosed step."""
        started = time.perf_counter()
        self._arrived, self._outputs = {}, {}
        handles = [module.register_forward_hook(self._output_of(name)) for name, module in self._watched.items()]
        for name, parameters in self._parameters.items():
            handles += [
                parameter.register_post_accumulate_grad_hook(self._gradient_of(name))  # type: ignore[no-untyped-call]
                for parameter in parameters
                if parameter.requires_grad
            ]
        self.seconds += time.perf_counter() - started
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _output_of(self, layer: str) -> Any:
        def remember(module: nn.Module, args: Any, output: Any) -> None:
            started = time.perf_counter()
            with torch.no_grad():
                for tensor in tensors(output):
                    if tensor.is_floating_point() and tensor.numel():
                        # Without masks or copies of what may be the largest tensor; keeps NaN.
                        largest = torch.stack(torch.aminmax(tensor)).float().abs().max()
                        known = self._outputs.get(layer)
                        self._outputs[layer] = largest if known is None else torch.maximum(known, largest)
            self.seconds += time.perf_counter() - started

        return remember

    def _gradient_of(self, layer: str) -> Any:
        def remember(parameter: Tensor) -> None:
            self._arrived.setdefault(layer)

        return remember

    @torch.no_grad()
    def look(self, step: int) -> None:
        """Count the values of this step's scaled gradients: call it before they are unscaled or clipped."""
        device = next(iter(self._parameters.values()))[0].device
        _synchronize(device)
        started = time.perf_counter()
        gradients = {
            layer: [_values(parameter.grad) for parameter in self._parameters[layer] if parameter.grad is not None]
            for layer in self._arrived
        }
        gradients = {
            layer: of_layer for layer, of_layer in gradients.items() if of_layer
        }  # some gradients are freed by hooks
        counts = [
            torch.stack([_counts(piece) for tensor in of_layer for piece in _pieces(tensor)]).sum(dim=0)
            for of_layer in gradients.values()
        ]
        self._pending.append(
            _Look(
                step=step,
                values={layer: sum(tensor.numel() for tensor in of_layer) for layer, of_layer in gradients.items()},
                counts=torch.stack(counts) if counts else None,
                outputs=tuple(self._outputs),
                largest=torch.stack(list(self._outputs.values())) if self._outputs else None,
            )
        )
        self._outputs = {}
        _synchronize(device)
        self.seconds += time.perf_counter() - started

    def drop_after(self, step: int) -> None:
        """Drop the counts of steps after this one: of a step that was diagnosed, but not completed."""
        self._pending = [look for look in self._pending if look.step <= step]

    def read(self) -> tuple[LayerGradients, ...]:
        """Return the counts by step and layer, in the model's order, since the last read. Waits for the device."""
        looks, self._pending = self._pending, []
        return tuple(row for look in looks for row in self._rows(look))

    def _rows(self, look: _Look) -> list[LayerGradients]:
        counts = dict(zip(look.values, look.counts.tolist() if look.counts is not None else [], strict=True))
        largest = dict(zip(look.outputs, look.largest.tolist() if look.largest is not None else [], strict=True))
        backward, forward = list(look.values), list(look.outputs)
        rows = []
        for layer in self._layers:
            if layer not in counts and layer not in largest:
                continue  # frozen, or not part of this forward pass
            non_finite, underflowing, zero = counts.get(layer, (0, 0, 0))
            rows.append(
                LayerGradients(
                    step=look.step,
                    layer=layer,
                    values=look.values.get(layer, 0),
                    non_finite=non_finite,
                    underflowing=underflowing,
                    zero=zero,
                    largest_output=largest.get(layer),
                    forward_order=forward.index(layer) if layer in largest else None,
                    backward_order=backward.index(layer) if layer in counts else None,
                )
            )
        return rows


@dataclass(frozen=True)
class _Look:
    """The counts of one diagnosed step, on the device; layers in the order in which they ran."""

    step: int
    values: dict[str, int]
    counts: Tensor | None
    """(layers, 3): non-finite, underflowing, zero."""
    outputs: tuple[str, ...]
    largest: Tensor | None
    """(outputs,): the largest magnitude, NaN if there is one."""


def _values(gradient: Tensor) -> Tensor:
    """Return a gradient's values; for a sparse gradient, the stored ones."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _counts(gradient: Tensor) -> Tensor:
    """Count a gradient's values, shape (3,): non-finite; nonzero but below float16's smallest normal; zero."""
    magnitude = gradient.abs()
    zero = (magnitude == 0).sum()
    small = (magnitude < SMALLEST_NORMAL).sum()
    finite = (magnitude <= _LARGEST_FLOAT32).sum()  # false for NaN too
    return torch.stack([gradient.numel() - finite, small - zero, zero])


def _pieces(gradient: Tensor) -> Iterator[Tensor]:
    """Yield views of a gradient along its first dimension, for any memory order."""
    if gradient.numel() <= _PIECE or gradient.dim() == 0:
        yield gradient
        return
    rows = max(_PIECE // (gradient.numel() // len(gradient)), 1)
    yield from torch.split(gradient, rows)


def _synchronize(device: torch.device) -> None:
    """Wait for the device, so that measured times include its work. Called twice every N steps."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
