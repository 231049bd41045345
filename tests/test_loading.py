import random
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from amp_track.loading import load

BATCHES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


class Augmented(Dataset[Any]):
    """Draws from every generator that people augment with."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(2) + random.random() + float(numpy.random.rand()), index


class InBatches(Augmented):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


def loaded(dataset: Dataset[Any], **settings: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    batches = BATCHES[settings.get("first_batch", 0) :]
    return list(load(dataset, batches, torch.Generator().manual_seed(5), **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("dataset", [Augmented(), InBatches()])
def test_augmentation_does_not_depend_on_how_many_workers_there_are(dataset: Dataset[Any]) -> None:
    one, two = loaded(dataset, workers=1), loaded(dataset, workers=2)
    assert [batch[1].tolist() for batch in one] == BATCHES
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0][0], one[1][0]), "each batch draws anew"


def test_augmentation_does_not_depend_on_where_an_epoch_is_gone_on_with() -> None:
    whole, rest = loaded(Augmented(), workers=2), loaded(Augmented(), workers=2, first_batch=2)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[2:], rest, strict=True))


def test_each_process_augments_differently() -> None:
    first, second = (loaded(Augmented(), workers=1, rank=rank, ranks=2) for rank in (0, 1))
    drawn = {tuple(batch[0].flatten().tolist()) for batch in first + second}
    assert len(drawn) == 2 * len(BATCHES)


def test_tensors_need_no_workers() -> None:
    data = TensorDataset(torch.arange(10.0))
    (batch,) = loaded(data, workers=2)[1]
    assert batch.tolist() == [3.0, 4.0, 5.0]
