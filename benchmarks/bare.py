"""The training step from the documentation of torch, and an evaluation: the baselines of all comparisons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amp_track import Precision, Workload


class BareStep:
    """Autocast, scaled backward, step, update.

    Args:
        workload: provides the loss, the optimizer and the learning rate.
        model: on its device, in its memory format; compiled or not.
        precision: the name of the precision.
        device: the type of the model's device.
        channels_last: convert inputs to that memory format.
    """

    def __init__(
        self, workload: Workload, model: nn.Module, precision: str, device: str, *, channels_last: bool = False
    ) -> None:
        self._workload = workload
        self._model = model
        self._precision = Precision.named(precision)
        self._device = device
        self._layout = torch.channels_last if channels_last else torch.preserve_format
        self._optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
        self._scaler = torch.amp.GradScaler(device.partition(":")[0], enabled=self._precision.grad_scaler)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Any:
        """Train on one batch and return its loss."""
        inputs = inputs.to(self._device, non_blocking=True, memory_format=self._layout)
        targets = targets.to(self._device, non_blocking=True)
        with self._precision.autocast(self._device.partition(":")[0]):
            loss = self._workload.loss(self._model(inputs), targets)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return loss.detach()


class BareEvaluation:
    """Autocast, loss and score, added up on the device. The arguments are those of BareStep."""

    def __init__(
        self, workload: Workload, model: nn.Module, precision: str, device: str, *, channels_last: bool = False
    ) -> None:
        self._workload = workload
        self._model = model
        self._precision = Precision.named(precision)
        self._device = device
        self._layout = torch.channels_last if channels_last else torch.preserve_format
        self._sums = torch.zeros(2, device=device)

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        """Evaluate one batch."""
        inputs = inputs.to(self._device, non_blocking=True, memory_format=self._layout)
        targets = targets.to(self._device, non_blocking=True)
        with self._precision.autocast(self._device.partition(":")[0]):
            output = self._model(inputs)
            loss = self._workload.loss(output, targets)
        self._sums[0] += loss * len(inputs)
        self._sums[1] += self._workload.score(output, targets).sum()
