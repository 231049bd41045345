"""The order, size and loading of the batches that a job trains and evaluates on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from amp_track.config.job import (
    ALONE,
    Job,
    Rank,
    steps_of_batches,
    steps_per_epoch,
    streamed_samples,
    synthetic_samples,
    total_steps,
)
from amp_track.records.errors import InvalidReturnValue
from amp_track.training.amp import random_state
from amp_track.training.amp.tensors import batch_length, map_tensors, tensors
from amp_track.training.sample_sizes import SampleSizes, SizesUnknown, measure, volume_of
from amp_track.workload import Workload, first_samples, has_own_collate_fn, is_pair

T = TypeVar("T")


class Part(NamedTuple):
    """One rank's batch: all of an optimizer step, or a part of one if gradients accumulate."""

    batch: Any
    """(input, target), first dimension N."""
    share: float
    """Its fraction of the optimizer step's samples, times the number of ranks, over which gradients are averaged."""
    update: bool
    """Whether it completes its optimizer step."""
    samples: int
    """Samples of all ranks together in this batch."""


@dataclass(frozen=True)
class Position:
    """A position between two optimizer steps, from which a training can resume.

    `epoch` and `step` (within the epoch) count from 0; `generator` is the state of the shuffling generator at the start
    of that epoch.
    """

    epoch: int
    step: int
    generator: Tensor


