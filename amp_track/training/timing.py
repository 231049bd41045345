"""Clocks that measure how long training takes, and how long of that it waits for data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

from amp_track.training.devices.base import Device

T = TypeVar("T")


class TrainingClock:
    """Measures seconds of training, and samples per second once warm: the first steps allocate, tune and compile.

    Args:
        device: waited for before the clock is read.
        warm_up_steps: optimizer steps that the speed leaves out.
    """

    def __init__(self, device: Device, warm_up_steps: int) -> None:
        self._device = device
        self._warm_up_steps = warm_up_steps
        self._samples = 0
        self._steps = 0
        self._started = 0.0
        self._warm_at: tuple[int, float] | None = (0, 0.0) if warm_up_steps == 0 else None
        self.seconds = 0.0
        """Seconds between each `start` and its `stop`, added up."""

    def start(self) -> None:
        """Start timing, once the device has finished what it was given."""
        self._device.synchronize()
        self._started = time.perf_counter()

    def count(self, samples: int, *, step: bool = True) -> None:
        """Count samples that were trained on; `step` says whether they complete an optimizer step."""
        self._samples += samples
        self._steps += step
        if self._warm_at is None and self._steps >= self._warm_up_steps:
            self._device.synchronize()  # once per job
            self._warm_at = (self._samples, self.seconds + time.perf_counter() - self._started)

    def stop(self) -> None:
        """Stop timing. Call it when the device has nothing left to do."""
        self.seconds += time.perf_counter() - self._started

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second after the warm-up, or including it if nothing came after it; None without samples."""
        if not self._samples:
            return None
        cold_samples, cold_seconds = self._warm_at or (0, 0.0)
        if cold_samples == self._samples:
            cold_samples, cold_seconds = 0, 0.0
        return (self._samples - cold_samples) / max(self.seconds - cold_seconds, 1e-9)


class InputWait:
    """Measures how long the device had nothing to compute because the next batch was not there.

    A device that computes within the step itself, as a CPU does, waits for all the time that a batch takes to arrive. A
    device with a queue lags behind the host: it waits only if it has finished its queue by the time the batch arrives.
    That is asked without waiting for the device, and the wait is then counted from when the batch was requested, which
    is too much by what the device still had to do at that moment.
    """

    def __init__(self, device: Device) -> None:
        self.seconds = 0.0
        """Seconds waited so far."""
        self._last_step = torch.Event(device.torch_device) if device.has_queue else None
        self._is_recorded = False

    def timed(self, batches: Iterator[T]) -> Iterator[T]:
        """Return an iterator over the same batches that times each one, and holds no reference to any."""
        return _Timed(self, batches)

    def step_submitted(self) -> None:
        """Note that a step's work has been given to the device. Call it after each step."""
        if self._last_step is not None:
            self._last_step.record()
            self._is_recorded = True

    def batch_arrived(self, seconds: float) -> None:
        """Count the time that a batch took to arrive, if the device had nothing to compute."""
        if self._last_step is None or not self._is_recorded or self._last_step.query():
            self.seconds += seconds


class _Timed(Iterator[T], Generic[T]):
    """Times each batch of an iterator.

    It is not a generator, because a generator's frame would hold a batch while the next one is loaded, and memory may
    not have room for two.
    """

    def __init__(self, wait: InputWait, batches: Iterator[T]) -> None:
        self._wait = wait
        self._batches = batches

    def __next__(self) -> T:
        asked = time.perf_counter()
        batch = next(self._batches)
        self._wait.batch_arrived(time.perf_counter() - asked)
        return batch
