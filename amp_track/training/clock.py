"""How long training takes, and how much of that it waits for data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

from amp_track.training.devices.base import Device

T = TypeVar("T")


class TrainingClock:
    """Seconds of training, and samples per second once warm: the first steps allocate, tune and compile."""

    def __init__(self, device: Device, warm_up_steps: int) -> None:
        self._device = device
        self._warm_up_steps = warm_up_steps
        self._samples = 0
        self._steps = 0
        self._started = 0.0
        self._warm_at: tuple[int, float] | None = (0, 0.0) if warm_up_steps == 0 else None
        self.seconds = 0.0

    def start(self) -> None:
        self._device.synchronize()
        self._started = time.perf_counter()

    def count(self, samples: int, *, step: bool = True) -> None:
        """So many samples more; `step` when they complete one."""
        self._samples += samples
        self._steps += step
        if self._warm_at is None and self._steps >= self._warm_up_steps:
            self._device.synchronize()  # once per job
            self._warm_at = (self._samples, self.seconds + time.perf_counter() - self._started)

    def is_over(self, seconds: float) -> bool:
        """Whether that long has been timed since the warm-up, by a clock that waits for the device."""
        self._device.synchronize()
        return self._warm_at is not None and time.perf_counter() - self._started - self._warm_at[1] > seconds

    def stop(self) -> None:
        """Call it when the device has nothing left to do."""
        self.seconds += time.perf_counter() - self._started

    @property
    def samples_per_second(self) -> float | None:
        """After the warm-up; of all there was, where there was no more; None where there was nothing."""
        if not self._samples:
            return None
        cold_samples, cold_seconds = self._warm_at or (0, 0.0)
        if cold_samples == self._samples:
            cold_samples, cold_seconds = 0, 0.0
        return (self._samples - cold_samples) / max(self.seconds - cold_seconds, 1e-9)


class InputWait:
    """How long the device had nothing to compute because the next batch was not there.

    A CPU computes within the step itself, so that all the time a batch takes to come is waited for. An accelerator is
    behind: it waits only if it has finished what it was given by the time the batch comes. That is asked without
    waiting for it, and then counts as a wait from when the batch was asked for, which is too much by what the device
    still had to do then.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._last_step = torch.Event(device) if device.type != "cpu" else None
        self._is_recorded = False

    def timed(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; nothing of them is kept."""
        return _Timed(self, batches)

    def step_submitted(self) -> None:
        """After each step's work was given to the device."""
        if self._last_step is not None:
            self._last_step.record()
            self._is_recorded = True

    def batch_arrived(self, seconds: float) -> None:
        """A batch has come, so long after it was asked for."""
        if self._last_step is None or not self._is_recorded or self._last_step.query():
            self.seconds += seconds


class _Timed(Iterator[T], Generic[T]):
    """No generator: its frame would hold a batch while the next one is loaded, and two are not what fits."""

    def __init__(self, wait: InputWait, batches: Iterator[T]) -> None:
        self._wait = wait
        self._batches = batches

    def __next__(self) -> T:
        asked = time.perf_counter()
        batch = next(self._batches)
        self._wait.batch_arrived(time.perf_counter() - asked)
        return batch
