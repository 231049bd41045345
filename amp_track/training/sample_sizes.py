"""Find the samples that make the largest batch, for data whose samples differ in size, such as texts.

A max batch that was found with average batches runs out of memory later. Within 64 MiB, 4,000 texts padded to the
longest of their batch fit 283 at a time by their mean length, 61 to 83 by the first batches of eight random orders, and
61 if every batch holds the longest texts: only the last one trained for five epochs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from amp_track.training.amp import random_state

MEASURED_SAMPLES = 2_000
"""The most samples that are loaded to measure them. Of a larger data set, it is a random part."""
_FEW_SAMPLES = 64
"""If this many random samples have the same size, all count as equal: loading more, such as images, takes long."""
_MEASURED_BY_INDEX = 1_000_000
"""The most samples whose size is computed without loading them."""


@dataclass(frozen=True)
class SampleSizes:
    """The sizes of a data set's samples, or of a random part of them."""

    order: tuple[int, ...]
    """The indices of the measured samples, the largest first."""
    ratio: float
    """The size of the largest sample, relative to the mean."""
    samples: int
    """The length of the data set."""

    def largest(self, count: int) -> list[int]:
        """Return `count` indices of the largest samples: the batch that takes the most memory.

        If only a part was measured, the same fraction of that part is repeated.
        """
        known = min(math.ceil(count * len(self.order) / self.samples), len(self.order))
        return [self.order[index % known] for index in range(count)]


def measure(dataset: Any, size: Callable[[int], float] | None = None) -> SampleSizes | None:
    """Return the sizes of a map-style dataset's samples; None if they are all equal.

    Args:
        dataset: map-style.
        size: the size of the sample at an index. Default: load the sample and take `size_of` it.
    """
    samples = len(cast("Sized", dataset))
    most = MEASURED_SAMPLES if size is None else _MEASURED_BY_INDEX
    sizes: dict[int, float] = {}
    with random_state.seeded(0):
        for index in random.sample(range(samples), min(samples, most)):
            sizes[index] = size(index) if size is not None else size_of(dataset[index])
            if len(sizes) == _FEW_SAMPLES and len(set(sizes.values())) == 1 and size is None:
                return None
    largest = max(sizes.values(), default=0)
    if not sizes or largest == min(sizes.values()):
        return None
    order = tuple(sorted(sizes, key=lambda index: sizes[index], reverse=True))
    return SampleSizes(order, largest * len(sizes) / sum(sizes.values()), samples)


def size_of(sample: Any) -> int:
    """Return the number of elements of a sample's largest part, which padding and attention follow."""
    if isinstance(sample, Tensor):
        return sample.numel()
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, Mapping):
        return max(map(size_of, sample.values()), default=0)
    if isinstance(sample, list | tuple):
        if not sample or isinstance(sample[0], int | float):
            return len(sample)
        return max(map(size_of, sample))
    shape = getattr(sample, "shape", None) or getattr(sample, "size", None)  # an array, or an image of Pillow
    return math.prod(shape) if isinstance(shape, tuple) else 1
