"""Learning rates that follow the optimizer steps made, not the steps attempted, without waiting for the device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from amp_track.records.errors import InvalidReturnValue, describe_type

Schedule = Callable[[int], float]
"""Maps the number of optimizer steps made to the factor of every group's learning rate, as for `LambdaLR`."""


def check_schedule(schedule: object) -> None:
    """Raise ValueError if the schedule is not callable, or InvalidReturnValue if its first factor is invalid."""
    if not callable(schedule):
        raise ValueError(
            f"schedule is {describe_type(schedule)}; it must be a function from the number of optimizer steps to a "
            "factor of the learning rate"
        )
    _factor(schedule, 0)


class LearningRates:
    """Sets each group's learning rate to its base rate times `schedule(optimizer_steps)`.

    Without a scaler, or with an optimizer that is not fused, the host knows the number of optimizer steps, and learning
    rates are plain numbers. With a fused optimizer under a GradScaler only the device knows whether a step was skipped.
    Then learning rates are tensors: the rates of the next `capacity` optimizer steps are on the device, which looks up
    the current one. torch's fused optimizers support such a learning rate; it is rounded to float32.

    Args:
        optimizer: the optimizer, whose groups have their base learning rates.
        schedule: a pure function, because it is called ahead of time, accepted by `check_schedule`.
        on_device: whether only the device knows if a step was skipped.
        capacity: the maximum number of steps between two calls of `set_optimizer_steps`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Schedule, *, on_device: bool, capacity: int = 1024
    ) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._on_device = on_device
        if on_device:
            device = next(p for group in optimizer.param_groups for p in group["params"]).device
            self._made = torch.zeros(1, dtype=torch.int64, device=device)
            self._rates = [torch.zeros(capacity + 1, device=device) for _ in self._base]
            self._current = [torch.zeros(1, device=device) for _ in self._base]
        self.set_optimizer_steps(0)

    def check(self) -> None:
        """Raise InvalidReturnValue if the next step's factor is invalid, or the exception that the schedule raises.

        An invalid factor that no step uses, such as one after the end of the schedule, is ignored. Waits for the device
        only if the steps since `set_optimizer_steps` have reached the number of valid factors computed ahead.
        """
        if self._steps >= self._known:
            optimizer_steps = self._optimizer_steps + (int(self._made) if self._on_device else 0)
            _factor(self._schedule, optimizer_steps)
            self.set_optimizer_steps(optimizer_steps)  # the factor is valid now

    def after_step(self, skipped: Tensor | bool) -> None:
        """Count one attempted step: `skipped` is a bool, or a tensor on the device, above 0 if it was skipped."""
        self._steps += 1
        if isinstance(skipped, Tensor):
            self._made.add_(skipped == 0)
            for rates, current in zip(self._rates, self._current, strict=True):
                torch.index_select(rates, 0, self._made, out=current)
        elif not skipped:
            self.set_optimizer_steps(self._optimizer_steps + 1)

    def set_optimizer_steps(self, optimizer_steps: int) -> None:
        """Set the total number of optimizer steps, and the learning rates for it.

        If the schedule has no valid factor, they stay unchanged: `check` raises before a step uses them.
        """
        self._optimizer_steps = optimizer_steps
        self._steps = 0
        ahead = range(len(self._rates[0]) if self._on_device else 1)
        factors: list[float] = []
        with contextlib.suppress(Exception):  # `check` raises it
            for number in ahead:
                factors.append(_factor(self._schedule, optimizer_steps + number))
        self._known = len(factors)
        if self._on_device:
            self._made.zero_()
        if not factors:
            return
        if not self._on_device:
            for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
                group["lr"] = base * factors[0]
            return
        factors += factors[-1:] * (len(ahead) - self._known)
        groups = zip(self._optimizer.param_groups, self._base, self._rates, self._current, strict=True)
        for group, base, rates, current in groups:
            rates.copy_(torch.tensor([base * factor for factor in factors]))
            current.copy_(rates[:1])
            group["lr"] = current[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the groups' base learning rates and the number of optimizer steps."""
        return {"base": self._base, "optimizer_steps": self._optimizer_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. Call it after the optimizer's `load_state_dict`, which replaces its learning rates."""
        self._base = list(state["base"])
        self.set_optimizer_steps(state["optimizer_steps"])


def _factor(schedule: Schedule, optimizer_steps: int) -> float:
    """Return the schedule's factor as a plain number: `torch.load(weights_only=True)` rejects numpy's numbers.

    Raises InvalidReturnValue if it is not a real number, or negative, inf or NaN.
    """
    expected = "a finite factor of the learning rate, 0 or more"
    factor: Any = schedule(optimizer_steps)
    if getattr(factor, "ndim", None) == 0:
        factor = factor.item()
    if not isinstance(factor, Real):
        raise InvalidReturnValue.of_type("schedule", factor, expected)
    number = float(factor)
    if not 0 <= number < math.inf:
        raise InvalidReturnValue(
            f"schedule returned {number:g} for {optimizer_steps} optimizer steps; it must return {expected}"
        )
    return number
