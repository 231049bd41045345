import math
import os
import random
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support import WORKLOADS
from torch.utils.data import Dataset

from amp_track.config.job import Job
from amp_track.records.errors import InvalidReturnValue
from amp_track.targets.workload import load_workload
from amp_track.training import sample_sizes
from amp_track.training.data import Batches, Position, digest, example_batch
from amp_track.training.sample_sizes import MEASURED_SAMPLES, SizesUnknown, measure, shapes_of
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
    assert sizes.ratio == pytest.approx(max(lengths) * len(lengths) / sum(lengths))
    worst = [lengths[index] for index in sizes.largest(count)]
    assert worst[: len(lengths)] == sorted(lengths, reverse=True)[:count]
    assert len(worst) == count, "if there are too few samples, they repeat"


def test_of_a_large_data_set_the_largest_fraction_of_a_part_stands_for_it() -> None:
    lengths = list(range(10 * MEASURED_SAMPLES))
    random.Random(1).shuffle(lengths)
    sizes = measure(list(map(str.zfill, [""] * len(lengths), lengths)))
    assert len(sizes.order) == MEASURED_SAMPLES
    worst = [lengths[index] for index in sizes.largest(1000)]
    assert len(set(worst)) == 100
    assert min(worst) > 0.9 * len(lengths), "among the largest tenth"


def test_a_size_without_loading_is_asked_for_every_index() -> None:
    sizes = measure([None] * (2 * MEASURED_SAMPLES), size=lambda index: index)
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


@dataclass
class Example:
    pixels: torch.Tensor
    label: int = 0


@pytest.mark.parametrize(
    ("sample", "shapes"),
    [
        (torch.zeros(3, 4), {(): (3, 4)}),
        (numpy.zeros((3, 5)), {(): (3, 5)}),
        (Image.new("RGB", (6, 7)), {(): (6, 7)}),
        ("text", {(): (4,)}),
        ([], {(): (0,)}),
        ([1, 2, 3], {(): (3,)}),
        (([1.0, 2.0], 1), {(0,): (2,)}),
        ([[1, 2], "label"], {(0,): (2,), (1,): (5,)}),
        ({"input_ids": [1, 2], "labels": [1, 2, 3, 4]}, {("input_ids",): (2,), ("labels",): (4,)}),
        (UserDict({"pixels": torch.zeros(2, 3)}), {("pixels",): (2, 3)}),
        ([[1, 2, 3], [1]], {(): (2, 3)}),
        ([{"box": [1, 2]}, {"box": [3], "mask": torch.zeros(4, 4)}], {("box",): (2, 2), ("mask",): (2, 4, 4)}),
        (((1, 2, 3), 0), {(0,): (3,)}),
        (Example(torch.zeros(2, 3)), {("pixels",): (2, 3)}),
        (7, {}),
    ],
)
def test_the_shapes_of_a_sample_are_those_of_its_parts(sample: object, shapes: object) -> None:
    assert shapes_of(sample) == shapes


def padded_volume(samples: list[dict[str, torch.Tensor]]) -> int:
    """Return the elements of a batch in which each part is padded in each of its dimensions."""
    volume = 0
    for name in samples[0]:
        shapes = [sample[name].shape for sample in samples]
        volume += math.prod(map(max, zip(*shapes, strict=True)))
    return volume * len(samples)


shapes_of_pairs = st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20))


@given(st.lists(shapes_of_pairs, min_size=4, max_size=30), st.integers(4, 30), st.randoms())
def test_no_batch_is_padded_to_more_than_the_worst_one(
    shapes: list[tuple[int, int, int]], count: int, order: random.Random
) -> None:
    """Images differ in two dimensions, source and target texts in one each: few samples are the largest in all."""
    samples = [{"image": torch.zeros(height, width), "text": torch.zeros(text)} for height, width, text in shapes]
    count = min(count, len(samples))
    sizes = measure(samples)
    if sizes is None:
        assert len(set(shapes)) == 1
        return
    worst = sizes.largest(count)
    assert len(worst) == count
    drawn = order.sample(range(len(samples)), count)
    assert padded_volume([samples[index] for index in worst]) >= padded_volume([samples[index] for index in drawn])


def test_a_part_of_few_elements_counts_as_much_as_one_of_many() -> None:
    samples = [(torch.zeros(3, 64, 64), [0] * (5 if index else 500)) for index in range(50)]
    sizes = measure(samples)
    assert sizes.largest(1) == [0]
    assert sizes.ratio == pytest.approx(500 / (545 + 200) * 50)


def test_rare_long_samples_are_found_unless_loading_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = ["short"] * 990 + ["a long sample"] * 10
    found = measure(samples)
    assert min(found.order[:10]) >= 990
    monkeypatch.setattr(sample_sizes, "_EQUAL_SECONDS", 0.0)
    assert measure(["short"] * 990 + ["a long sample"]) is None


