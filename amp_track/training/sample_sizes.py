"""Find the samples that make the largest batch, for data whose samples differ in size, such as texts.

A max batch that was found with average batches runs out of memory later. Within 64 MiB, 4,000 texts padded to the
longest of their batch fit 283 at a time by their mean length, 61 to 83 by the first batches of eight random orders, and
61 if every batch holds the longest texts: only the last one trained for five epochs.
"""

from __future__ import annotations

import itertools
import math
import numbers
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

from amp_track.records.errors import InvalidReturnValue
from amp_track.training.amp import random_state
from amp_track.training.devices import oom

MEASURED_SAMPLES = 2_000
"""The most samples that are loaded to measure them. Of a larger data set, it is a random part."""
_EQUAL_SAMPLES, _EQUAL_SECONDS = 64, 1.0
"""If this many random samples are equal and loading them took this long, as with images, all count as equal."""
_MEASURED_BY_INDEX = 1_000_000
"""The most samples whose size is computed without loading them."""


class SizesUnknown(Exception):
    """Samples cannot be exchanged for the largest ones, because nothing is known about their sizes."""


Shapes = dict[tuple[Any, ...], tuple[int, ...]]
"""The shape of each part of a sample, by its path, such as `("input_ids",)`."""
_HOLDERS = (Tensor, numpy.ndarray, Mapping, list, tuple, str, bytes)


@dataclass(frozen=True)
class SampleSizes:
    """The sizes of a data set's samples, or of a random part of them."""

    order: tuple[Any, ...]
    """The indices of the measured samples: first the `leading` ones, then the others, each the largest first."""
    leading: int
    """How many of them are the largest in one dimension of one part, to which a batch is padded."""
    ratio: float
    """The size of the largest samples, padded to each other's, relative to the mean."""
    samples: int
    """The length of the data set."""

    def largest(self, count: int) -> list[Any]:
        """Return `count` indices of the largest samples: the batch that takes the most memory.

        If only a part was measured, the same fraction of that part is repeated.
        """
        known = min(max(math.ceil(count * len(self.order) / self.samples), self.leading), len(self.order))
        return [self.order[index % known] for index in range(count)]


def measure(
    dataset: Any,
    *,
    size: Callable[[int], float | None] | None = None,
    indices: Sequence[Any] | None = None,
    workers: int = 0,
) -> SampleSizes | None:
    """Return the sizes of a map-style dataset's samples; None if they are all equal.

    A sample that cannot be loaded is left out. If none can, raise the error of the last one.

    Args:
        dataset: map-style.
        size: the size of the sample at an index. Default: load the sample and take `shapes_of` it.
        indices: the indices that the training draws, of any type. Default: from 0 to the length of the dataset.
        workers: the number of loader processes. The training's own ones would inherit what a dataset opens at its first
            sample in this process, and h5py cannot share an open file.

    Raises:
        InvalidReturnValue: `size` does not return a number.
        SizesUnknown: samples have no part with a size.
    """
    drawn = range(len(dataset)) if indices is None else indices
    most = MEASURED_SAMPLES if size is None else _MEASURED_BY_INDEX
    chosen: list[Any] = random.Random(0).sample(drawn, min(len(drawn), most))
    if size is not None:
        parts = [numpy.fromiter((_checked(size(index)) for index in chosen), float, len(chosen)).reshape(-1, 1)]
    else:
        chosen, parts = _loaded(dataset, chosen, workers)
    varying = [part for part in parts if (part != part[:1]).any() and part.prod(axis=1).any()]
    if not varying:
        return None
    # Parts count alike: an image has more numbers than a caption of any length.
    volumes = [part.prod(axis=1) / part.prod(axis=1).mean() for part in varying]
    order = numpy.argsort(-sum(volumes), kind="stable")
    extents = itertools.chain.from_iterable(part[order].T for part in varying)
    leading = sorted({0} | {int(extent.argmax()) for extent in extents})
    order = numpy.concatenate([order[leading], numpy.delete(order, leading)])
    ratio = sum(part.max(axis=0).prod() / part.prod(axis=1).mean() for part in varying) / len(varying)
    return SampleSizes(tuple(chosen[index] for index in order), len(leading), float(ratio), len(drawn))


