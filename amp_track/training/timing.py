"""Measure how long training takes, how long it waits for data, and how fast a probe's full steps are."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from amp_track.training.data import Part
from amp_track.training.devices.base import Device

T = TypeVar("T")
_SECONDS, _MOST_STEPS = 0.2, 50
"""Seconds that give samples/s within a few percent on a device without a queue, and the most steps."""
_QUEUE_SECONDS, _MOST_QUEUED_STEPS = 0.6, 4096
"""The same with a queue, of which the last half is timed if the steps are short: a GPU idles at a low clock (an H200 at
345 MHz), and takes a while to raise it. Readings of a ResNet-18 then differ by 3 % (an H100, n=3)."""
_UNTIMED_STEPS = 3
"""Steps after the first two, if none is timed: the fragmentation of a caching allocator builds up over about five."""

TrainOn = Callable[[Part], int]


class TrainingClock:
    """Measures seconds of training, and samples per second after a warm-up: first steps allocate, tune and compile."""

    def __init__(self, device: Device, warm_up_steps: int) -> None:
        self._device = device
        self._warm_up_steps = warm_up_steps
        self._samples = self._steps = 0
        self._started = 0.0
        self._warm_at: tuple[int, float] | None = (0, 0.0) if warm_up_steps == 0 else None
        self.seconds = 0.0
        """Seconds between each `start` and its `stop`, added up."""

    def start(self) -> None:
        """Start timing, once the device has finished its queued work."""
        self._device.synchronize()
        self._started = time.perf_counter()

    def count(self, samples: int, *, step: bool = True) -> None:
        """Count trained samples; `step` is True if they complete an optimizer step."""
        self._samples += samples
        self._steps += step
        if self._warm_at is None and self._steps >= self._warm_up_steps:
            self._device.synchronize()  # once per job
            self._warm_at = (self._samples, self.seconds + time.perf_counter() - self._started)

    def stop(self) -> None:
        """Stop timing. Call it when the device is idle."""
        self.seconds += time.perf_counter() - self._started

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second after the warm-up, or including it if nothing follows; None without samples."""
        if not self._samples:
            return None
        cold_samples, cold_seconds = self._warm_at or (0, 0.0)
        if cold_samples == self._samples:
            cold_samples, cold_seconds = 0, 0.0
        return (self._samples - cold_samples) / max(self.seconds - cold_seconds, 1e-9)


class InputWait:
    """Measures how long the device was idle because the next batch was not loaded yet.

    A device without a queue, such as a CPU, is idle for all the time that a batch takes to arrive. A device with a
    queue lags behind the host: it is idle only if its queue is empty when the batch arrives. This is checked without
    synchronizing. The wait is then counted from the request for the batch, which overestimates it by the work that was
    still queued at that moment.

    Args:
        queue: the device, if it has a queue.
    """

    def __init__(self, queue: torch.device | None) -> None:
        self.seconds = 0.0
        self._queue = queue
        self._last_step = torch.Event(queue) if queue is not None else None
        self._is_recorded = False

    def timed(self, batches: Iterator[T]) -> Iterator[T]:
        """Return an iterator over the same batches that times each one, and holds no reference to any."""
        return _Timed(self, batches)

    def step_submitted(self) -> None:
        if self._last_step is not None:
            self._last_step.record(torch.accelerator.current_stream(self._queue))
            self._is_recorded = True

    def batch_arrived(self, seconds: float) -> None:
        """Add the time that a batch took to arrive, if the device was idle."""
        if self._last_step is None or not self._is_recorded or self._last_step.query():
            self.seconds += seconds


class _Timed(Iterator[T], Generic[T]):
    """Times each batch. Not a generator, whose frame would hold a batch while the next one is loaded: memory may not
    have room for two."""

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
    """The duration of a probe's full steps."""

    train_seconds: float
    """Of all steps, without loading."""
    samples_per_second: float | None
    load_seconds: float
    """The time to load one batch in this process."""
    speed_readings: tuple[float, ...] = ()
    """Samples per second of each reading, if there are several; `samples_per_second` is their median."""
    cold_samples_per_second: float | None = None
    """If there is no reading: of the few steps that were made, on a device that is hardly warm."""


@dataclass
class _Step:
    """A completed step: its last batch, its parts without their batches, and its measurements."""

    batch: Any = None
    parts: list[Part] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    """Without loading."""
    load_seconds: list[float] = field(default_factory=list)

    def again(self, train_on: TrainOn) -> None:
        """Repeat the step, with its last batch in each of its parts."""
        for part in self.parts:
            train_on(part._replace(batch=self.batch))


