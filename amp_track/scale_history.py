"""ScaleHistory: what the GradScaler did at every step, exactly, without asking the device for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.amp import GradScaler


@dataclass(frozen=True)
class ScaleChanges:
    """What the scaler did in some steps, each by its number from the start of training, the first being 1."""

    changes: tuple[tuple[int, float], ...] = ()
    """(optimizer step, scale after it), where it changed."""
    skipped_steps: tuple[int, ...] = ()
    """The steps whose gradients overflowed, and so made no update."""


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether GradScaler leaves it to this optimizer to skip a step, on the device: fused ones do.

    Reads the private mark that GradScaler reads. Should it change, fused optimizers look like others here, and
    `tests/test_scale_history.py` fails.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


class ScaleHistory:
    """The scale after every optimizer step.

    A fused optimizer is handed `found_inf` by the scaler and skips on the device. A step-pre-hook copies it into a
    preallocated buffer there; reading fetches the buffer once and replays growth and backoff as `_amp_update_scale_`
    does. Any other optimizer is simply not called when the gradients overflowed: a hook that did not fire is a skipped
    step, and the host knows at once, since `GradScaler.step` itself has waited for the device.

    Relies on two things that GradScaler does not document: the attribute `found_inf` on fused optimizers, and the rule
    of growth and backoff. Should either change, `tests/test_scale_history.py` fails, which compares with `get_scale()`.

    Args:
        scaler: enabled, at any point of its life.
        optimizer: the only one it steps.
        capacity: steps between two waits for the device at most, read or not.
    """

    def __init__(self, scaler: GradScaler, optimizer: torch.optim.Optimizer, *, capacity: int = 1024) -> None:
        self.steps = 0
        """Attempted, as far as read."""
        self.updates = 0
        """Made, as far as read."""
        device = next(p for group in optimizer.param_groups for p in group["params"]).device
        self._buffer = torch.zeros(capacity, device=device)
        self._not_called: set[int] = set()
        self._pending = 0
        self._called = False
        self._changes: list[tuple[int, float]] = []
        self._skipped: list[int] = []
        self._adopt(scaler)
        optimizer.register_step_pre_hook(self._before_optimizer_step)

    def _adopt(self, scaler: GradScaler) -> None:
        state = scaler.state_dict()
        self.scale = float(state["scale"])
        self._growth_factor = float(state["growth_factor"])
        self._backoff_factor = float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._growth_tracker = int(state["_growth_tracker"])

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._called = True
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            self._buffer[self._pending].copy_(found_inf, non_blocking=True)

    def step(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> Tensor | bool:
        """`scaler.step(optimizer)` and `scaler.update()`, remembered.

        Returns:
            Whether the gradients overflowed: for a fused optimizer a tensor on the device, above 0 if they did.
        """
        self._called = False
        scaler.step(optimizer)
        scaler.update()
        slot = self._buffer[self._pending]
        if not self._called:
            self._not_called.add(self._pending)
        self._pending += 1
        return slot if skips_on_device(optimizer) else not self._called

    @property
    def is_full(self) -> bool:
        """Whether it must be read before the next step."""
        return self._pending == len(self._buffer)

    def read(self) -> ScaleChanges:
        """What happened since the last reading. Waits for the device once."""
        self._replay()
        changes = ScaleChanges(tuple(self._changes), tuple(self._skipped))
        self._changes, self._skipped = [], []
        return changes

    def state_dict(self) -> dict[str, int]:
        """Counters; the scale itself is the scaler's to keep. Read first."""
        assert not self._pending, "read before saving"
        return {"steps": self.steps, "updates": self.updates}

    def load_state_dict(self, state: dict[str, int], scaler: GradScaler) -> None:
        """Go on from there, with a scaler whose own state has been loaded."""
        self._adopt(scaler)
        self.steps, self.updates = state["steps"], state["updates"]
        self._pending = 0
        self._not_called.clear()
        self._changes, self._skipped = [], []

    def _replay(self) -> None:
        if not self._pending:
            return
        found_inf = self._buffer[: self._pending].tolist()
        self._buffer.zero_()
        for index, found in enumerate(found_inf):
            before = self.scale
            self.steps += 1
            if found or index in self._not_called:
                self._skipped.append(self.steps)
                self._growth_tracker = 0
                self.scale = float(numpy.float32(self.scale * self._backoff_factor))
            else:
                self.updates += 1
                self._growth_tracker += 1
                if self._growth_tracker == self._growth_interval:
                    self._growth_tracker = 0
                    with numpy.errstate(over="ignore"):
                        grown = float(numpy.float32(self.scale * self._growth_factor))
                    self.scale = grown if numpy.isfinite(grown) else self.scale  # it stops where it would be infinite
            if self.scale != before:
                self._changes.append((self.steps, self.scale))
        self._not_called.clear()
        self._pending = 0