def _loaded(dataset: Any, indices: list[Any], workers: int) -> tuple[list[Any], list[NDArray[Any]]]:
    """Return the indices that can be loaded, and the shapes of each part, one row per sample."""
    started = time.monotonic()
    shapes: dict[int, Shapes] = {}
    failure = unknown = None
    is_equal = True
    with random_state.seeded(0):
        for number, loaded in enumerate(_load(ShapesOfSamples(dataset), indices, workers)):
            if isinstance(loaded, SizesUnknown):
                unknown, loaded = loaded, {}
            if isinstance(loaded, Exception):
                failure = loaded
                continue
            shapes[number] = loaded
            is_equal = is_equal and loaded == next(iter(shapes.values()))
            if is_equal and len(shapes) >= _EQUAL_SAMPLES and time.monotonic() - started > _EQUAL_SECONDS:
                break
    if failure is not None and not shapes:
        raise failure
    paths = dict.fromkeys(itertools.chain.from_iterable(shapes.values()))
    if unknown is not None and not paths:
        raise unknown
    parts = [_rows([each.get(path) for each in shapes.values()]) for path in paths]
    return [indices[number] for number in shapes], parts


def _rows(shapes: list[tuple[int, ...] | None]) -> NDArray[Any]:
    """Return the shapes of one part as rows of one length. A sample without this part has zeros."""
    dimensions = max(len(shape) for shape in shapes if shape is not None)
    missing = (0,) * dimensions
    return numpy.array([missing if s is None else (*s, *(1,) * (dimensions - len(s))) for s in shapes], dtype=float)


class ShapesOfSamples(Dataset[Any]):
    """A data set whose items are the `shapes_of` another one's, or the exception of one that cannot be loaded."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Shapes | Exception:
        try:
            sample = self._dataset[index]
            return shapes_of(sample) or SizesUnknown(f"the size of a sample of type {type(sample).__name__} is unknown")
        except Exception as error:
            if oom.is_out_of_memory(error):
                raise
            return error


def _load(dataset: ShapesOfSamples, indices: Iterable[Any], workers: int) -> Iterable[Shapes | Exception]:
    if not workers:
        return (dataset[index] for index in indices)
    return DataLoader(
        dataset,
        sampler=indices,
        batch_size=None,
        collate_fn=_same,
        generator=Generator(),
        num_workers=workers,
        multiprocessing_context="fork" if sys.platform == "linux" else None,  # as in `amp_track.training.data.Loader`
    )


def _same(item: Any) -> Any:
    return item


def _checked(size: object) -> float:
    if isinstance(size, numbers.Real) and 0 <= (number := float(size)) < math.inf:
        return number
    raise InvalidReturnValue(f"sample_size() returned {size!r}; it must return a number, at least 0")


def shapes_of(sample: Any) -> Shapes:
    """Return the shape of each part of a sample: of tensors, arrays, images, texts, and sequences of numbers.

    The items of a list of one type are padded to each other, such as the boxes of an image, and count as one part.
    """
    if isinstance(sample, Mapping):
        return _joined((name, shapes_of(value)) for name, value in sample.items())
    if isinstance(sample, list | tuple):
        types = set(map(type, sample))
        if len(types) > 1 or (isinstance(sample, tuple) and not types <= {int, float, bool}):  # not of one kind
            return _joined((number, shapes_of(value)) for number, value in enumerate(sample))
        items = [] if not sample or isinstance(sample[0], int | float) else [shapes_of(value) for value in sample]
        paths = dict.fromkeys(itertools.chain.from_iterable(items))
        return {path: (len(sample), *_padded(item.get(path, ()) for item in items)) for path in paths or [()]}
    if isinstance(sample, str | bytes):
        return {(): (len(sample),)}
    shape = sample.shape if isinstance(sample, Tensor) else getattr(sample, "shape", getattr(sample, "size", None))
    if isinstance(shape, tuple):
        return {(): tuple(shape)} if shape else {}
    # A dataclass, or another object that holds tensors.
    held = {name: value for name, value in getattr(sample, "__dict__", {}).items() if isinstance(value, _HOLDERS)}
    return _joined((name, shapes_of(value)) for name, value in held.items())


def _joined(parts: Iterable[tuple[Any, Shapes]]) -> Shapes:
    return {(name, *path): shape for name, shapes in parts for path, shape in shapes.items()}


def _padded(shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(max(extents) for extents in itertools.zip_longest(*shapes, fillvalue=1))


def volume_of(sample: Any) -> int:
    """Return the number of elements of a batch or a sample."""
    return sum(math.prod(shape) for shape in shapes_of(sample).values())
