"""Data of the benchmarks' models: cheap to make for a GPU's sizes, and as ever on a CPU."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from amp_track.training.data import Loader
from benchmarks.models import Cnn, UNet


def test_without_a_word_all_samples_are_made() -> None:
    data = Cnn(samples=64).train_data()
    assert type(data) is TensorDataset
    assert len(data.tensors[0]) == len(data) == 64


def test_repeated_samples_take_no_memory_and_load_as_others_do() -> None:
    data, few = UNet(samples=1_000_000, distinct=8).train_data(), UNet(samples=8).train_data()
    assert len(data) == 1_000_000
    assert len(data.tensors[0]) == 8
    assert all(map(torch.equal, data[999_999], few[7]))
    inputs, targets = next(Loader().load(data, iter([[0, 8, 17, 999_999]]), torch.Generator()))
    assert torch.equal(inputs, few.tensors[0][[0, 0, 1, 7]])
    assert torch.equal(targets, few.tensors[1][[0, 0, 1, 7]])


def test_more_distinct_samples_than_there_are_change_nothing() -> None:
    assert type(Cnn(samples=8, distinct=64).train_data()) is TensorDataset
