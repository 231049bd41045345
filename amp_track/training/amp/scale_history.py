"""ScaleHistory records the gradient scale and skipped steps exactly, without waiting for the device at each step."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor
from torch.amp import GradScaler

_LOOSE = 64
"""Number of scalars that are kept as separate tensors before they are copied into the buffer."""


class ScalarLog:
    """A preallocated buffer for up to `capacity` float32 scalars on a device.

    Appending stores the tensor and launches no kernel; every 64 tensors are copied into the buffer at once. A copy for
    each scalar would slow a tiny step down by 1 %.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._buffer = torch.zeros(capacity, device=device)
        self._loose: list[Tensor] = []
        self._packed = 0

    def __len__(self) -> int:
        return self._packed + len(self._loose)

    def append(self, scalar: Tensor) -> None:
        """Append a scalar tensor, which must not be changed in place afterwards. Raises IndexError if it is full."""
        if len(self) == len(self._buffer):
            raise IndexError(f"the log is full ({len(self._buffer)} scalars); fetch them first")
        self._loose.append(scalar)
        if len(self._loose) == _LOOSE:
            self._pack()

    def _pack(self) -> None:
        if self._loose:
            end = self._packed + len(self._loose)
            self._buffer[self._packed : end].copy_(torch.stack(self._loose), non_blocking=True)
            self._packed = end
            self._loose = []

    def fetch(self) -> list[float]:
        """Return all scalars as numbers, and empty the log. Waits for the device once."""
        self._pack()
        values: list[float] = self._buffer[: self._packed].tolist()
        self._packed = 0
        return values

    def truncate(self, length: int) -> None:
        """Keep the first `length` scalars. Does not wait for the device."""
        self._loose = self._loose[: max(length - self._packed, 0)]
        self._packed = min(self._packed, length)

    def clear(self) -> None:
        self._loose = []
        self._packed = 0


@dataclass(frozen=True)
class ScaleChanges:
    """Changes of the scale, and skipped steps. Steps are numbered from 1 over the training."""

    changes: tuple[tuple[int, float], ...] = ()
    """(optimizer step, scale after it) for each step that changed the scale."""
    skipped_steps: tuple[int, ...] = ()
    """Steps that were skipped because their gradients overflowed."""


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer skips a step on the device, as fused optimizers do, instead of GradScaler.

    Reads the private attribute that GradScaler reads. If torch changes it, fused optimizers are not recognized, and
    `tests/training/amp/test_scale_history.py` fails.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


_history_of: weakref.WeakKeyDictionary[GradScaler, weakref.ref[ScaleHistory]] = weakref.WeakKeyDictionary()
"""The ScaleHistory of each scaler."""


def _claim(scaler: GradScaler, history: ScaleHistory) -> None:
    """Register `history` as the only one of `scaler`. Raises ValueError if there is another one."""
    known = _history_of.get(scaler)
    if known is not None and known() is not None:
        gc.collect()  # the other history may be garbage in a reference cycle
        if known() is not None:
            raise ValueError(
                "This GradScaler is already used by another TrainStep or ScaleHistory, and both would change its "
                "scale. Use one scaler for each, or delete the other one first."
            )
    _history_of[scaler] = weakref.ref(history)


