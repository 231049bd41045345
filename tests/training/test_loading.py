import random
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from support import WORKLOADS
from torch.utils.data import Dataset, TensorDataset

from amp_track.config.job import Job
from amp_track.training.amp import random_state
from amp_track.training.data import Batches
from amp_track.training.loading import load
from amp_track.workload import load_workload

SPIKY = str(WORKLOADS / "spiky.py")
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
    none, one, two = (loaded(dataset, workers=workers) for workers in (0, 1, 2))
    assert [batch[1].tolist() for batch in none] == BATCHES
    assert all(torch.equal(a[0], b[0]) for a, b in zip(none, one, strict=True))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(none, two, strict=True))
    assert not torch.equal(none[0][0], none[1][0]), "each batch draws anew"


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_trainings_own_generators_alone(workers: int) -> None:
    def drawn(workers: int | None) -> tuple[float, float, float]:
        random_state.seed(3)
        if workers is not None:
            loaded(Augmented(), workers=workers)
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    assert drawn(workers) == drawn(None)


def test_orders_and_augmentation_of_all_epochs_are_the_same_with_any_workers() -> None:
    def epochs(workers: int) -> list[torch.Tensor]:
        job = Job(workload=SPIKY, batch_size=8, epochs=3, num_workers=workers, device="cpu")
        batches = Batches(job, load_workload(SPIKY))
        return [torch.cat([part.batch[0] for part in epoch]) for epoch in batches.epochs()]

    none, two = epochs(0), epochs(2)
    assert all(torch.equal(a, b) for a, b in zip(none, two, strict=True))
    assert not torch.equal(none[0], none[1])


def test_augmentation_does_not_depend_on_where_an_epoch_is_resumed() -> None:
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
