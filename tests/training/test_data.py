import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import FAULTS, WORKLOADS
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from amp_track.config.job import ALONE, Job, Rank
from amp_track.records.errors import InvalidReturnValue
from amp_track.targets.workload import load_workload
from amp_track.training.amp import random_state
from amp_track.training.amp.tensors import batch_length
from amp_track.training.data import Batches, Loader, Position, StreamTooShort, digest
from amp_track.workload import Workload

SAMPLES = 64
STREAMED = str(WORKLOADS / "streamed.py")


@pytest.fixture(scope="module")
def workload() -> Workload:
    return load_workload(FAULTS)


def batches_of(workload: Workload, **settings: int | bool) -> Batches:
    return Batches(Job(**{"workload": FAULTS, "epochs": 2} | settings), workload)  # type: ignore[arg-type]


@given(batch_size=st.integers(1, SAMPLES), grad_accum=st.integers(1, 9))
def test_every_epoch_is_every_sample_once_in_whole_steps(workload: Workload, batch_size: int, grad_accum: int) -> None:
    batches = batches_of(workload, batch_size=batch_size, grad_accum=grad_accum)
    steps, orders = 0, []
    for epoch in batches.epochs():
        inputs, shares = [], []
        for (input, _), share, update, _ in epoch:
            inputs.append(input)
            shares.append(share)
            if update:
                assert sum(shares) == pytest.approx(1.0)
                shares, steps = [], steps + 1
        assert not shares, "an epoch ends with a step"
        orders.append(torch.cat(inputs))
    assert steps == batches.total_steps
    data = torch.stack([sample for sample, _ in workload.train_data()])  # type: ignore[attr-defined]
    for order in orders:
        assert torch.equal(order.sort(dim=0).values, data.sort(dim=0).values)
    assert not torch.equal(*orders), "each epoch has a new order"


@pytest.mark.parametrize(("settings", "smaller"), [({"epochs": 1}, True), ({"steps": 4}, True), ({"steps": 3}, False)])
def test_a_job_that_ends_before_its_epoch_has_no_smaller_batch(
    workload: Workload, settings: dict[str, int], smaller: bool
) -> None:
    """Of 64 samples, the fourth batch of 20 has 4."""
    batches = Batches(Job(workload=FAULTS, batch_size=20, **settings), workload)  # type: ignore[arg-type]
    assert batches.has_smaller_batch is smaller
    assert [batch_length(part.batch[0]) for part in batches.last_step()] == [4] * smaller


@given(batch_size=st.integers(1, SAMPLES), grad_accum=st.integers(1, 3), epoch_steps=st.integers(1, 9))
def test_an_epoch_that_is_cut_short_keeps_its_last_step(
    workload: Workload, batch_size: int, grad_accum: int, epoch_steps: int
) -> None:
    def steps_of(batches: Batches) -> list[list[int]]:
        steps: list[list[int]] = [[]]
        for (input, _), _, update, _ in next(batches.epochs()):
            steps[-1].append(batch_length(input))
            steps += [[]] * update
        return steps[:-1]

    whole, short = (
        batches_of(workload, batch_size=batch_size, grad_accum=grad_accum, epoch_steps=steps)  # type: ignore[arg-type]
        for steps in (None, epoch_steps)
    )
    expected = steps_of(whole)
    if epoch_steps < len(expected):
        expected = [*expected[: epoch_steps - 1], expected[-1]]
    assert steps_of(short) == expected
    evaluated = [batch_length(input) for input, _ in whole.evaluation()]
    if len(expected) < len(evaluated):
        evaluated = [*evaluated[: len(expected) - 1], evaluated[-1]]
    assert [batch_length(input) for input, _ in short.evaluation()] == evaluated


