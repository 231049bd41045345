"""ScaleHistory: what the GradScaler did at every step, exactly, without asking the device for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.amp import GradScaler

from amp_track.training.amp.scalar_log import ScalarLog


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

    A fused optimizer is handed `found_inf` by the scaler and skips on the device. A step-pre-hook keeps it there;
    reading fetches them all at once and replays growth and backoff as `_amp_update_scale_` does. Any other optimizer is
    simply not called when the gradients overflowed: a hook that did not fire is a skipped step, and the host knows at
    once, since `GradScaler.step` itself has waited for the device.

    Relies on two things that GradScaler does not document: the attribute `found_inf` on fused optimizers, and the rule
    of growth and backoff. Should either change, `tests/test_scale_history.py` fails, which compares with `get_scale()`.

    Args:
        scaler: enabled, at any point of its life.
        optimizer: the only one it steps.
        capacity: the most steps between two reads.
    """

    def __init__(self, scaler: GradScaler, optimizer: torch.optim.Optimizer, *, capacity: int = 1024) -> None:
        self.steps = 0
        """Attempted, as far as read."""
        self.updates = 0
        """Made, as far as read."""
        device = next(p for group in optimizer.param_groups for p in group["params"]).device
        self._found_inf = ScalarLog(capacity, device)
        self._none_found, self._some_found = torch.zeros((), device=device), torch.ones((), device=device)
        self._of_this_step: Tensor | None = None
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
        self._of_this_step = getattr(optimizer, "found_inf", self._none_found)

    def step(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> Tensor | bool:
        """`scaler.step(optimizer)` and `scaler.update()`, remembered.

        Returns:
            Whether the gradients overflowed: for a fused optimizer a tensor on the device, above 0 if they did.
        """
        self._of_this_step = None
        scaler.step(optimizer)
        scaler.update()
        found_inf = self._of_this_step if self._of_this_step is not None else self._some_found
        self._found_inf.append(found_inf)
        return found_inf if skips_on_device(optimizer) else found_inf is self._some_found

    def read(self) -> ScaleChanges:
        """What happened since the last reading. Waits for the device once."""
        changes: list[tuple[int, float]] = []
        skipped: list[int] = []
        for found in self._found_inf.fetch():
            before = self.scale
            self.steps += 1
            if found:
                skipped.append(self.steps)
            else:
                self.updates += 1
            self._replay(overflowed=bool(found))
            if self.scale != before:
                changes.append((self.steps, self.scale))
        return ScaleChanges(tuple(changes), tuple(skipped))

    def state_dict(self) -> dict[str, int]:
        """Counters; the scale itself is the scaler's to keep. Read first."""
        assert not len(self._found_inf), "read before saving"
        return {"steps": self.steps, "updates": self.updates}

    def load_state_dict(self, state: dict[str, int], scaler: GradScaler) -> None:
        """Go on from there, with a scaler whose own state has been loaded."""
        self._adopt(scaler)
        self.steps, self.updates = state["steps"], state["updates"]
        self._found_inf.clear()

    def _replay(self, *, overflowed: bool) -> None:
        """One `_amp_update_scale_`."""
        if overflowed:
            self._growth_tracker = 0
            self.scale = float(numpy.float32(self.scale * self._backoff_factor))
            return
        self._growth_tracker += 1
        if self._growth_tracker == self._growth_interval:
            self._growth_tracker = 0
            with numpy.errstate(over="ignore"):
                grown = float(numpy.float32(self.scale * self._growth_factor))
            self.scale = grown if numpy.isfinite(grown) else self.scale  # it stops where it would be infinite