class Odd(Dataset[str]):
    """Texts by name or by (number, length), some of which are broken; loaded lazily, as from a file."""

    def __init__(self) -> None:
        self.opened_by: int | None = None

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: Any) -> str:
        self.opened_by = self.opened_by or os.getpid()
        number, length = index if isinstance(index, tuple) else (index, 1)
        if number in (4, "broken"):
            raise OSError("this image is broken")
        return str(number) * length


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("indices", "largest"), [(["a", "long", "broken"], "long"), ([(1, 2), (4, 9), (2, 5)], (2, 5)), ([3, 4, 10], 10)]
)
def test_only_what_the_training_draws_is_measured(indices: list[Any], largest: object, workers: int) -> None:
    dataset = Odd()
    sizes = measure(dataset, indices=indices, workers=workers)
    assert sizes.largest(1) == [largest]
    assert len(sizes.order) == len([index for index in indices if index not in (4, "broken", (4, 9))])
    assert (dataset.opened_by is None) == (workers > 0), "loader processes would inherit what it opens"


def test_samples_without_any_size_are_not_taken_for_equal() -> None:
    with pytest.raises(SizesUnknown, match="the size of a sample of type int is unknown"):
        measure([1, 2, 3])


def test_if_nothing_can_be_loaded_the_error_is_raised() -> None:
    with pytest.raises(OSError, match="broken"):
        measure(Odd(), indices=[4])


@pytest.mark.parametrize("size", [-1, None, math.nan, math.inf, "3"])
def test_a_size_must_be_a_number(size: Any) -> None:
    with pytest.raises(InvalidReturnValue, match=r"sample_size\(\) returned .* it must return a number, at least 0"):
        measure([0, 1], size=lambda index: size)


def test_any_unit_is_a_size() -> None:
    sizes = measure([0, 1, 2], size=lambda index: numpy.float32(index) / 2)
    assert (sizes.largest(2), sizes.ratio) == ([2, 1], pytest.approx(2.0))


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
    assert batches.size_ratio > 1
    assert longest_of(example_batch(WithExample(samples=100), 2)) == 200


class Numbered(Workload):
    """Its samples are indices: `collate_fn` loads them."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def train_data(self) -> Any:
        return range(20)

    eval_data = train_data

    def collate_fn(self, samples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(len(samples), 1 + max(samples)), torch.zeros(len(samples))


def test_where_sizes_are_unknown_the_batches_stay_as_drawn_and_the_reason_is_kept() -> None:
    batches = batches_of(Numbered(), probe=True, worst_batch=True)
    assert batches.size_ratio is None
    assert batches.why_as_drawn.endswith("type int is unknown; write sample_size() or worst_example()")

    class Sized(Numbered):
        def sample_size(self, index: int) -> int:
            return index

    batches = batches_of(Sized(), probe=True, worst_batch=True)
    assert [part.batch[0].shape[1] for part in next(batches.full_steps())] == [20]
    assert batches.why_as_drawn == ""


@pytest.mark.parametrize("batch", [torch.zeros(8, 3), (torch.zeros(1, 3), torch.zeros(1))])
def test_a_worst_example_has_as_many_samples_as_it_is_asked_for(workload: Workload, batch: Any) -> None:
    class WithExample(type(workload)):  # type: ignore[misc]
        def worst_example(self, batch_size: int) -> Any:
            return batch

    batches = batches_of(WithExample(samples=100), probe=True, worst_batch=True)
    with pytest.raises(InvalidReturnValue, match=r"worst_example\(\) returned"):
        next(next(batches.full_steps()))


def test_a_resumed_run_has_the_same_batches(workload: Workload) -> None:
    def lengths_from(step: int) -> list[int]:
        batches = batches_of(workload, worst_batch=True, epochs=1)
        start = Position(0, step, torch.Generator().manual_seed(0).get_state())
        return [longest_of(part.batch) for part in next(batches.epochs(start))]

    assert lengths_from(3) == lengths_from(0)[3:]


def test_samples_that_are_no_tensors_are_part_of_the_digest(workload: Workload) -> None:
    other = load_workload(TEXTS, [("samples", "100")]).eval_data()
    assert digest(workload.train_data()) == digest(workload.train_data()) != digest(other)


@pytest.mark.parametrize("kind", [numpy.full, lambda _, value: bytes([value]), lambda _, value: UserDict(value=value)])
def test_arrays_bytes_and_mappings_are_part_of_the_digest(kind: Any) -> None:
    first, again, other = ([kind((2, 2), value)] for value in (1, 1, 2))
    assert digest(first) == digest(again) != digest(other)  # type: ignore[arg-type]
