"""Measure how long training takes, how long it waits for data, and how fast a probe's full steps are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from amp_track.training.data import Part
from amp_track.training.devices.base import Device

T = TypeVar("T")
FEWEST_STEPS = 2
"""The second takes more than the first even if optimizer state exists already: 16 MB of 323 on a ResNet-18 on a CPU."""
_SECONDS, _MOST_STEPS = 0.2, 50
"""Seconds that know samples/s within a few per cent on a device that computes within the call, and the most steps."""
_QUEUE_SECONDS, _MOST_QUEUED_STEPS = 1.0, 4096
"""The same where the host runs ahead: a GPU idles at a low clock (an H200 at 345 MHz) and takes a while to raise it."""

TrainOn = Callable[[Part], int]


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


@dataclass(frozen=True, kw_only=True)
class FullStepsTiming:
    """How long the full steps took."""

    train_seconds: float
    """All of them, without loading."""
    samples_per_second: float
    load_seconds: float
    """The time that this process takes to load one batch."""


@dataclass
class _Step:
    """One step that was made: its last batch, the shape of its parts, what it took."""

    batch: Any
    parts: list[Part]
    samples: int
    seconds: float

    def again(self, train_on: TrainOn) -> None:
        """Make the step again, with its last batch in each of its parts."""
        for part in self.parts:
            train_on(part._replace(batch=self.batch))


def make_full_steps(
    steps: Iterator[Iterator[Part]],
    train_on: TrainOn,
    device: Device,
    *,
    agree: Callable[[bool], bool] = lambda decision: decision,
) -> FullStepsTiming:
    """Make at least two full steps, if there are as many, and enough to time them well.

    The first two load their batches, as a training does, for the memory that takes. The last batch is then repeated:
    one process that loads between the steps would be what is timed. The first step allocates, tunes and compiles, and
    is timed only if it is the only one.

    Args:
        steps: the parts of each step.
        train_on: trains on one part and returns its samples.
        device: where; it is waited for before the clock is read, and not after each step if it has a queue.
        agree: makes processes that train together decide alike.
    """
    loads: list[float] = []
    step, train_seconds = _loaded_step(next(steps), train_on, device, loads), 0.0
    for parts in steps:
        train_seconds += step.seconds
        del step  # before the next batch is loaded: two at once are not what fits
        step = _loaded_step(parts, train_on, device, loads)
        timed_steps, timed_seconds = _repeat(step, train_on, device, agree)
        break
    else:
        timed_steps, timed_seconds = 1, step.seconds
    return FullStepsTiming(
        train_seconds=train_seconds + timed_seconds,
        samples_per_second=timed_steps * step.samples / max(timed_seconds, 1e-9),
        load_seconds=min(loads),
    )


def _loaded_step(parts: Iterator[Part], train_on: TrainOn, device: Device, loads: list[float]) -> _Step:
    """Make one step on batches that are loaded for it, and note how long each one took to load."""
    made = _Step(None, [], 0, 0.0)
    while True:
        asked = time.perf_counter()
        part = next(parts, None)
        if part is None:
            return made
        started = time.perf_counter()
        loads.append(started - asked)
        made.samples += train_on(part)
        device.synchronize()
        made.seconds += time.perf_counter() - started
        made.parts.append(part._replace(batch=None))
        made.batch = part.batch if part.update else None
        del part


def _repeat(step: _Step, train_on: TrainOn, device: Device, agree: Callable[[bool], bool]) -> tuple[int, float]:
    """Repeat a step until it is timed well, and return how many steps that were, and their seconds.

    Behind a queue the steps come in groups of twice as many each time, without a wait inside, and the last group
    counts, when the clock has risen. Elsewhere every step counts.
    """
    wanted, most = (_QUEUE_SECONDS, _MOST_QUEUED_STEPS) if device.has_queue else (_SECONDS, _MOST_STEPS)
    timed_steps, timed_seconds, made = 1, step.seconds, 1
    while not agree(timed_seconds >= wanted or made >= most):
        group = 2 * timed_steps if device.has_queue else 1
        started = time.perf_counter()
        for _ in range(group):
            step.again(train_on)
        device.synchronize()
        seconds = time.perf_counter() - started
        made += group
        if device.has_queue:
            timed_steps, timed_seconds = group, seconds
        else:
            timed_steps, timed_seconds = timed_steps + 1, timed_seconds + seconds
    return timed_steps, timed_seconds
