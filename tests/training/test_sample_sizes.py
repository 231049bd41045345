import random
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support import WORKLOADS

from amp_track.config.job import Job
from amp_track.targets.workload import load_workload
from amp_track.training.data import Batches, digest, example_batch
from amp_track.training.sample_sizes import MEASURED_SAMPLES, measure, size_of
from amp_track.workload import Workload

TEXTS = str(WORKLOADS / "texts.py")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 60))
def test_the_worst_batch_has_the_largest_samples_as_often_as_the_data_set_has_them(
    lengths: list[int], count: int
) -> None:
    sizes = measure([[0] * length for length in lengths])
    if len(set(lengths)) == 1:
        assert sizes is None
        return
    assert sizes is not None
    assert sizes.ratio == pytest.approx(max(lengths) * len(lengths) / sum(lengths))
    worst = [lengths[index] for index in sizes.largest(count)]
    assert worst[: len(lengths)] == sorted(lengths, reverse=True)[:count]
    assert len(worst) == count, "if there are too few samples, they repeat"


def test_of_a_large_data_set_the_largest_fraction_of_a_part_stands_for_it() -> None:
    lengths = list(range(10 * MEASURED_SAMPLES))
    random.Random(1).shuffle(lengths)
    sizes = measure(list(map(str.zfill, [""] * len(lengths), lengths)))
    assert sizes is not None
    assert len(sizes.order) == MEASURED_SAMPLES
    worst = [lengths[index] for index in sizes.largest(1000)]
    assert len(set(worst)) == 100
    assert min(worst) > 0.9 * len(lengths), "among the largest tenth"


def test_a_size_without_loading_is_asked_for_every_index() -> None:
    sizes = measure([None] * (2 * MEASURED_SAMPLES), lambda index: index)
    assert sizes is not None
    assert sizes.largest(2) == [2 * MEASURED_SAMPLES - 1, 2 * MEASURED_SAMPLES - 2]


def test_measuring_takes_no_random_number_of_the_training() -> None:
    class Random:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(1 + random.randrange(5) + int(numpy.random.randint(5)))

    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert measure(Random()) == measure(Random()) is not None
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before[1:]


@pytest.mark.parametrize(
    ("sample", "size"),
    [
        (torch.zeros(3, 4), 12),
        (numpy.zeros((3, 5)), 15),
        (Image.new("RGB", (6, 7)), 42),
        ("text", 4),
        ([], 0),
        ([1, 2, 3], 3),
        (([1.0, 2.0], 1), 2),
        ({"input_ids": [1, 2], "labels": [1, 2, 3, 4]}, 4),
        (7, 1),
    ],
)
def test_the_size_of_a_sample_is_that_of_its_largest_part(sample: object, size: int) -> None:
    assert size_of(sample) == size


def batches_of(workload: Workload, **settings: object) -> Batches:
    return Batches(Job(workload=TEXTS, batch_size=8, **settings), workload)  # type: ignore[arg-type]


def longest_of(batch: tuple[dict[str, torch.Tensor], torch.Tensor]) -> int:
    return batch[0]["input_ids"].shape[1]


@pytest.fixture(scope="module")
def workload() -> Workload:
    return load_workload(TEXTS, [("samples", "100")])


def longest_in(workload: Workload, data: Any) -> int:
    """Return the padded length of a data set's longest text."""
    return max(longest_of(workload.collate_fn([data[index]])) for index in range(len(data)))


def test_a_probe_trains_and_evaluates_on_the_largest_samples(workload: Workload) -> None:
    batches = batches_of(workload, probe=True, worst_batch=True, epochs=2)
    steps = batches.full_steps()
    parts = [*next(steps), *next(steps), *batches.last_step()]
    lengths = sorted((len(workload.train_data()[index][0]) for index in range(100)), reverse=True)
    for part in parts:
        found = (part.batch[0]["input_ids"] > 0).sum(dim=1).tolist()
        assert found == lengths[: part.samples]
    assert [part.samples for part in parts] == [8, 8, 4]
    assert {longest_of(batch) for batch in batches.evaluation()} == {longest_in(workload, workload.eval_data())}
    assert batches.size_ratio == pytest.approx(max(lengths) * 100 / sum(lengths))


def test_a_longer_run_alternates_the_worst_batch_with_those_of_its_order(workload: Workload) -> None:
    def lengths_of(worst_batch: bool) -> list[int]:
        epoch = next(batches_of(workload, worst_batch=worst_batch, epochs=1).epochs())
        return [longest_of(part.batch) for part in epoch]

    drawn, found = lengths_of(False), lengths_of(True)
    assert found[1::2] == drawn[1::2]
    assert set(found[::2]) == {longest_in(workload, workload.train_data())} != set(drawn[::2])


def test_a_training_has_every_batch_as_it_is_drawn(workload: Workload) -> None:
    batches = batches_of(workload, epochs=1)
    seen = torch.cat([part.batch[0]["attention_mask"].sum(dim=1) for part in next(batches.epochs())])
    assert sorted(seen.tolist()) == sorted(len(workload.train_data()[index][0]) for index in range(100))
    assert batches.size_ratio is None


def test_a_plan_and_synthetic_data_have_the_largest_samples(workload: Workload) -> None:
    input, target = example_batch(workload, 3)
    assert longest_of((input, target)) == longest_in(workload, workload.train_data())
    assert len(target) == 3


def test_a_worst_example_replaces_the_batches_of_the_loader(workload: Workload) -> None:
    class WithExample(type(workload)):  # type: ignore[misc]
        def worst_example(self, batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            input_ids = torch.ones(batch_size, 200, dtype=torch.long)
            return {"input_ids": input_ids}, torch.zeros(batch_size)

    batches = batches_of(WithExample(samples=100), probe=True, worst_batch=True, epochs=2)
    assert [longest_of(part.batch) for part in next(batches.full_steps())] == [200]
    assert batches.size_ratio is not None
    assert batches.size_ratio > 1
    assert longest_of(example_batch(WithExample(samples=100), 2)) == 200


def test_samples_that_are_no_tensors_are_part_of_the_digest(workload: Workload) -> None:
    other = load_workload(TEXTS, [("samples", "100")]).eval_data()
    assert digest(workload.train_data()) == digest(workload.train_data()) != digest(other)
