"""From a data set to batches: collated here or in processes beside the training, the same samples either way."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from amp_track import random_state


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
    """One batch for each list of indices, in their order.

    Data that already lies in tensors is indexed a batch at a time, which costs microseconds where collating sample by
    sample costs milliseconds, and needs no workers. Without workers, augmentation draws from this process's
    generators; with workers, from generators seeded anew for every batch: what a batch looks like depends on
    `generator` and its number alone, not on how many workers there are or where a resumed epoch begins.

    Args:
        dataset: map-style.
        batches: lists of indices.
        generator: seeds the augmentation. A loader draws a number as it is made: from here, so that making one does not
            change what the augmentation draws.
        workers: processes that load.
        first_batch: the number of the first one within its epoch.
        rank: of this process among those that train together: each augments differently.
        ranks: how many there are.
        pin_memory: the batches lie in pinned memory, from where a GPU fetches them while it computes.
    """
    if isinstance(dataset, TensorDataset):
        loader = DataLoader(dataset, sampler=batches, batch_size=None, generator=generator, pin_memory=pin_memory)
        return iter(loader)
    if not workers:
        return iter(DataLoader(dataset, batch_sampler=batches, generator=generator, pin_memory=pin_memory))
    seed = int(torch.randint(2**48, (), generator=generator))
    numbered = ([seed + number * ranks + rank, *indices] for number, indices in enumerate(batches, start=first_batch))
    return iter(
        DataLoader(
            _SeededByBatch(dataset),
            batch_sampler=numbered,
            generator=generator,
            num_workers=workers,
            # As torch does by default on Linux. A job's own default is the fork server, which knows no workload.
            multiprocessing_context="fork" if "fork" in multiprocessing.get_all_start_methods() else None,
            pin_memory=pin_memory,
        )
    )


class _SeededByBatch(Dataset[Any]):
    """Takes a seed before the indices of a batch."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, seed_and_indices: Sequence[int]) -> list[Any]:
        seed, *indices = seed_and_indices
        random_state.seed(seed)
        if hasattr(self._dataset, "__getitems__"):
            items: list[Any] = self._dataset.__getitems__(indices)
            return items
        return [self._dataset[index] for index in indices]
