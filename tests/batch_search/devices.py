"""Simulated devices whose memory is not a line of the batch size. `max_batch` is the largest that fits the budget."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from simulated_memory import Device

_EACH, _FIXED, _PAGE = 1064.8, 177_800, 4096


def line(max_batch: int, budget: int, share: float) -> tuple[float, float]:
    """Return fixed bytes, a share of the budget, and bytes for each sample, so that `max_batch` and a half fill it."""
    fixed = share * budget
    return fixed, (budget - fixed) / (max_batch + 0.5)


def bent(max_batch: int, budget: int, share: float, at: float, factor: float) -> Device:
    """From `at · max_batch` on, each sample takes `factor` times as much."""
    fixed, bend = share * budget, at * max_batch
    each = (budget - fixed) / (bend + factor * (max_batch + 0.5 - bend))
    return Device(lambda b: fixed + each * min(b, bend) + factor * each * max(b - bend, 0), budget)


def jumping(max_batch: int, budget: int, share: float, at: float, height: float) -> Device:
    """From `at · max_batch` on, a workspace takes `height` of what the samples may."""
    fixed = share * budget
    jump = height * (budget - fixed)
    each = (budget - fixed - jump) / (max_batch + 0.5)
    return Device(lambda b: fixed + each * b + (jump if b >= at * max_batch else 0), budget)


def wavering(max_batch: int, budget: int, share: float, samples: float) -> Device:
    """Takes more or less than a line, by up to the memory of a number of samples, which differs by batch."""
    fixed, each = line(max_batch, budget, share)
    return Device(lambda b: fixed + each * (b + (b > 1) * samples * (random.Random(b).random() - 0.5)), budget)


def flat_at_first(chance: random.Random, max_batch: int, budget: int, share: float, noise: float) -> Device:
    """Up to some batch the optimizer step takes more than the samples do. A reading has `noise`, of the budget."""
    fixed, each = line(max_batch, budget, share)
    bend = chance.random() * max_batch

    def need(batch_size: int) -> float:
        return fixed + each * max(bend, batch_size) + noise * budget * random.Random(batch_size).random()

    return Device(need, budget)


def plateau(max_batch: int, width: int) -> Device:
    """A small MLP's memory as measured: nearly none up to 170 samples, then a line, and no more in the last `width`.

    Pages fill up, and small blocks come from a reserve.
    """
    budget = math.ceil((_FIXED + _EACH * (max_batch - width)) / _PAGE) * _PAGE

    def need(batch_size: int) -> float:
        if batch_size <= 170:
            return 327_680 + 120 * batch_size
        line = _FIXED + _EACH * batch_size
        return min(line, budget) if batch_size <= max_batch else max(line, budget + _PAGE)

    return Device(need, budget, _PAGE)


FAMILIES: list[Callable[[random.Random, int, int, float], Device]] = [
    lambda chance, *device: bent(*device, chance.random(), chance.uniform(2 / 3, 1.5)),
    lambda chance, *device: jumping(*device, chance.uniform(0, 0.9), chance.uniform(0, 0.3)),
    lambda chance, *device: wavering(*device, chance.uniform(0, 3)),
]
"""Each draws a device for a max batch, a budget and a share of it that is fixed."""