class Batches:
    """The batches of one rank, by epochs, from the workload's data or synthetic.

    Every epoch has a new order. Its last batch is smaller if the batch size does not divide the data. All ranks draw
    the same order and take turns at its samples. If fewer samples than ranks are left, the other ranks repeat a sample
    with share 0, so that every rank makes every step.
    """

    def __init__(self, job: Job, workload: Workload, rank: Rank = ALONE, *, pin_memory: bool = False) -> None:
        assert job.batch_size is not None
        self._job = job
        self._workload = workload
        self._rank = rank
        self._batch_size = job.batch_size
        self._eval_batch_size = job.samples_per_evaluation_batch or 1
        self._generator = torch.Generator().manual_seed(job.seed)
        self._has_own_collate_fn = has_own_collate_fn(workload)
        self._loader = Loader(
            collate_fn=workload.collate_fn if self._has_own_collate_fn else None,
            workers=0 if job.probe else job.num_workers or 0,  # a probe takes few batches
            rank=rank,
            pin_memory=pin_memory,
        )
        self._train_data = self._eval_data = self._example = None
        if job.synthetic:
            self._example = example_batch(workload, self._batch_size)
            if pin_memory and _can_be_pinned(self._example):
                self._example = map_tensors(torch.Tensor.pin_memory, self._example)
        else:
            self._train_data, self._eval_data = workload.train_data(), workload.eval_data()
        self._train_sizes: SampleSizes | None = None
        self._eval_sizes: SampleSizes | None = None
        self.why_as_drawn = ""
        """Why batches stay as they are drawn, although samples may differ in size."""
        self._has_worst_example = type(workload).worst_example is not Workload.worst_example
        self._ratios: list[float] = []
        self._sampler = self._own_sampler()
        if job.worst_batch and self._train_data is not None and self._eval_data is not None:
            self._measure(self._train_data, self._eval_data)
        self.training_samples = synthetic_samples(job)
        if isinstance(self._train_data, IterableDataset):
            self.training_samples = streamed_samples(job)
        elif self._train_data is not None:
            self.training_samples = length(self._train_data)
        self.steps_per_epoch = steps_per_epoch(job, self.training_samples)
        self._listed: list[list[int]] = []
        """The batches of the current epoch, over all ranks, if the workload has its own sampler."""
        if self._sampler is not None:
            with random_state.seeded(job.seed):
                self._listed = [list(batch) for batch in self._sampler]
            if not self._listed:
                raise InvalidReturnValue(
                    "batch_sampler() gave no batch; it must give lists of indices at each iteration"
                )
            self.steps_per_epoch = steps_of_batches(job, len(self._listed))
        self.total_steps = total_steps(job, self.steps_per_epoch)
        """Optimizer steps of the job."""
        full, rest = divmod(self.training_samples, self._batch_size * rank.count)
        sizes = [self._batch_size * rank.count] * full + [rest] * (rest > 0)
        self._listed = self._shortened(self._listed)
        if job.probe and job.worst_batch and _has_own_size(workload):  # the largest batches first
            self._listed = [*sorted(self._listed, key=self._padded_size, reverse=True), *self._listed[-1:]]
        self._sizes = [len(batch) for batch in self._listed] or self._shortened(sizes)
        """Samples of each batch of an epoch, over all ranks."""
        self.position = Position(0, 0, self._generator.get_state())
        """The position at the start of the current epoch."""

    def _own_sampler(self) -> Iterable[Sequence[int]] | None:
        """Return the workload's own sampler of batches, if it has one."""
        data = self._train_data
        if data is None or isinstance(data, IterableDataset):
            return None
        return self._workload.batch_sampler(data, self._batch_size * self._rank.count)

    def _padded_size(self, batch: Sequence[int]) -> float:
        """Return the size of a batch whose samples are padded to the largest one, by the workload's `sample_size`."""
        return len(batch) * max(self._workload.sample_size(index) or 0.0 for index in batch)

    def _shortened(self, batches: list[T]) -> list[T]:
        """Return the batches of a shortened epoch, which keeps its last step; all if it is not shortened."""
        grad_accum = self._job.grad_accum
        if self.steps_per_epoch * grad_accum >= len(batches):
            return batches
        of_last_step = len(batches) % grad_accum or grad_accum
        return [*batches[: (self.steps_per_epoch - 1) * grad_accum], *batches[-of_last_step:]]

    def _measure(self, train_data: Dataset[Any], eval_data: Dataset[Any]) -> None:
        """Measure the samples, or note why batches stay as they are drawn, unless the workload has a worst one."""
        why = ""
        if isinstance(train_data, IterableDataset):
            why = "an iterable dataset gives samples in its own order" if self._has_own_collate_fn else ""
        elif self._sampler is not None:
            if self._has_own_collate_fn and not _has_own_size(self._workload):
                why = "batch_sampler() decides which samples form a batch; write sample_size()"
        else:
            try:
                self._train_sizes = sizes_of_training_samples(self._workload, train_data, workers=self._loader.workers)
            except SizesUnknown as error:
                why = f"{error}; write sample_size() or worst_example()"
        self.why_as_drawn = "" if self._has_worst_example else why
        with contextlib.suppress(SizesUnknown):
            self._eval_sizes = measure(eval_data, workers=self._loader.workers) if self._has_own_collate_fn else None

    @property
    def size_ratio(self) -> float | None:
        """The size of the worst batch relative to a mean one, if batches are replaced by it."""
        if self._train_sizes is not None:
            return self._train_sizes.ratio
        return statistics.fmean(self._ratios) if self._ratios else None

    @property
    def trains_after_an_evaluation(self) -> bool:
        """True if training continues after the first epoch."""
        return self.total_steps > self.steps_per_epoch

    def epochs(self, start: Position | None = None) -> Iterator[Iterator[Part]]:
        """Yield the batches of each epoch from `start` on. The first epoch may have none left."""
        first, steps_done = 0, 0
        if start is not None:
            self._generator.set_state(start.generator)
            first, steps_done = start.epoch, start.step
        for epoch in range(first, math.ceil(self.total_steps / self.steps_per_epoch)):
            steps = min(self.total_steps - epoch * self.steps_per_epoch, self.steps_per_epoch)
            self.position = Position(epoch, steps_done, self._generator.get_state())
            yield self._epoch(steps, steps_done)
            steps_done = 0

    def position_after(self, steps: int) -> Position:
        """Return the position after `steps` optimizer steps of the training, within the current epoch."""
        return dataclasses.replace(self.position, step=steps - self.position.epoch * self.steps_per_epoch)

    def position_after_evaluation(self, steps: int) -> Position:
        """Return the position after an evaluation: the next epoch, unless `--steps` ended the current one early.

        A stream has no next epoch: its only one is as long as the training, and becomes longer with more steps.
        """
        after = self.position_after(steps)
        if after.step < self.steps_per_epoch or isinstance(self._train_data, IterableDataset):
            return after
        return Position(after.epoch + 1, 0, self._generator.get_state())

    def _epoch(self, steps: int, steps_done: int) -> Iterator[Part]:
        grad_accum = self._job.grad_accum
        if self._sampler is not None:
            with random_state.seeded(int(torch.randint(2**48, (), generator=self._generator))):
                self._listed = self._shortened([list(batch) for batch in self._sampler])
            self._sizes = [len(batch) for batch in self._listed]
        sizes = self._sizes[: steps * grad_accum]  # so that loader processes load nothing unused
        if math.ceil(len(sizes) / grad_accum) < steps:  # an own sampler had more batches in the first epoch
            sizes = list(itertools.islice(itertools.cycle(self._sizes), steps * grad_accum))
        batches = self._load(sizes, skip=steps_done * grad_accum)
        starts = range(steps_done * grad_accum, steps * grad_accum, grad_accum)
        return itertools.chain.from_iterable(self._one_step(batches, sizes[at : at + grad_accum]) for at in starts)

    def full_steps(self) -> Iterator[Iterator[Part]]:
        """Yield a probe's optimizer steps, made of full batches, without end.

        If the training has only one such step, yield only one, because a second takes more memory. Two batches per step
        are enough to show the memory of accumulation: gradients are held while the next batch runs.
        """
        sizes = self._sizes[: min(self._job.grad_accum, 2)]
        # An own sampler's first batches are drawn again for each step.
        steps = max(self.training_samples // sum(sizes), 1) if self._sampler is None else 1
        if not self.has_a_second_full_step:
            yield self._one_step(self._load(sizes), sizes)
            return
        while True:
            batches = self._load(sizes * steps)
            for _ in range(steps):
                yield self._one_step(batches, sizes)

    @property
    def has_a_second_full_step(self) -> bool:
        """True if the training makes more than one step of full batches."""
        later = self._sizes[self._job.grad_accum :]
        has_one = self.trains_after_an_evaluation or (self._sizes[0] in later if self._sampler is None else bool(later))
        return has_one and self.total_steps > 1

    @property
    def full_step_count(self) -> int:
        """The number of the training's steps of full batches."""
        has_smaller = self._sampler is None and self._sizes[-1] < self._sizes[0]
        return self.total_steps - self.total_steps // self.steps_per_epoch * has_smaller

    @property
    def has_smaller_batch(self) -> bool:
        """True if the batch size does not divide the data, and the job reaches the smaller batch that ends an epoch.

        With the workload's own sampler, its last batch counts as one.
        """
        is_other = self._sizes[-1] < self._sizes[0] if self._sampler is None else len(self._sizes) > 1
        return is_other and self.total_steps >= self.steps_per_epoch

    def last_step(self) -> Iterator[Part]:
        """Yield the smaller batch that ends an epoch, if any, for a probe: it may need a larger workspace."""
        sizes = self._sizes[-1:] if self.has_smaller_batch else []
        return self._one_step(self._load(sizes, first=-1), sizes)

    def _load(self, sizes: Sequence[int], *, skip: int = 0, first: int = 0) -> Iterator[Any]:
        """Yield this rank's part of batches of these sizes, in a new order. The first `skip` are not loaded.

        The workload's own sampler has drawn them already; they begin with the batch of number `first`.
        """
        if self._train_data is None:
            return (self._first(max(self._own_samples(size), 1)) for size in sizes[skip:])
        if isinstance(self._train_data, IterableDataset):
            streamed = self._loader.stream(self._train_data, self._batch_size, self._generator)
            return self._replaced(itertools.islice(streamed, skip, None), first_batch=skip)
        drawn: Iterable[list[int]]
        if self._sampler is not None:
            drawn = itertools.islice(itertools.cycle(self._listed[first:]), len(sizes))
        else:
            order = iter(torch.randperm(self.training_samples, generator=self._generator).tolist())
            drawn = (list(itertools.islice(order, size)) for size in sizes)
        # A rank without samples in a batch repeats one of it.
        indices = (batch[self._rank.index :: self._rank.count] or batch[:1] for batch in drawn)
        chosen = self._with_largest(itertools.islice(indices, skip, None), self._train_sizes, first_batch=skip)
        loaded = self._loader.load(self._train_data, chosen, self._generator, first_batch=skip)
        return self._replaced(loaded, first_batch=skip)

    def _replaced(self, batches: Iterator[Any], *, first_batch: int) -> Iterator[Any]:
        is_replaced = self._job.worst_batch and self._has_worst_example
        return self._with_worst_example(batches, first_batch=first_batch) if is_replaced else batches

    def _with_largest(
        self, batches: Iterable[list[int]], sizes: SampleSizes | None, *, first_batch: int = 0
    ) -> Iterator[list[int]]:
        """Yield the indices of the largest samples instead: in a longer run, for every second batch."""
        for number, batch in enumerate(batches, start=first_batch):
            yield sizes.largest(len(batch)) if sizes is not None and self._is_worst(number) else batch

    def _with_worst_example(self, batches: Iterator[Any], *, first_batch: int) -> Iterator[Any]:
        """Yield the workload's worst example in place of the batches of a running loader.

        The loader takes memory too: without it, a max batch of 62 was found where 61 samples train.
        """
        for number, batch in enumerate(batches, start=first_batch):
            if self._is_worst(number) and (worst := worst_example(self._workload, batch_length(batch))) is not None:
                self._ratios.append(volume_of(worst) / max(volume_of(batch), 1))
                batch = worst
                del worst
            yield batch
            del batch

    def _is_worst(self, batch_number: int) -> bool:
        return self._job.probe or batch_number % 2 == 0

    def _first(self, size: int) -> Any:
        return map_tensors(lambda tensor: tensor[:size], self._example)

    def _own_samples(self, size: int) -> int:
        """Return how many samples of a batch of `size` samples belong to this rank."""
        return len(range(self._rank.index, size, self._rank.count))

    def _one_step(self, batches: Iterator[Any], sizes: Sequence[int]) -> Iterator[Part]:
        for number, size in enumerate(sizes, start=1):
            share = self._own_samples(size) * self._rank.count / sum(sizes)
            yield Part(next(batches), share, number == len(sizes), size)

    def evaluation(self) -> Iterator[Any]:
        """Yield this rank's part of the evaluation data, in order.

        Each sample belongs to exactly one rank. A probe gets only the first and the last batch. A shortened epoch gets
        as many batches as it has steps, including the last one.
        """
        if self._eval_data is None:
            return iter([self._example])
        own = range(self._rank.index, length(self._eval_data), self._rank.count)
        batches: Iterable[list[int]] = BatchSampler(own, self._eval_batch_size, drop_last=False)
        if self._job.probe or self._job.epoch_steps is not None:
            most = 2 if self._job.probe else self.steps_per_epoch
            listed = list(batches)
            batches = listed if len(listed) <= most else [*listed[: most - 1], listed[-1]]
        batches = self._with_largest(batches, self._eval_sizes)
        return self._loader.load(self._eval_data, batches, torch.Generator().manual_seed(self._job.seed))


def length(dataset: Dataset[Any]) -> int:
    """Return the number of samples of a map-style dataset."""
    return len(cast("Sized", dataset))


def _has_own_size(workload: Workload) -> bool:
    return type(workload).sample_size is not Workload.sample_size


def sizes_of_training_samples(workload: Workload, data: Dataset[Any], *, workers: int = 0) -> SampleSizes | None:
    """Return the sizes of a workload's training samples; None if they are all equal, or if the data is iterable."""
    if isinstance(data, IterableDataset):
        return None
    if _has_own_size(workload):
        return measure(data, size=workload.sample_size)
    return measure(data, workers=workers) if has_own_collate_fn(workload) else None


def worst_example(workload: Workload, size: int) -> tuple[Any, Any] | None:
    """Return the workload's own worst batch, if it has one.

    Raises InvalidReturnValue if it is not a pair of batches of this size.
    """
    batch: object = workload.worst_example(size)
    if batch is None:
        return None
    expected = f"a pair (input, target) of {size} samples"
    if not is_pair(batch):
        raise InvalidReturnValue.of_type("worst_example()", batch, expected)
    if (samples := batch_length(batch)) != size:
        raise InvalidReturnValue(f"worst_example() returned a batch of {samples}; it must return {expected}")
    return batch[0], batch[1]


def example_batch(workload: Workload, size: int) -> tuple[Any, Any]:
    """Return the workload's example batch: the one that takes the most memory, unless it has another.

    Raises InvalidReturnValue if it is not a pair.
    """
    batch: object = None
    if type(workload).example is Workload.example:
        batch = worst_example(workload, size)
        if batch is None and (_has_own_size(workload) or has_own_collate_fn(workload)):
            data, most = workload.train_data(), min(size, 64)
            sizes = sizes_of_training_samples(workload, data)
            samples = [data[index] for index in sizes.largest(most)] if sizes else first_samples(data, most)
            batch = workload.collate_fn([samples[number % len(samples)] for number in range(size)])
    batch = batch if batch is not None else workload.example(size)
    if not is_pair(batch):
        raise InvalidReturnValue.of_type("example()", batch, "a pair (input, target)")
    return batch[0], batch[1]


def digest(dataset: Dataset[Any]) -> str:
    """Return the first eight hexadecimal digits of a SHA-256 of a dataset's length and about 32 of its samples.

    Tensors, arrays, images, numbers and texts count. Random generators are seeded first, so that random augmentation is
    the same each time.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        raw = value if isinstance(value, bytes) else value.tobytes() if hasattr(value, "tobytes") else None
        return hashlib.sha256(raw).hexdigest() if raw is not None else None

    random_state.seed(0)
    if isinstance(dataset, IterableDataset):
        count, samples = 0, iter(first_samples(dataset, 32))
    else:
        count = length(dataset)
        samples = (dataset[index] for index in range(0, count, max(1, count // 32)))
    content = hashlib.sha256(str(count).encode())
    for sample in samples:
        content.update(json.dumps(sample, default=plain, skipkeys=True).encode())
        for tensor in tensors(sample):
            content.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()[:8]


class StreamTooShort(Exception):
    """An iterable dataset ended before a full batch. `samples` is its largest batch on this rank."""

    def __init__(self, samples: int) -> None:
        super().__init__(f"train_data() ended after {samples} samples, before a full batch")
        self.samples = samples


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Loads the batches of one rank. Loading does not change the random numbers of the training.

    Each new DataLoader draws one number from the generator that it gets, and not from the training's.
    """

    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes a batch of samples. Default: torch's."""
    workers: int = 0
    """The number of loader processes; 0 loads in this process."""
    rank: Rank = ALONE
    pin_memory: bool = False
    """Use pinned memory, so that the host does not wait for the copy."""

    def load(
        self, dataset: Dataset[Any], batches: Iterable[list[int]], generator: torch.Generator, *, first_batch: int = 0
    ) -> Iterator[Any]:
        """Yield one batch of a map-style dataset for each list of indices, in their order.

        A TensorDataset is indexed a batch at a time, without loader processes: this takes microseconds, collating
        sample by sample takes milliseconds. For any other dataset, random generators are seeded for each batch:
        augmentation, also that of `collate_fn`, depends on `generator`, the rank and the batch's number within its
        epoch, but not on the number of loader processes or on where a resumed epoch begins (at the batch of number
        `first_batch`).
        """
        if isinstance(dataset, TensorDataset) and self.collate_fn is None:
            whole_batches = DataLoader(
                dataset, sampler=batches, batch_size=None, generator=generator, pin_memory=self.pins(dataset)
            )
            return iter(whole_batches)
        seed = int(torch.randint(2**48, (), generator=generator))
        numbered = (
            [seed + number * self.rank.count + self.rank.index, *indices]
            for number, indices in enumerate(batches, start=first_batch)
        )
        seeded = _SeededByBatch(dataset, self.collate_fn or default_collate)
        # Loader processes are forks. A file that the data set opens for its first sample would be shared.
        pins = self.pin_memory if self.workers else self.pins(dataset)
        return iter(self._loader(seeded, generator, batch_sampler=numbered, collate_fn=_as_is, pin_memory=pins))

    def stream(self, dataset: IterableDataset[Any], batch_size: int, generator: torch.Generator) -> Iterator[Any]:
        """Yield the full batches of an iterable dataset without end: it starts again where it ends.

        Each rank takes every n-th sample of n ranks; random generators are seeded alike on all ranks. With several
        loader processes, each iterates over the dataset, which shares its samples among them by
        `torch.utils.data.get_worker_info`, as with any DataLoader.

        Raises:
            StreamTooShort: the dataset ends before a full batch.
            InvalidReturnValue: it can be iterated only once.
        """
        seed = int(torch.randint(2**48, (), generator=generator))
        samples_of_rank = _EveryNth(dataset, self.rank.index, self.rank.count)
        batching = {"batch_size": batch_size, "collate_fn": self.collate_fn, "pin_memory": self.pin_memory}
        loader = self._loader(samples_of_rank, generator, **batching)
        number = 0
        while True:
            started, largest, batches = number, 0, iter(loader)
            while True:
                with random_state.seeded(seed + number):
                    batch = next(batches, None)
                if batch is None:
                    break
                if (samples := batch_length(batch)) == batch_size:
                    number += 1
                    yield batch
                largest = max(largest, samples)  # each loader process may end with a smaller batch
                del batch  # before the next one is loaded
            if not number:
                raise StreamTooShort(largest)
            if number == started:
                raise InvalidReturnValue(
                    "train_data() gives no samples when it is iterated again; its __iter__ must return a new iterator"
                )

    def _loader(self, dataset: Dataset[Any], generator: torch.Generator, **batching: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            **batching,
            generator=generator,
            num_workers=self.workers,
            # torch's default on Linux. A job's default is the fork server, which has not imported the workload.
            multiprocessing_context="fork" if self.workers and sys.platform == "linux" else None,
        )

    def pins(self, dataset: Dataset[Any]) -> bool:
        """Return whether batches are put into pinned memory, by the first sample of the data set."""
        if not self.pin_memory or not length(dataset):
            return False
        with random_state.seeded(0):
            return _can_be_pinned(dataset[0])


def _can_be_pinned(batch: Any) -> bool:
    """Return False if a tensor is not in main memory, as in a data set that was moved to the GPU as a whole."""
    return all(tensor.device.type == "cpu" for tensor in tensors(batch))


def _as_is(batch: Any) -> Any:
    return batch


class _EveryNth(IterableDataset[Any]):
    def __init__(self, dataset: IterableDataset[Any], first: int, step: int) -> None:
        self._dataset, self._first, self._step = dataset, first, step

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self._dataset)
        # All ranks take as many samples between two batches, and so as many random numbers.
        while len(turn := list(itertools.islice(samples, self._step))) == self._step:
            yield turn[self._first]


class _SeededByBatch(Dataset[Any]):
    """A dataset that takes a seed before the indices of a batch, and loads and collates the batch with that seed."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate_fn = dataset, collate_fn

    def __getitems__(self, seed_and_indices: Sequence[int]) -> Any:
        seed, *indices = seed_and_indices
        with random_state.seeded(seed):
            if hasattr(self._dataset, "__getitems__"):
                return self._collate_fn(self._dataset.__getitems__(indices))
            return self._collate_fn([self._dataset[index] for index in indices])
