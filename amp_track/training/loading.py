"""From a data set to batches: collated here or in processes beside the training, the same samples either way."""

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
    """One batch for each list of indices, in their order.

    Data that already lies in tensors is indexed a batch at a time, which costs microseconds where collating sample by
    sample costs milliseconds, and needs no workers. For any other, every batch is loaded with generators seeded for it
    alone: what augmentation draws depends on `generator` and the batch's number, not on how many workers there are nor
    on where a resumed epoch begins, and the training draws the same whatever was loaded.

    Args:
        dataset: map-style.
        batches: lists of indices.
        generator: seeds the augmentation. A loader draws a number as it is made: from here, so that making one does not
            change what the augmentation draws.
        workers: processes that load; 0 loads here.
        first_batch: the number of the first one within its epoch.
        rank: of this process among those that train together: each augments differently.
        ranks: how many there are.
        pin_memory: the batches lie in pinned memory, from where a GPU fetches them while it computes.
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
    """Takes a seed before the indices of a batch."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, seed_and_indices: Sequence[int]) -> list[Any]:
        seed, *indices = seed_and_indices
        with random_state.seeded(seed):
            if hasattr(self._dataset, "__getitems__"):
                items: list[Any] = self._dataset.__getitems__(indices)
                return items
            return [self._dataset[index] for index in indices]