def make_full_steps(
    steps: Iterator[Iterator[Part]],
    train_on: TrainOn,
    device: Device,
    *,
    agree: Callable[[bool], bool] = lambda decision: decision,
    needs_more: Callable[[], bool] = lambda: False,
    readings: int = 1,
    most_steps: int = sys.maxsize,
) -> FullStepsTiming:
    """Make at least two full steps, if there are two, and enough to time them reliably, `readings` times.

    After the first two, at most `most_steps` in all are made. With 0 readings, make as many as the peak memory needs.
    Steps before the timing are repeated while `needs_more`.

    The second step needs more memory than the first even if optimizer state exists: 16 MB of 323 MB, ResNet-18, CPU.
    The first two load their batches, as a training does, because loading needs memory. Then the last batch is repeated:
    otherwise loading between the steps would dominate the time. The first step allocates, tunes and compiles, and is
    never timed: the only one of a training has no speed. `agree` makes all ranks decide alike.
    """
    step = _loaded_step(next(steps), train_on, device)
    cold_seconds, loads = step.seconds, step.load_seconds
    second = next(steps, None)
    if second is None:
        return FullStepsTiming(
            train_seconds=cold_seconds,
            samples_per_second=None,
            load_seconds=min(loads),
            cold_samples_per_second=step.samples / max(cold_seconds, 1e-9),
        )
    del step  # before the next batch is loaded: two at once are not what fits
    step = _loaded_step(second, train_on, device)
    loads += step.load_seconds
    made = 2
    while needs_more():
        cold_seconds += _seconds_of(1, step, train_on, device)
        made += 1
    if not readings:
        untimed_steps = max(min(_UNTIMED_STEPS, most_steps - made), 0)
        last_seconds = _seconds_of(untimed_steps, step, train_on, device)
        return FullStepsTiming(
            train_seconds=cold_seconds + step.seconds + last_seconds,
            samples_per_second=None,
            load_seconds=min(loads),
            cold_samples_per_second=(1 + untimed_steps) * step.samples / (step.seconds + last_seconds),
        )
    timed_steps, timed_seconds = _repeat(step, train_on, device, agree, most_steps - made)
    seconds = [timed_seconds, *(_seconds_of(timed_steps, step, train_on, device) for _ in range(readings - 1))]
    speeds = tuple(timed_steps * step.samples / max(each, 1e-9) for each in seconds)
    return FullStepsTiming(
        train_seconds=cold_seconds + sum(seconds),
        samples_per_second=statistics.median(speeds),
        load_seconds=min(loads),
        speed_readings=speeds if readings > 1 else (),
    )


def reading_seconds(device: Device) -> float:
    """Return how long steps have to take for a reliable speed."""
    return _QUEUE_SECONDS if device.has_queue else _SECONDS


def _loaded_step(parts: Iterator[Part], train_on: TrainOn, device: Device) -> _Step:
    made = _Step()
    asked = time.perf_counter()
    while (part := next(parts, None)) is not None:
        started = time.perf_counter()
        made.load_seconds.append(started - asked)
        made.samples += train_on(part)
        device.synchronize()
        asked = time.perf_counter()
        made.seconds += asked - started
        made.parts.append(part._replace(batch=None))
        made.batch = part.batch if part.update else None
        del part  # before the next batch is loaded
    return made


def _repeat(
    step: _Step, train_on: TrainOn, device: Device, agree: Callable[[bool], bool], most_steps: int
) -> tuple[int, float]:
    """Repeat a step until it is timed reliably, at most that often. Return the number of timed steps and their seconds.

    With a queue, steps run in groups that double in size, without synchronizing inside, and only the last group counts,
    when the GPU's clock has risen. Without a queue, every step counts.
    """
    in_all, wanted = step.seconds, reading_seconds(device)
    left = min((_MOST_QUEUED_STEPS if device.has_queue else _MOST_STEPS) - 1, most_steps)
    timed_steps, timed_seconds, group = 1, step.seconds, 2 if device.has_queue else 1
    while not agree(in_all >= wanted or group > left):
        seconds = _seconds_of(group, step, train_on, device)
        left -= group
        in_all += seconds
        if device.has_queue:
            timed_steps, timed_seconds, group = group, seconds, 2 * group
        else:
            timed_steps, timed_seconds = timed_steps + 1, timed_seconds + seconds
    return timed_steps, timed_seconds


def _seconds_of(steps: int, step: _Step, train_on: TrainOn, device: Device) -> float:
    """Repeat a step that many times, and return the seconds until the device has finished."""
    started = time.perf_counter()
    for _ in range(steps):
        step.again(train_on)
    device.synchronize()
    return time.perf_counter() - started
