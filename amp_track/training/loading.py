"""Load batches from a dataset, in this process or in loader processes: the samples are the same either way."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from amp_track.training.amp import random_state


def load(
    dataset: Dataset[Any],
    batches: Iterable[list[int]],
    generator: torch.Generator,
    *,
    workers: int = 0,
    first_batch: int = 0,
    rank: int = 0,
    ranks: int = 1,
    pin_memory: bool = False,
) -> Iterator[Any]:
    """Yield one batch for each list of indices, in their order.

    Data that already lies in tensors is indexed a batch at a time, which costs microseconds where collating sample by
    sample costs milliseconds, and needs no loader processes. For any other dataset, every batch is loaded with random
    generators seeded for it alone: augmentation depends on `generator` and the batch's number, not on the number of
    loader processes nor on where a resumed epoch begins, and the training draws the same numbers whatever was loaded.

    Args:
        dataset: map-style.
        batches: the indices of each batch.
        generator: seeds the augmentation. A DataLoader draws one number when it is made, from here too, so that making
            it does not change what the training draws.
        workers: the number of loader processes; 0 loads in this process.
        first_batch: the number of the first batch within its epoch.
        rank: the index of this process among those that train together: each augments differently.
        ranks: how many processes train together.
        pin_memory: put the batches in pinned memory, so that the host need not wait for the copy.
    """
    if isinstance(dataset, TensorDataset):
        loader = DataLoader(dataset, sampler=batches, batch_size=None, generator=generator, pin_memory=pin_memory)
        return iter(loader)
    seed = int(torch.randint(2**48, (), generator=generator))
    numbered = ([seed + number * ranks + rank, *indices] for number, indices in enumerate(batches, start=first_batch))
    return iter(
        DataLoader(
            _SeededByBatch(dataset),
            batch_sampler=numbered,
            generator=generator,
            num_workers=workers,
            # As torch does by default on Linux. A job's own default is the fork server, which knows no workload.
            multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
            pin_memory=pin_memory,
        )
    )


class _SeededByBatch(Dataset[Any]):
    """A dataset that takes a seed in front of the indices of a batch, and loads the batch with it."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, seed_and_indices: Sequence[int]) -> list[Any]:
        seed, *indices = seed_and_indices
        with random_state.seeded(seed):
            if hasattr(self._dataset, "__getitems__"):
                items: list[Any] = self._dataset.__getitems__(indices)
                return items
            return [self._dataset[index] for index in indices]
