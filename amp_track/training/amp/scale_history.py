"""ScaleHistory records the gradient scale and skipped steps exactly, without waiting for the device at each step.

Uses private names of GradScaler: `_per_optimizer_states` (with `found_inf_per_device` and `stage`), `_scale`,
`_growth_tracker`, `_growth_factor`, `_backoff_factor`, `_growth_interval`, and the rule of `torch._amp_update_scale_`.
If torch changes them, `tests/training/amp/test_scale_history.py` fails, which compares with `get_scale()`.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_track.training.amp.scalar_log import ScalarLog


@dataclass(frozen=True)
class ScaleChanges:
    """Changes of the scale, and skipped steps. A step is a call of `scaler.update()`, numbered from 1."""

    changes: tuple[tuple[int, float], ...] = ()
    """(step, scale after it) for each step that changed the scale."""
    skipped_steps: tuple[int, ...] = ()
    """Steps at which the gradients of an optimizer overflowed, so that its step was skipped."""
    skipped_by: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False)
    """The skipped steps of each optimizer, by its name."""


class _Update(NamedTuple):
    """What is known on the host about one call of `update`. Its scalars are in the log, in the order of the fields."""

    is_set: bool
    """Whether somebody else has set the scale before it: then scale and growth tracker are logged."""
    new_scale: float | None
    has_new_scale: bool
    """Whether a tensor was given as the new scale: then it is logged."""
    found: tuple[tuple[str, int, bool], ...]
    """(name, number of devices, whether it stepped) of each optimizer: one overflow per device is logged."""
    rule: tuple[float, float, int]
    """Growth factor, backoff factor and growth interval."""
    scalars: int
    """The number of its scalars in the log."""


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return True if the optimizer skips a step on the device, as fused optimizers do, instead of GradScaler.

    Reads the private attribute that GradScaler reads. If torch changes it, fused optimizers are not recognized, and
    `tests/training/amp/test_scale_history.py` fails.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _known(scaler: GradScaler) -> ScaleHistory | None:
    """Return the scaler's history, if it has one that still exists."""
    history_ref = getattr(type(scaler), "history_ref", None)
    history = history_ref() if history_ref is not None else None
    return history if history is not None and history._scaler_ref() is scaler else None


def _recorded(base: type[GradScaler], history: ScaleHistory) -> type[GradScaler]:
    """Return a subclass of a scaler's class that tells the history, while it exists, of each step and update."""
    weak_history = weakref.ref(history)

    # Not super(): an error of the recording gives the scaler its own class back in the middle of a call.
    class Recorded(base):  # type: ignore[misc, valid-type]
        recorded_class, history_ref = base, weak_history

        def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if (history := weak_history()) is not None and history._scaler_ref() is self:
                history._note(self, optimizer)
            return base.step(self, optimizer, *args, **kwargs)

        def unscale_(self, optimizer: Optimizer) -> None:
            if (history := weak_history()) is not None and history._scaler_ref() is self:
                history._note(self, optimizer)
            base.unscale_(self, optimizer)

        def update(self, new_scale: float | Tensor | None = None) -> None:
            if (history := weak_history()) is not None and history._scaler_ref() is self:
                history._on_update(self, base.update, new_scale)
            else:
                base.update(self, new_scale)

        def __reduce_ex__(self, protocol: Any) -> Any:  # a copy has no history
            _, (_, *arguments), *state = super().__reduce_ex__(protocol)
            return object.__new__, (base, *arguments), *state

    Recorded.__name__, Recorded.__qualname__, Recorded.__module__ = base.__name__, base.__qualname__, base.__module__
    return Recorded