class ScaleHistory:
    """Records the scale after every optimizer step, and which steps were skipped.

    The scaler sets `found_inf` on a fused optimizer, which skips the step on the device. A step-pre-hook stores each
    `found_inf` on the device; `read` fetches all of them at once, and replays growth and backoff as
    `_amp_update_scale_` does. Any other optimizer is not called if the gradients overflowed: then the hook does not
    run, and the host knows of the skipped step at once, because `GradScaler.step` has waited for the device.

    This relies on two undocumented details of GradScaler: the attribute `found_inf` on fused optimizers, and the rule
    of growth and backoff. If torch changes either, `tests/training/amp/test_scale_history.py` fails, which compares
    with `get_scale()`.

    Args:
        scaler: an enabled scaler, new or used, without another history.
        optimizer: the only optimizer that it steps.
        capacity: the maximum number of steps between two reads.

    Raises:
        ValueError: the scaler has another history, which would change its scale unnoticed.
    """

    def __init__(self, scaler: GradScaler, optimizer: torch.optim.Optimizer, *, capacity: int = 1024) -> None:
        self.steps = 0
        """Optimizer steps attempted, up to the last read."""
        self.optimizer_steps = 0
        """Optimizer steps that were not skipped, up to the last read."""
        device = next(p for group in optimizer.param_groups for p in group["params"]).device
        self._found_inf = ScalarLog(capacity, device)
        self._no_overflow, self._overflow = torch.zeros((), device=device), torch.ones((), device=device)
        self._of_this_step: Tensor | None = None
        self._adopt(scaler)
        _claim(scaler, self)
        self._hook_into(optimizer)

    def __reduce__(self) -> NoReturn:
        """Reject copying and pickling: the copied optimizer would lack the hook, and every step would look skipped."""
        raise TypeError(
            "A ScaleHistory, or a TrainStep that has one, cannot be copied or pickled. Save its state_dict() and load "
            "that into a new one."
        )

    def _hook_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Store each step's `found_inf` in a hook that does not keep the history alive."""
        weak_self = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (history := weak_self()) is not None:
                history._of_this_step = getattr(optimizer, "found_inf", history._no_overflow)

        weakref.finalize(self, optimizer.register_step_pre_hook(before_step).remove)

    def _adopt(self, scaler: GradScaler) -> None:
        state = scaler.state_dict()
        self.scale = float(state["scale"])
        self._growth_factor = float(state["growth_factor"])
        self._backoff_factor = float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._growth_tracker = int(state["_growth_tracker"])

    def step(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> Tensor | bool:
        """Call `scaler.step(optimizer)` and `scaler.update()`, and record their effect.

        Returns:
            True if the gradients overflowed; for a fused optimizer a tensor on the device, above 0 if they did.
        """
        self._of_this_step = None
        scaler.step(optimizer)
        scaler.update()
        found_inf = self._of_this_step if self._of_this_step is not None else self._overflow
        self._found_inf.append(found_inf)
        return found_inf if skips_on_device(optimizer) else found_inf is self._overflow

    def read(self) -> ScaleChanges:
        """Return the changes since the last read. Waits for the device once."""
        changes: list[tuple[int, float]] = []
        skipped: list[int] = []
        for found_inf in self._found_inf.fetch():
            before = self.scale
            self.steps += 1
            if found_inf:
                skipped.append(self.steps)
            else:
                self.optimizer_steps += 1
            self._replay(overflowed=bool(found_inf))
            if self.scale != before:
                changes.append((self.steps, self.scale))
        return ScaleChanges(tuple(changes), tuple(skipped))

    def state_dict(self) -> dict[str, int]:
        """Return the counters; the scale is part of the scaler's state. Call `read` first."""
        assert not len(self._found_inf), "read before saving"
        return {"steps": self.steps, "optimizer_steps": self.optimizer_steps}

    def load_state_dict(self, state: dict[str, int], scaler: GradScaler) -> None:
        """Restore the state. Load the scaler's state before."""
        self._adopt(scaler)
        self.steps, self.optimizer_steps = state["steps"], state["optimizer_steps"]
        self._found_inf.clear()

    def _replay(self, *, overflowed: bool) -> None:
        """Update the scale on the host as `_amp_update_scale_` does on the device."""
        if overflowed:
            self._growth_tracker = 0
            self.scale = float(numpy.float32(self.scale * self._backoff_factor))
            return
        self._growth_tracker += 1
        if self._growth_tracker == self._growth_interval:
            self._growth_tracker = 0
            with numpy.errstate(over="ignore"):
                grown = float(numpy.float32(self.scale * self._growth_factor))
            self.scale = grown if numpy.isfinite(grown) else self.scale  # torch keeps the scale then
