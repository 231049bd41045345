"""TrainStep: the one AMP-aware optimizer step for every precision; ScaleHistory: what the GradScaler did, exactly.

Between two reads nothing here waits for the device: no `.item()`, no `get_scale()`. (A non-fused optimizer syncs once a
step inside `GradScaler.step` itself; use a fused one.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from amp_track.data import batch_length
from amp_track.precision import Precision


def sum_dtype(device: torch.device) -> torch.dtype:
    """For sums over an epoch: float64 keeps a long one's last digits; MPS does not have it."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class StepTotals:
    """What happened since the last read. Losses are means over samples."""

    samples: int
    loss: float
    non_finite_losses: int
    """Batches whose loss was inf or NaN: divergence or a bug, not the overflow that a GradScaler is for."""
    steps: int
    skipped_steps: int
    scale_changes: tuple[tuple[int, float], ...]
    """(optimizer step, scale after it), counted from the start of training."""


class ScaleHistory:
    """The scale after every optimizer step, without asking the device for it.

    A fused optimizer is handed `found_inf` by the scaler and skips on the device. A step-pre-hook copies it into a
    preallocated buffer there; `read` fetches the buffer once and replays growth and backoff as
    `_amp_update_scale_` does. A non-fused optimizer is simply not called when the gradients overflowed: a hook that did
    not fire is a skipped step.

    Relies on two things that GradScaler does not document: the attribute `found_inf` on fused optimizers, and the rule
    of growth and backoff. Should either change, `tests/test_step.py` fails, which compares with `get_scale()`.
    """

    def __init__(self, scaler: GradScaler, optimizer: torch.optim.Optimizer, *, capacity: int = 1024) -> None:
        state = scaler.state_dict()
        self.scale = float(state["scale"])
        self.skipped_steps = 0
        self.steps = 0
        self._growth_factor = float(state["growth_factor"])
        self._backoff_factor = float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._growth_tracker = int(state["_growth_tracker"])
        device = next(p for group in optimizer.param_groups for p in group["params"]).device
        self._found_inf = torch.zeros(capacity, device=device)
        self._not_called: set[int] = set()
        self._pending = 0
        self._called = False
        self._changes: list[tuple[int, float]] = []
        optimizer.register_step_pre_hook(self._before_optimizer_step)

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._called = True
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            self._found_inf[self._pending].copy_(found_inf.reshape(()), non_blocking=True)

    def step(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.step(optimizer)` and `scaler.update()`, remembered."""
        self._called = False
        scaler.step(optimizer)
        scaler.update()
        if not self._called:
            self._not_called.add(self._pending)
        self._pending += 1
        if self._pending == len(self._found_inf):
            self._replay()  # the buffer is full: one sync per `capacity` steps

    def read(self) -> tuple[tuple[int, float], ...]:
        """The changes since the last read. Waits for the device once."""
        self._replay()
        changes, self._changes = tuple(self._changes), []
        return changes

    def _replay(self) -> None:
        if not self._pending:
            return
        found_inf = self._found_inf[: self._pending].tolist()
        self._found_inf.zero_()
        for index, found in enumerate(found_inf):
            before = self.scale
            self.steps += 1
            if found or index in self._not_called:
                self.skipped_steps += 1
                self._growth_tracker = 0
                self.scale = float(numpy.float32(self.scale * self._backoff_factor))
            elif self._growth_tracker + 1 == self._growth_interval:
                self._growth_tracker = 0
                with numpy.errstate(over="ignore"):
                    grown = float(numpy.float32(self.scale * self._growth_factor))
                self.scale = grown if numpy.isfinite(grown) else self.scale  # growth stops where it would be infinite
            else:
                self._growth_tracker += 1
            if self.scale != before:
                self._changes.append((self.steps, self.scale))
        self._not_called.clear()
        self._pending = 0


class TrainStep:
    """One training step in any precision: forward, scaled backward, unscale, clip, update.

        step = TrainStep(model, torch.optim.Adam(model.parameters(), fused=True), cross_entropy, Precision.named("amp"))
        for epoch in range(epochs):
            for input, target in batches:
                step(input.to("cuda"), target.to("cuda"))
            print(step.read())  # mean loss, skipped steps, scale changes: the only wait for the device

    Args:
        model: on its device, in float32; autocast chooses the dtypes.
        optimizer: of the model's parameters. A fused one needs no host sync under amp.
        loss: (output, target) -> scalar tensor, the mean over the batch.
        precision: which mode; see `amp_track.precision`.
        clip_norm: the largest norm of the gradients, taken after unscaling.
        scaler: for amp; by default a new one with torch's own settings. One for the whole training.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any], Tensor],
        precision: Precision,
        *,
        clip_norm: float | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not parameters:
            raise ValueError("the optimizer got no parameters, expected the model's")
        device = parameters[0].device
        self.model = model
        self.optimizer = optimizer
        self.precision = precision
        self.phase = "model"
        """What the step was doing last: says where memory ran out."""
        self.scaler = scaler or GradScaler(device.type, enabled=precision.grad_scaler)
        self.history = ScaleHistory(self.scaler, optimizer) if self.scaler.is_enabled() else None
        self._loss = loss
        self._parameters = parameters
        self._clip_norm = clip_norm
        self._device_type = device.type
        self._loss_sum = torch.zeros((), dtype=sum_dtype(device), device=device)
        self._non_finite = torch.zeros((), dtype=torch.int64, device=device)
        self._samples = 0
        self._steps = 0
        self._skipped_before = 0

    def __call__(self, input: Any, target: Any, *, share: float = 1.0, update: bool = True) -> Tensor:
        """Train on one batch and return its loss, detached, still on the device.

        Args:
            input: what the model takes, first dimension N; already on the device.
            target: what the loss takes, first dimension N.
            share: this batch's part of the samples of its optimizer step, when several batches make one step.
            update: make the optimizer step now; False only adds up gradients.
        """
        self.phase = "forward"
        with self.precision.autocast(self._device_type):
            loss = self._loss(self.model(input), target)
        self.phase = "backward"
        self.scaler.scale(loss * share if share != 1.0 else loss).backward()  # type: ignore[no-untyped-call]
        loss = loss.detach()
        samples = batch_length(input)
        self._samples += samples
        self._loss_sum.add_(loss, alpha=samples)
        self._non_finite.add_(~torch.isfinite(loss))
        if update:
            self.phase = "optimizer"
            self._update()
        return loss

    def _update(self) -> None:
        if self._clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        if self.history is not None:
            self.history.step(self.scaler, self.optimizer)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._steps += 1

    def read(self) -> StepTotals:
        """Everything since the last read. Waits for the device."""
        changes = self.history.read() if self.history is not None else ()
        skipped = self.history.skipped_steps if self.history is not None else 0
        loss_sum, non_finite = torch.stack([self._loss_sum, self._non_finite.to(self._loss_sum.dtype)]).tolist()
        totals = StepTotals(
            samples=self._samples,
            loss=loss_sum / self._samples if self._samples else float("nan"),
            non_finite_losses=int(non_finite),
            steps=self._steps,
            skipped_steps=skipped - self._skipped_before,
            scale_changes=changes,
        )
        self._loss_sum.zero_()
        self._non_finite.zero_()
        self._samples = self._steps = 0
        self._skipped_before = skipped
        return totals