@given(batch_size=st.integers(1, SAMPLES), grad_accum=st.integers(1, 3))
def test_a_probe_has_full_steps_without_end_and_the_rest(workload: Workload, batch_size: int, grad_accum: int) -> None:
    probe = batches_of(workload, batch_size=batch_size, grad_accum=grad_accum, probe=True)
    full, rest = divmod(SAMPLES, batch_size)
    step = ([batch_size] * full + [rest] * bool(rest))[: min(grad_accum, 2)]
    for parts in itertools.islice(probe.full_steps(), 2 * SAMPLES // batch_size + 2):
        assert [batch_length(input) for (input, _), _, _, _ in parts] == step
    assert [batch_length(input) for (input, _), _, _, _ in probe.last_step()] == ([rest] if rest else [])
    evaluated = [batch_length(input) for input, _ in probe.evaluation()]
    assert evaluated == ([batch_size] if full == 1 and not rest else [batch_size, rest or batch_size])


@pytest.mark.parametrize(("epochs", "steps"), [(1, 1), (2, 5)])
def test_a_training_of_a_single_full_step_is_probed_with_one(workload: Workload, epochs: int, steps: int) -> None:
    probe = batches_of(workload, batch_size=40, epochs=epochs, probe=True)
    assert sum(1 for parts in itertools.islice(probe.full_steps(), 5) for _ in parts) == steps


@given(
    batch_size=st.integers(1, SAMPLES),
    grad_accum=st.integers(1, 4),
    steps_and_stop=st.integers(1, 40).flatmap(lambda steps: st.tuples(st.just(steps), st.integers(0, steps))),
)
def test_resuming_from_any_step_gives_the_rest(
    workload: Workload, batch_size: int, grad_accum: int, steps_and_stop: tuple[int, int]
) -> None:
    steps, stop = steps_and_stop
    settings = {"batch_size": batch_size, "grad_accum": grad_accum, "epochs": None, "steps": steps, "seed": 3}
    whole = batches_of(workload, **settings)  # type: ignore[arg-type]
    parts, done, position = [], 0, whole.position
    for epoch in whole.epochs():
        for (input, _), share, update, _ in epoch:
            if done >= stop:
                parts.append((input, share, update))
            done += update
            if update and done == stop:
                position = whole.position_after(done)
    assert done == steps
    resumed = batches_of(workload, **settings)  # type: ignore[arg-type]
    rest = [(input, share, update) for epoch in resumed.epochs(position) for (input, _), share, update, _ in epoch]
    assert [part[1:] for part in rest] == [part[1:] for part in parts]
    assert all(torch.equal(one[0], other[0]) for one, other in zip(rest, parts, strict=True))


def test_resuming_after_an_epoch_begins_the_next(workload: Workload) -> None:
    whole = batches_of(workload, batch_size=10, epochs=3)
    epochs = whole.epochs()
    first = [input for (input, _), _, _, _ in next(epochs)]
    position = whole.position_after_evaluation(whole.steps_per_epoch)
    second = torch.cat([input for (input, _), _, _, _ in next(epochs)])
    resumed = torch.cat([input for (input, _), _, _, _ in next(batches_of(workload, batch_size=10).epochs(position))])
    assert torch.equal(second, resumed)
    assert not torch.equal(second, torch.cat(first))


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


def test_the_digest_of_augmented_data_is_always_the_same() -> None:
    assert digest(Augmented()) == digest(Augmented())


def mixed(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix the samples of a batch at random."""
    inputs, indices = zip(*samples, strict=True)
    return torch.stack(inputs) * torch.rand(()) + random.random() + float(numpy.random.rand()), torch.tensor(indices)


def loaded(
    dataset: Dataset[Any],
    *,
    workers: int = 0,
    rank: Rank = ALONE,
    first_batch: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    loader = Loader(collate_fn=collate_fn, workers=workers, rank=rank)
    generator = torch.Generator().manual_seed(5)
    return list(loader.load(dataset, BATCHES[first_batch:], generator, first_batch=first_batch))


@pytest.mark.parametrize("collate_fn", [None, mixed])
@pytest.mark.parametrize("dataset", [Augmented(), InBatches()])
def test_augmentation_does_not_depend_on_how_many_workers_there_are(
    dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None
) -> None:
    none, one, two = (loaded(dataset, workers=workers, collate_fn=collate_fn) for workers in (0, 1, 2))
    assert [batch[1].tolist() for batch in none] == BATCHES
    assert all(torch.equal(a[0], b[0]) for a, b in zip(none, one, strict=True))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(none, two, strict=True))
    assert not torch.equal(none[0][0], none[1][0]), "each batch draws anew"


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_trainings_own_generators_alone(workers: int) -> None:
    def drawn(workers: int | None) -> tuple[float, float, float]:
        random_state.seed(3)
        if workers is not None:
            loaded(Augmented(), workers=workers, collate_fn=mixed)
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
    whole = loaded(Augmented(), workers=2, collate_fn=mixed)
    rest = loaded(Augmented(), workers=2, collate_fn=mixed, first_batch=2)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[2:], rest, strict=True))


SAME_SAMPLES = TensorDataset(torch.ones(10, 2), torch.arange(10))


@pytest.mark.parametrize("dataset", [Augmented(), SAME_SAMPLES])
def test_each_process_augments_and_mixes_differently(dataset: Dataset[Any]) -> None:
    first, second = (loaded(dataset, workers=1, rank=Rank(index=index, count=2), collate_fn=mixed) for index in (0, 1))
    drawn = {tuple(batch[0].flatten().tolist()) for batch in first + second}
    assert len(drawn) == 2 * len(BATCHES)


@pytest.mark.parametrize(
    ("settings", "sizes"), [({}, {20}), ({"eval_batch_size": 7}, {7}), ({"eval_batch_size": "auto"}, {20})]
)
def test_an_evaluation_has_its_own_batch_if_given(
    workload: Workload, settings: dict[str, Any], sizes: set[int]
) -> None:
    found = [batch_length(batch) for batch in batches_of(workload, batch_size=20, **settings).evaluation()]
    assert set(found[:-1]) <= sizes
    assert sum(found) == len(workload.eval_data())  # type: ignore[arg-type]


def streamed(
    samples: int, *, rank: Rank = ALONE, start: Position | None = None, **settings: int
) -> list[tuple[list[int], int]]:
    """Return the numbers of the samples of each batch of a streamed training, and the samples of all ranks."""
    job = Job(workload=STREAMED, batch_size=4, **settings)  # type: ignore[arg-type]
    batches = Batches(job, load_workload(STREAMED, [("samples", str(samples))]), rank)
    (parts,) = batches.epochs(start)
    return [(part.batch[0][:, 0, 0, 0].int().tolist(), part.samples) for part in parts]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_dataset_starts_again_where_it_ends_and_has_full_batches_only(workers: int) -> None:
    first, second = [0, 1, 2, 3], [4, 5, 6, 7]
    assert streamed(10, steps=5, num_workers=workers) == [(each, 4) for each in (first, second, first, second, first)]
    assert streamed(8, steps=3, num_workers=workers) == [(first, 4), (second, 4), (first, 4)]


def test_the_ranks_share_an_iterable_dataset() -> None:
    found = [streamed(20, steps=2, nproc=2, rank=Rank(index=index, count=2)) for index in range(2)]
    assert found == [[([0, 2, 4, 6], 8), ([8, 10, 12, 14], 8)], [([1, 3, 5, 7], 8), ([9, 11, 13, 15], 8)]]


def test_a_resumed_training_goes_on_within_its_stream() -> None:
    start = Position(0, 2, torch.Generator().get_state())
    assert streamed(100, steps=4, start=start) == streamed(100, steps=4)[2:]


def test_more_steps_go_on_within_the_stream_of_a_finished_training() -> None:
    job = Job(workload=STREAMED, batch_size=4, steps=3)
    batches = Batches(job, load_workload(STREAMED, [("samples", "100")]))
    for parts in batches.epochs():
        assert len(list(parts)) == 3
    assert streamed(100, steps=5, start=batches.position_after_evaluation(3)) == streamed(100, steps=5)[3:]


def test_a_dataset_that_is_not_in_main_memory_is_not_pinned() -> None:
    there = TensorDataset(torch.zeros(10, 2, device="meta"))  # as on a GPU
    assert not Loader(pin_memory=True).pins(there)
    assert Loader(pin_memory=True).pins(Augmented())
    assert not Loader().pins(Augmented())
    nothing = TensorDataset(torch.zeros(0, 2))
    assert list(Loader(pin_memory=True).load(nothing, [], torch.Generator())) == []


class Sharded(IterableDataset[Any]):
    """Numbers that two loader processes share unevenly, in a random order."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine = range(100) if worker is None else range(10) if worker.id == 0 else range(10, 100)
        yield from (torch.tensor([number]) for number in random.sample(mine, len(mine)))


def test_a_loader_process_that_ends_early_loses_no_sample_of_the_others() -> None:
    batches = Loader(workers=2).stream(Sharded(), 8, torch.Generator().manual_seed(0))
    numbers = torch.cat([batch.flatten() for batch in itertools.islice(batches, 12)]).tolist()
    assert len(set(numbers)) == 8 + 88


def test_ranks_share_a_random_order() -> None:
    found = []
    for index in range(2):
        loader = Loader(rank=Rank(index=index, count=2))
        batches = loader.stream(Sharded(), 10, torch.Generator().manual_seed(0))
        found += torch.cat([batch.flatten() for batch in itertools.islice(batches, 5)]).tolist()
    assert sorted(found) == list(range(100))


class Once(IterableDataset[Any]):
    def __init__(self) -> None:
        self.numbers = iter(torch.arange(16).reshape(16, 1))

    def __iter__(self) -> Iterator[Any]:
        return self.numbers


def test_a_stream_that_can_be_iterated_only_once_is_named() -> None:
    with pytest.raises(InvalidReturnValue, match="must return a new iterator"):
        list(itertools.islice(Loader().stream(Once(), 8, torch.Generator()), 3))


def test_an_iterable_dataset_without_a_full_batch_is_too_short() -> None:
    with pytest.raises(StreamTooShort, match="ended after 3 samples"):
        streamed(3, steps=1)
    with pytest.raises(StreamTooShort, match="ended after 0 samples"):
        streamed(0, steps=1)


def test_loading_a_stream_takes_no_random_number_of_the_training() -> None:
    before = torch.get_rng_state()
    streamed(10, steps=4)
    assert torch.equal(torch.get_rng_state(), before)


TEXTS = str(WORKLOADS / "texts.py")


def grouped(*, rank: Rank = ALONE, start: Position | None = None, **settings: int | bool) -> list[list[list[int]]]:
    """Return the lengths of the texts of each batch, by epochs, of a workload that groups them by length."""
    job = Job(workload=TEXTS, batch_size=8, **({"epochs": 2} | settings))  # type: ignore[arg-type]
    batches = Batches(job, load_workload(TEXTS, [("samples", "200"), ("by_length", "true")]), rank)
    return [[part.batch[0]["attention_mask"].sum(dim=1).tolist() for part in parts] for parts in batches.epochs(start)]


def test_batches_of_an_own_sampler_are_those_of_each_epoch() -> None:
    first, second = grouped()
    lengths = sorted(load_workload(TEXTS, [("samples", "200")]).train_data().lengths)  # type: ignore[attr-defined]
    for epoch in (first, second):
        assert sorted(itertools.chain.from_iterable(epoch)) == lengths
    assert first != second, "another order"
    assert grouped() == [first, second]
    assert {len(batch) for batch in first if max(batch) <= 64} >= {8}


def test_ranks_share_each_batch_of_an_own_sampler() -> None:
    (whole,) = grouped(epochs=1, nproc=1)
    halves = [grouped(rank=Rank(index=index, count=2), epochs=1, nproc=2)[0] for index in range(2)]
    assert len(halves[0]) == len(halves[1]) < len(whole)
    lengths = sorted(itertools.chain.from_iterable([*halves[0], *halves[1]]))
    assert lengths == sorted(itertools.chain.from_iterable(whole))


def test_a_training_with_an_own_sampler_resumes_within_an_epoch() -> None:
    job = Job(workload=TEXTS, batch_size=8, epochs=2)
    batches = Batches(job, load_workload(TEXTS, [("samples", "200"), ("by_length", "true")]))
    epochs = batches.epochs()
    list(next(epochs))
    next(epochs)
    position = batches.position_after(batches.steps_per_epoch + 5)
    assert grouped(start=position) == [grouped()[1][5:]]


def test_a_probe_of_an_own_sampler_has_its_first_and_last_batches() -> None:
    job = Job(workload=TEXTS, batch_size=8, epochs=2, probe=True, worst_batch=True)
    batches = Batches(job, load_workload(TEXTS, [("samples", "200"), ("by_length", "true")]))
    assert batches.has_smaller_batch and batches.has_a_second_full_step
    assert batches.why_as_drawn.startswith("batch_sampler() decides which samples form a batch")
    steps = batches.full_steps()
    sizes = [[part.samples for part in next(steps)] for _ in range(3)]
    assert sizes == [[len(batches._listed[0])]] * 3
    assert [part.samples for part in batches.last_step()] == [len(batches._listed[-1])]
    shortened = Batches(dataclasses.replace(job, epoch_steps=3, probe=False), batches._workload)
    assert shortened.steps_per_epoch == 3
    assert [len(list(parts)) for parts in shortened.epochs()] == [3, 3]


def test_a_probe_of_an_own_sampler_with_sizes_has_its_largest_batches() -> None:
    grouping = load_workload(TEXTS, [("samples", "200"), ("by_length", "true")])
    lengths = grouping.train_data().lengths  # type: ignore[attr-defined]

    class Sized(type(grouping)):  # type: ignore[misc]
        def sample_size(self, index: int) -> int:
            return lengths[index]  # type: ignore[no-any-return]

    job = Job(workload=TEXTS, batch_size=8, epochs=2, probe=True, worst_batch=True)
    batches = Batches(job, Sized(samples=200, by_length=True))
    (part,) = next(batches.full_steps())
    padded = [len(batch) * max(lengths[index] for index in batch) for batch in batches._listed]
    ids = part.batch[0]["attention_mask"]
    assert len(ids) * int(ids.sum(dim=1).max()) == max(padded)
    assert batches.why_as_drawn == ""


def test_an_own_sampler_must_give_a_batch(workload: Workload) -> None:
    class Empty(type(workload)):  # type: ignore[misc]
        def batch_sampler(self, data: Any, batch_size: int) -> list[list[int]]:
            return []

    with pytest.raises(InvalidReturnValue, match=r"batch_sampler\(\) gave no batch"):
        batches_of(Empty(), batch_size=8)