class ScaleHistory:
    """Records the scale after every update, and which steps of which optimizer were skipped.

    The scaler gets a subclass of its class, whose `update` keeps the overflows that the scaler has found on the device.
    `read` fetches all of them at once, and replays growth and backoff as `torch._amp_update_scale_` does. The rule is
    read from the scaler at each update. If anything else sets the scale, such as `load_state_dict`, its tensors have
    another version, and the replay starts anew from their values.

    Args:
        scaler: an enabled scaler, new or used, without another history.
        optimizer: the optimizer that it steps, or several by name. Others get names such as `optimizer1`.
        on_error: called with an error of the recording itself, which then has stopped. Default: it is raised.
        before_step: called with each optimizer before its gradients are unscaled, or used: only the scaler knows when.

    Raises:
        ValueError: the scaler is disabled, or has another history.
    """

    def __init__(
        self,
        scaler: GradScaler,
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        *,
        on_error: Callable[[Exception], None] | None = None,
        before_step: Callable[[Optimizer], None] | None = None,
    ) -> None:
        if not scaler.is_enabled():
            raise ValueError("The GradScaler is disabled: it scales nothing, so it has no history.")
        self.steps = 0
        """Updates of the scaler, up to the last read."""
        self.optimizer_steps = 0
        """Updates without an overflow, up to the last read."""
        self.updates = 0
        """Updates of the scaler, including those that were not read."""
        self._names: dict[int, tuple[weakref.ref[Optimizer], str]] = {}
        self._log, self._updates, self._fetched = ScalarLog(), deque[_Update](), deque[float]()
        self._last_found: dict[int, list[Tensor]] = {}
        self._applied: Tensor | None = None
        self._forget_unread()
        self.never_grows = False
        """Whether the growth interval was set below the steps since the last overflow, up to the last read."""
        self._on_error, self._before_step = on_error, before_step
        self._is_called = self._is_paused = False
        named = optimizer if isinstance(optimizer, Mapping) else {"optimizer": optimizer} if optimizer else {}
        self._adopt(scaler)
        parameters = (p for each in named.values() for group in each.param_groups for p in group["params"])
        kept = scaler._scale if scaler._scale is not None else next(parameters, None)
        self._device = kept.device if kept is not None else torch.device(scaler._device)
        self._names |= {id(each): (weakref.ref(each), name) for name, each in named.items()}
        self._hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._scaler_ref: Callable[[], GradScaler | None] = weakref.ref(scaler)
        _claim(scaler, self)

    def __reduce__(self) -> NoReturn:
        """Reject copying and pickling: the copied scaler would have no history, and every step would be missing."""
        raise TypeError(
            "A ScaleHistory, or a TrainStep that has one, cannot be copied or pickled. Save its state_dict() and load "
            "that into a new one."
        )

    def close(self, scaler: GradScaler) -> None:
        """Stop recording, and give the scaler its own class back. What was recorded can still be read."""
        if _known(scaler) is self:
            self._scaler_ref = lambda: None  # a bound method of the scaler may outlive its class
            scaler.__class__ = type(scaler).recorded_class  # type: ignore[attr-defined]

    def _hook_into(self, optimizer: Optimizer) -> None:
        """Note whether the optimizer is called, in a hook that does not keep the history alive."""
        weak_self = weakref.ref(self)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (history := weak_self()) is not None:
                history._is_called = True

        weakref.finalize(self, optimizer.register_step_pre_hook(before_step).remove)
        self._hooked.add(optimizer)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the optimizers that are known so far."""
        return tuple(name for _, name in self._names.values())

    def _note(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Name an optimizer that the scaler is about to unscale or to step."""
        try:
            known = self._names.get(id(optimizer))
            if known is None or known[0]() is not optimizer:  # an id may be used again
                taken = {name for _, name in self._names.values()}
                count = len(self._names)
                self._names[id(optimizer)] = weakref.ref(optimizer), "optimizer" if not taken else f"optimizer{count}"
            if self._before_step is not None:
                self._before_step(optimizer)
        except Exception as error:
            self._fail(scaler, error)

    def _adopt(self, scaler: GradScaler) -> None:
        state = scaler.state_dict()
        self.scale = float(state["scale"])
        self._growth_tracker = int(state["_growth_tracker"])
        self._seen = _versions(scaler)

    def step(self, scaler: GradScaler, optimizer: Optimizer) -> Tensor | bool:
        """Call `scaler.step(optimizer)` and `scaler.update()`.

        Returns:
            True if the gradients overflowed; for a fused optimizer a tensor on the device, above 0 if they did.
        """
        on_device = skips_on_device(optimizer)
        if not on_device and optimizer not in self._hooked:
            self._hook_into(optimizer)
        self._is_called = False
        scaler.step(optimizer)
        scaler.update()
        return self._last_found[id(optimizer)][0] if on_device else not self._is_called

    def was_skipped(self) -> bool:
        """Return whether the gradients of any optimizer overflowed at the last update. Waits for the device."""
        return any(bool(found) for tensors in self._last_found.values() for found in tensors)

    def applied_steps(self) -> Tensor:
        """Return the number of updates without an overflow, on the device: the same tensor each time, which counts on.

        The first call waits for the device, later ones do not.
        """
        if self._applied is None:
            self._replay_all(wait=True)
            self._applied = torch.tensor(self.optimizer_steps, device=self._device)
        return self._applied

    def reset(self, scaler: GradScaler) -> None:
        """Clear what a failed step has left in the scaler, whose scale stays. Waits for the device."""
        self._is_paused = True
        try:
            scaler.update(scaler.get_scale())
        finally:
            self._is_paused = False

    def _on_update(
        self,
        scaler: GradScaler,
        update: Callable[[GradScaler, float | Tensor | None], None],
        new_scale: float | Tensor | None,
    ) -> None:
        """Call the scaler's own update, and record its effect unless it raises. Does not wait for the device.

        Every step passes through here, so it calls few functions.
        """
        if self._is_paused or scaler._scale is None:  # without a scale torch raises
            update(scaler, new_scale)
            return
        try:
            recorded = self._before(scaler, new_scale)
        except Exception as error:
            self._fail(scaler, error)
            update(scaler, new_scale)
            return
        update(scaler, new_scale)
        try:
            self._after(scaler, *recorded)
        except Exception as error:
            self._fail(scaler, error)

    def _fail(self, scaler: GradScaler, error: Exception) -> None:
        """Stop recording after an error of the recording itself, and tell `on_error`. Without that, raise the error."""
        if self._on_error is None:
            raise error
        self.close(scaler)
        self._on_error(error)

    def _before(
        self, scaler: GradScaler, new_scale: float | Tensor | None
    ) -> tuple[_Update, list[Tensor], dict[int, list[Tensor]]]:
        """Return what an update is about to do, with its scalars: the update itself changes some of them."""
        found: dict[int, list[Tensor]] = {}
        of_optimizers: list[tuple[str, int, bool]] = []
        count = 0
        for key, state in scaler._per_optimizer_states.items():
            if tensors := list(state["found_inf_per_device"].values()):
                found[key] = tensors
                # A general name for one that was unscaled before the recording began.
                name = self._names[key][1] if key in self._names else "optimizer"
                of_optimizers.append((name, len(tensors), state["stage"] is OptState.STEPPED))
                count += len(tensors)
        if count > 1:  # update adds all others to the first, in place
            found = {key: [each.clone() for each in tensors] for key, tensors in found.items()}
        is_set = self._seen is None or _versions(scaler) != self._seen
        logged = [scaler._scale.clone(), scaler._growth_tracker.clone()] if is_set else []  # type: ignore[union-attr]
        if has_new_scale := isinstance(new_scale, Tensor):
            logged.append(new_scale.detach().clone())
            new_scale = None
        rule = scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval
        scalars = len(logged) + count
        return _Update(is_set, new_scale, has_new_scale, tuple(of_optimizers), rule, scalars), logged, found

    def _after(
        self, scaler: GradScaler, recorded: _Update, logged: list[Tensor], found: dict[int, list[Tensor]]
    ) -> None:
        self._seen = _versions(scaler)
        self._last_found = found
        for tensor in logged:
            self._log.append(tensor)
        for tensors in found.values():
            for tensor in tensors:
                self._log.append(tensor)
        self._updates.append(recorded)
        self.updates += 1
        if self._applied is not None:
            of_all = [each for tensors in found.values() for each in tensors]
            overflows = sum((each.to(self._applied.device) for each in of_all), torch.zeros_like(self._applied))
            self._applied += overflows == 0

    def read(self, *, wait: bool = True) -> ScaleChanges:
        """Return the changes since the last read. Waits for the device once, or reads only what has arrived."""
        self._replay_all(wait=wait)
        by_name = {name: tuple(steps) for name, steps in self._skipped_by.items() if steps}
        unread = ScaleChanges(tuple(self._changes), tuple(self._skipped), by_name)
        self._forget_unread()
        return unread

    def _forget_unread(self) -> None:
        self._changes: list[tuple[int, float]] = []
        self._skipped: list[int] = []
        self._skipped_by: dict[str, list[int]] = {}

    def _replay_all(self, *, wait: bool) -> None:
        self._fetched.extend(self._log.fetch(wait=wait))
        while self._updates and len(self._fetched) >= self._updates[0].scalars:
            update, before = self._updates.popleft(), self.scale
            self.steps += 1
            if update.is_set:
                self.scale, self._growth_tracker = self._fetched.popleft(), int(self._fetched.popleft())
            new_scale = self._fetched.popleft() if update.has_new_scale else update.new_scale
            overflowed = False
            for name, devices, stepped in update.found:
                if sum(self._fetched.popleft() for _ in range(devices)):
                    overflowed = True
                    self._skipped_by.setdefault(name, []).extend([self.steps] * stepped)
            if overflowed:
                self._skipped.append(self.steps)
            else:
                self.optimizer_steps += 1
            self._replay(update, new_scale, overflowed=overflowed)
            if self.scale != before:
                self._changes.append((self.steps, self.scale))

    def _replay(self, update: _Update, new_scale: float | None, *, overflowed: bool) -> None:
        """Update the scale on the host as `torch._amp_update_scale_` does on the device."""
        growth_factor, backoff_factor, growth_interval = update.rule
        self.never_grows = not overflowed and self._growth_tracker >= growth_interval
        if new_scale is not None:  # the growth tracker stays
            self.scale = float(numpy.float32(new_scale))
            return
        if overflowed:
            self._growth_tracker = 0
            self.scale = float(numpy.float32(self.scale * backoff_factor))
            return
        self._growth_tracker += 1
        if self._growth_tracker == growth_interval:  # not >=: a tracker above a smaller new interval never grows again
            self._growth_tracker = 0
            with numpy.errstate(over="ignore"):
                grown = float(numpy.float32(self.scale * growth_factor))
            self.scale = grown if numpy.isfinite(grown) else self.scale  # torch keeps the scale then

    def state_dict(self) -> dict[str, int]:
        """Return the counters; the scale is part of the scaler's state. Call `read` first."""
        assert not self._updates, "read before saving"
        return {"steps": self.steps, "optimizer_steps": self.optimizer_steps}

    def load_state_dict(self, state: dict[str, int], scaler: GradScaler) -> None:
        """Restore the state. Load the scaler's state before."""
        self._adopt(scaler)
        self.steps, self.optimizer_steps = state["steps"], state["optimizer_steps"]
        self.updates = self.steps
        self._log.clear()
        self._updates.clear()
        self._fetched.clear()
        self._forget_unread()
        self._applied = None


def _claim(scaler: GradScaler, history: ScaleHistory) -> None:
    """Make `history` the only one of `scaler`. Raises ValueError if there is another one."""
    if _known(scaler) is not None:
        gc.collect()  # the other history may be garbage in a reference cycle
        if _known(scaler) is not None:
            raise ValueError(
                "This GradScaler is already used by another TrainStep, ScaleHistory or watch. Use one scaler for each, "
                "or close or delete the other one first."
            )
    own_class = getattr(type(scaler), "recorded_class", type(scaler))
    scaler.__class__ = _recorded(own_class, history)


def _versions(scaler: GradScaler) -> tuple[int, int, int, int] | None:
    """Return the identity and version of the scale's tensors: others than before mean that somebody has set them.

    Return None if there are none yet, or if they have no version, as inference tensors.
    """
    scale, tracker = scaler._scale, scaler._growth_tracker
    try:
        return id(scale), scale._version, id(tracker), tracker._version  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None
