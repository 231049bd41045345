"""The training step from the documentation of torch, and an evaluation: the baselines of all comparisons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from amp_track import Precision, Workload


@dataclass
class _Bare:
    """What both need to compute a loss.

    Args:
        workload: provides the loss, the score, the optimizer and the learning rate.
        model: on its device, in its memory format; compiled or not.
        precision: the name of the precision.
        device: the type of the model's device.
        channels_last: convert inputs to that memory format.
    """

    workload: Workload
    model: nn.Module
    precision: str
    device: str
    channels_last: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._mode = Precision.named(self.precision)
        self._device_type = self.device.partition(":")[0]
        self._layout = torch.channels_last if self.channels_last else torch.preserve_format

    def move(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return both on the device. The host does not wait for copies from pinned memory."""
        inputs = inputs.to(self.device, non_blocking=True, memory_format=self._layout)
        return inputs, targets.to(self.device, non_blocking=True)


class BareStep(_Bare):
    """Autocast, scaled backward, step, update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._optimizer = self.workload.optimizer(self.model.parameters(), self.workload.learning_rate)
        self._scaler = torch.amp.GradScaler(self._device_type, enabled=self._mode.grad_scaler)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Any:
        """Train on one batch and return its loss."""
        inputs, targets = self.move(inputs, targets)
        with self._mode.autocast(self._device_type):
            loss = self.workload.loss(self.model(inputs), targets)  # the output is freed before the backward pass
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return loss.detach()


class BareEvaluation(_Bare):
    """Autocast, loss and score, added up on the device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loss, self._score = torch.zeros((), device=self.device), torch.zeros((), device=self.device)

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        """Evaluate one batch."""
        inputs, targets = self.move(inputs, targets)
        with self._mode.autocast(self._device_type):
            output = self.model(inputs)
            loss = self.workload.loss(output, targets)
        self._loss += loss * len(inputs)
        self._score += self.workload.score(output, targets).sum()
