"""The full steps of a probe: what is loaded, what is repeated, what is timed; the device is a clock of its own."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from amp_track.training.data import Part
from amp_track.training.timing import FullStepsTiming, make_full_steps


class Batch:
    """One that can be watched: a tuple cannot be referred to weakly."""


class Device:
    """Takes `step_seconds` for a part, within the call or behind a queue. `waits` counts the waits for it."""

    def __init__(self, *, step_seconds: float, has_queue: bool) -> None:
        self.has_queue = has_queue
        self.step_seconds = step_seconds
        self.now = self.busy_until = 0.0
        self.waits = 0
        self.trained: list[Part] = []

    def train_on(self, part: Part) -> int:
        self.trained.append(part)
        self.busy_until = max(self.busy_until, self.now) + self.step_seconds
        if not self.has_queue:
            self.now = self.busy_until
        return part.samples

    def synchronize(self) -> None:
        self.waits += 1
        self.now = max(self.now, self.busy_until)


def timed(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    *,
    steps: int,
    parts: int = 1,
    readings: int = 1,
    needs_more: Callable[[], bool] = lambda: False,
    most_steps: int = sys.maxsize,
) -> Any:
    """Return the timing, and how many batches were loaded and alive at most."""
    monkeypatch.setattr("amp_track.training.timing.time", SimpleNamespace(perf_counter=lambda: device.now))
    alive: weakref.WeakSet[Batch] = weakref.WeakSet()
    seen = SimpleNamespace(loaded=0, most_alive=0)

    def load() -> Batch:
        gc.collect()
        device.trained.clear()
        device.now += 3.0
        seen.loaded += 1
        batch = Batch()
        alive.add(batch)
        seen.most_alive = max(seen.most_alive, len(alive))
        return batch

    def of_step() -> Iterator[Part]:
        for number in range(parts):
            yield Part(load(), 1 / parts, number == parts - 1, 8)

    timing = make_full_steps(
        (of_step() for _ in range(steps)),
        device.train_on,
        device,  # type: ignore[arg-type]
        readings=readings,
        needs_more=needs_more,
        most_steps=most_steps,
    )
    return timing, seen


def test_loading_is_not_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timing, seen = timed(Device(step_seconds=0.01, has_queue=False), monkeypatch, steps=99)
    assert seen.loaded == 2
    assert timing.samples_per_second == pytest.approx(8 / 0.01)
    assert timing.load_seconds == pytest.approx(3.0)
    assert timing.train_seconds == pytest.approx(0.21, abs=0.011)


def test_a_slow_device_makes_two_steps_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(step_seconds=5.0, has_queue=False)
    timing, _ = timed(device, monkeypatch, steps=99)
    assert timing == FullStepsTiming(train_seconds=10.0, samples_per_second=8 / 5.0, load_seconds=3.0)


def test_a_device_with_a_queue_is_timed_without_a_wait_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(step_seconds=0.001, has_queue=True)
    timing, _ = timed(device, monkeypatch, steps=99)
    assert timing.samples_per_second == pytest.approx(8 / 0.001)
    assert timing.train_seconds >= 0.3
    assert device.waits < 16


def test_a_probe_without_a_reading_makes_the_steps_that_the_peak_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(step_seconds=0.01, has_queue=True)
    timing, seen = timed(device, monkeypatch, steps=99, readings=0)
    assert seen.loaded == 2
    assert (timing.samples_per_second, timing.speed_readings) == (None, ())
    assert timing.cold_samples_per_second == pytest.approx(8 / 0.01)
    assert timing.train_seconds == pytest.approx(0.05)


def test_steps_are_repeated_until_the_optimizer_has_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """GradScaler skips the first steps of many models: memory is less than what the training needs."""
    device, skipped = Device(step_seconds=0.01, has_queue=True), iter([True] * 7)
    timing, _ = timed(device, monkeypatch, steps=99, readings=0, needs_more=lambda: next(skipped, False))
    assert len(device.trained) == 1 + 7 + 3, "since the second batch was loaded"
    assert timing.cold_samples_per_second == pytest.approx(8 / 0.01)


@pytest.mark.parametrize("has_queue", [False, True])
@pytest.mark.parametrize("readings", [0, 1])
@pytest.mark.parametrize("most_steps", range(2, 10))
def test_a_probe_makes_no_more_steps_than_the_training(
    monkeypatch: pytest.MonkeyPatch, has_queue: bool, readings: int, most_steps: int
) -> None:
    device = Device(step_seconds=0.001, has_queue=has_queue)
    timing, _ = timed(device, monkeypatch, steps=99, readings=readings, most_steps=most_steps)
    made = 1 + len(device.trained)
    assert most_steps // 2 < made <= most_steps
    assert (timing.samples_per_second or timing.cold_samples_per_second) == pytest.approx(8 / 0.001)


@pytest.mark.parametrize("readings", [0, 1])
def test_the_only_step_of_a_training_is_no_speed(monkeypatch: pytest.MonkeyPatch, readings: int) -> None:
    """The first step of a process starts up the device."""
    timing, seen = timed(Device(step_seconds=0.01, has_queue=False), monkeypatch, steps=1, readings=readings)
    assert seen.loaded == 1
    assert (timing.samples_per_second, timing.speed_readings) == (None, ())
    assert timing.cold_samples_per_second == pytest.approx(800)


@pytest.mark.parametrize("has_queue", [False, True])
def test_several_readings_have_as_many_steps_each(monkeypatch: pytest.MonkeyPatch, has_queue: bool) -> None:
    """One that a disturbance slows down is not the median."""
    device = Device(step_seconds=0.01, has_queue=has_queue)
    slow = device.step_seconds * 2
    train_on, count = device.train_on, itertools.count()

    def disturbed(part: Part) -> int:
        device.step_seconds = slow if next(count) < 8 else 0.01
        return train_on(part)

    monkeypatch.setattr(device, "train_on", disturbed)
    timing, seen = timed(device, monkeypatch, steps=99, readings=3)
    assert seen.loaded == 2
    assert len(timing.speed_readings) == 3
    assert timing.samples_per_second == pytest.approx(8 / 0.01)
    assert min(timing.speed_readings) < 8 / 0.01 or has_queue, "with a queue, only the last group of a reading counts"


@pytest.mark.parametrize("parts", [1, 2])
def test_two_batches_are_never_there_at_once(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    timing, seen = timed(Device(step_seconds=0.01, has_queue=False), monkeypatch, steps=99, parts=parts)
    assert (seen.loaded, seen.most_alive) == (2 * parts, 1)
    assert timing.samples_per_second == pytest.approx(8 / 0.01), "a step of two parts takes twice as long"
