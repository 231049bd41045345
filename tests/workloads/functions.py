"""Functions as targets: real trainings of a small network, and everything that may go wrong in them."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

import amp_track


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    )  # fmt: skip


def casting(precision: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def names_its_device(batch_size: int, precision: str, device: str) -> Iterator[None]:
    """Autocast for the device by its full name, which on a GPU is cuda:0."""
    training = Training()
    while True:
        with torch.autocast(f"{device}:0", torch.bfloat16, enabled=precision == "bf16"):
            loss = training.model(images(batch_size)).sum()
        loss.backward()
        training.optimizer.step()
        yield


class Training:
    """A model, its optimizer, and one step of them."""

    def __init__(self, precision: str = "fp32", width: int = 16) -> None:
        self.model, self.precision = network(width), precision
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self, images: Tensor) -> None:
        with casting(self.precision):
            loss = nn.functional.cross_entropy(self.model(images), torch.zeros(len(images), dtype=torch.long))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 32, 32)


def generator(batch_size: int, precision: str, width: int = 16) -> Iterator[None]:
    training = Training(precision, width)
    while True:
        training.step(images(batch_size))
        yield


def overflows(batch_size: int, precision: str) -> None:
    """A GradScaler that skips one step, which torch's hooks do not see, of an optimizer that is not fused."""
    training, scaler = Training(precision), torch.amp.GradScaler("cpu")
    for number, (batch,) in enumerate(DataLoader(TensorDataset(images(1000)), batch_size=batch_size)):
        time.sleep(0.02)
        loss = training.model(batch).sum() * (float("inf") if number == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()


def casts_its_model(batch_size: int, precision: str, has_optimizer: bool) -> Iterator[None]:
    """16-bit weights without autocast, whose update a generator may make itself."""
    training = Training()
    training.model.bfloat16()
    while True:
        if has_optimizer:
            training.step(images(batch_size).bfloat16())
        else:
            training.model(images(batch_size).bfloat16()).sum().backward()
        yield


def compiles(batch_size: int, precision: str, inside: bool) -> None:
    """Autocast within the compiled function, where it is traced, or around it."""
    training = Training(precision)

    def loss_of(batch: Tensor) -> Tensor:
        with casting(precision if inside else "fp32"):
            return training.model(batch).sum()  # type: ignore[no-any-return]

    compiled = torch.compile(loss_of, backend="eager", fullgraph=True)
    while True:
        with casting("fp32" if inside else precision):
            loss = compiled(images(batch_size))
        loss.backward()
        training.optimizer.step()


def train_step(batch_size: int, precision: str) -> None:
    model = network(16)
    step = amp_track.TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, precision
    )
    while True:
        step(images(batch_size), torch.zeros(batch_size, dtype=torch.long))


def keeps_a_copy(batch_size: int, precision: str) -> None:
    """Train in float32, beside a 16-bit copy of the model."""
    training = Training()
    copy.deepcopy(training.model).to(torch.bfloat16)
    while True:
        training.step(images(batch_size))


def casts_its_evaluation(batch_size: int, precision: str) -> None:
    """Autocast in the evaluation only."""
    training, data = Training(), TensorDataset(images(60))
    while True:
        for (batch,) in DataLoader(data, batch_size=batch_size):
            training.step(batch)
        with torch.no_grad(), casting(precision):
            training.model(images(8))


def epochs(batch_size: int, precision: str, samples: int = 1000, count: int = 2) -> None:
    """A plain loop: epochs over a DataLoader with an evaluation after each."""
    training, data = Training(precision), TensorDataset(images(samples))
    for _ in range(count):
        for (batch,) in DataLoader(data, batch_size=batch_size, shuffle=True):
            training.step(batch)
        with torch.no_grad():
            for (batch,) in DataLoader(data, batch_size=batch_size):
                training.model(batch)


class SlowImages(Dataset[Tensor]):
    """Each sample takes 0.01 s to load."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.01)
        return torch.zeros(3, 32, 32)


def loads_slowly(batch_size: int, precision: str) -> None:
    training = Training(precision)
    while True:
        for batch in DataLoader(SlowImages(), batch_size=batch_size):
            training.step(batch)


def one_full_batch(batch_size: int, precision: str) -> None:
    """Epochs of a full batch, and of a smaller one that takes much longer."""
    training, data = Training(precision), TensorDataset(images(batch_size + 10))
    while True:
        for (batch,) in DataLoader(data, batch_size=batch_size):
            time.sleep(0.3 if len(batch) == 10 else 0)
            training.step(batch)


def accumulates(batch_size: int, precision: str, batches: int, every: int) -> None:
    """One epoch, whose last batch is smaller. Its loader draws a batch ahead, as accelerate's, and some make a step."""
    training, data = Training(precision), TensorDataset(images((batches - 1) * batch_size + 5))
    drawn = iter(DataLoader(data, batch_size=batch_size))
    ahead = next(drawn)
    for number in range(1, batches + 1):
        (batch,), ahead = ahead, next(drawn, None)
        training.model(batch).sum().backward()
        if number % every == 0:
            training.optimizer.step()
            training.optimizer.zero_grad()
        if ahead is None:
            break


def two_loaders(batch_size: int, precision: str, times: int = 1) -> None:
    """Each step has a batch of both, as with labeled and more unlabeled images."""
    training, data = Training(precision), TensorDataset(images(1000))
    loaders = [DataLoader(data, batch_size=count * batch_size) for count in (1, times)]
    for _ in range(2):
        for (labeled,), (unlabeled,) in zip(*loaders, strict=False):
            training.step(torch.cat([labeled, unlabeled]))


def half_batches(batch_size: int, precision: str) -> None:
    for (batch,) in DataLoader(TensorDataset(images(1000)), batch_size=max(batch_size // 2, 1)):
        Training(precision).step(batch)


def without_batch_size(precision: str) -> None: ...


def with_a_path(batch_size: int, precision: str, path: str) -> None: ...


def without_steps(batch_size: int, precision: str) -> None: ...


Ending = Literal["bug", "exit", "oom and exit 1", "oom as another error", "abort", "two optimizers", "numpy"]


def ends(batch_size: int, precision: str, ending: Ending) -> None:
    """Make one step, then end in one of many ways."""
    training = Training(precision)
    training.step(images(batch_size))
    match ending:
        case "bug":
            training.model(torch.randn(1, 4, 32, 32))
        case "exit":
            sys.exit(0)
        case "oom and exit 1":
            try:
                training.step(images(10**6))
            except RuntimeError:
                sys.exit(1)
        case "oom as another error":
            try:
                training.step(images(10**6))
            except RuntimeError as error:
                raise ValueError("the training failed") from error
        case "abort":
            os.abort()
        case "two optimizers":  # as in a GAN: the second one steps less often
            second = Training(precision)
            for index in range(100):
                training.step(images(batch_size))
                if index == 10:
                    second.step(images(batch_size))
        case "numpy":
            import numpy

            numpy.ones(10**12)


def evaluates_outside(batch_size: int, precision: str) -> None:
    """`no_grad` within the loop, and a fixed batch of the evaluation."""
    training = Training(precision)
    for _ in range(2):
        for (batch,) in DataLoader(TensorDataset(images(300)), batch_size=batch_size):
            training.step(batch)
        for (batch,) in DataLoader(TensorDataset(images(64)), batch_size=32):
            with torch.no_grad():
                training.model(batch)


def drops_last(batch_size: int, precision: str) -> None:
    training = Training(precision)
    loader = DataLoader(TensorDataset(images(100)), batch_size=batch_size, drop_last=True)
    for _ in range(3):
        for (batch,) in loader:
            training.step(batch)
        print(1 / len(loader))


def schedules_its_loader(batch_size: int, precision: str) -> None:
    training = Training(precision)
    loader = DataLoader(TensorDataset(images(100)), batch_size=batch_size, drop_last=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, 0.1, epochs=3, steps_per_epoch=len(loader))
    for _ in range(3):
        for (batch,) in loader:
            training.step(batch)
            schedule.step()


def streams(batch_size: int, precision: str) -> None:
    """Train on a stream. The evaluation has another batch size, and disables gradients only around the model."""
    training, held_out = Training(precision), TensorDataset(images(600))

    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            yield from images(4 * batch_size)

    while True:
        training.model.train()
        for batch in DataLoader(Stream(), batch_size=batch_size, drop_last=True):
            training.step(batch)
        training.model.eval()
        for (batch,) in DataLoader(held_out, batch_size=100):
            with torch.no_grad():
                training.model(batch)


def makes_an_empty_loader(batch_size: int, precision: str) -> None:
    """One of held-out samples, which nobody draws from before the first step."""
    DataLoader(TensorDataset(images(10)), batch_size=batch_size, drop_last=True)
    training = Training(precision)
    for (batch,) in DataLoader(TensorDataset(images(1).expand(2000, 3, 32, 32)), batch_size=batch_size):
        training.step(batch)


def compares_with_the_data_set(batch_size: int, precision: str) -> None:
    training, data = Training(precision), TensorDataset(images(100), torch.zeros(100, dtype=torch.long))
    while True:
        for batch, _ in DataLoader(data, batch_size=batch_size):
            training.step(batch)
        training.model.eval()
        with torch.no_grad():
            found = [training.model(batch).argmax(1) for batch, _ in DataLoader(data, batch_size=batch_size)]
        print((torch.cat(found) == data.tensors[1]).float().mean())
        training.model.train()


def asserts_that_nothing_is_tracked(batch_size: int, precision: str) -> Iterator[None]:
    assert os.environ["WANDB_MODE"] == "disabled"
    assert not os.environ["MLFLOW_TRACKING_URI"].startswith("http")
    yield from generator(batch_size, precision)


def with_defaults(batch_size, loss=nn.functional.cross_entropy, width=4, rate: float = 1e-3):  # type: ignore[no-untyped-def]
    training = Training("fp32", width)
    assert loss is nn.functional.cross_entropy and isinstance(rate, float)
    while True:
        training.step(images(batch_size))
        yield


class Texts:
    """Texts of 4 to 40 letters; sample 0 is the longest."""

    def __init__(self, samples: int) -> None:
        self.lengths = [40, *(4 + index % 8 for index in range(samples - 1))]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> list[int]:
        return [1] * self.lengths[index]


def padded(batch: list[list[int]]) -> Tensor:
    longest = max(map(len, batch))
    return torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in batch])


def texts(batch_size: int, precision: str, samples: int = 200, count: int = 2, log: str = "") -> None:
    """A plain loop over padded texts, which writes the length of each batch to a file."""
    training, data = Training(), Texts(samples)
    for _ in range(count):
        for ids in DataLoader(data, batch_size=batch_size, shuffle=True, collate_fn=padded):  # type: ignore[arg-type]
            with open(log or os.devnull, "a") as file:
                file.write(f"{len(ids)} {ids.shape[1]} {int((ids > 0).sum())}\n")
            training.step(torch.randn(len(ids), 3, 32, 32))


class TextsByName(Texts):
    """Texts whose indices are names, or pairs with a length."""

    def __getitem__(self, index: Any) -> list[int]:
        return [1] * (index[1] if isinstance(index, tuple) else int(index))


class Names:
    """A sampler of names, in another order at each pass."""

    def __init__(self, names: list[Any]) -> None:
        self.names, self.passes, self.generator = names, 0, torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        order = torch.randperm(len(self.names), generator=self.generator).tolist()
        return (self.names[(number + self.passes) % len(self.names)] for number in order)


class ByTokens(BatchSampler):
    """Batches of fewer texts if they are long."""

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(1, 200 - self.batch_size, self.batch_size):
            yield list(range(first, first + self.batch_size))
        yield [0]


Drawing = Literal["names", "pairs", "subset", "by tokens", "evaluation"]


def unusual_texts(batch_size: int, precision: str, drawing: Drawing, log: str, workers: int = 0) -> None:
    """A plain loop over padded texts that a data set or a sampler of another kind than usual gives."""
    training, data = Training(), TextsByName(0) if drawing in ("names", "pairs") else Texts(200)
    samplers: dict[str, Any] = {
        "names": Names([str(length) for length in range(7, 39)]),
        "pairs": Names([(0, length) for length in range(7, 31)]),
        "subset": SubsetRandomSampler(range(1, 97), generator=torch.Generator().manual_seed(0)),
    }
    chosen: dict[str, Any] = {"sampler": samplers[drawing], "batch_size": batch_size} if drawing in samplers else {}
    if drawing == "by tokens":
        chosen = {"batch_sampler": ByTokens(range(200), batch_size, drop_last=False)}
    if drawing == "evaluation":
        chosen = {"batch_size": batch_size, "shuffle": True}
    loader = DataLoader(data, collate_fn=padded, num_workers=workers, **chosen)  # type: ignore[arg-type]
    with open(log, "a") as file:
        for _ in range(2):
            for ids in loader:
                file.write(f"{len(ids)} {ids.shape[1]} {int((ids > 0).sum())}\n")
                file.flush()
                training.step(torch.randn(len(ids), 3, 32, 32))
            if drawing == "evaluation":
                for _ids in DataLoader(Texts(50), batch_size=batch_size, collate_fn=padded):  # type: ignore[arg-type]
                    with torch.no_grad():
                        training.model(torch.randn(2, 3, 32, 32))


def returns_a_generator(batch_size: int, precision: str) -> Iterator[None]:
    """As a decorator makes it: the function itself is no generator."""
    return generator(batch_size, precision)


def ignores_its_batch_size(batch_size: int, precision: str) -> Iterator[None]:
    return generator(16, precision)


def slices_its_data(batch_size: int, precision: str) -> Iterator[None]:
    """Without a DataLoader: a batch has at most all of its 100 images."""
    return generator(min(batch_size, 100), precision)


def needs_a_library(batch_size: int, precision: str) -> None: ...


needs_a_library.library = "no_such_library"  # type: ignore[attr-defined]


def loads_in_processes(batch_size: int, precision: str, log: str) -> None:
    """Epochs over a DataLoader with worker processes, which draw ahead, and an evaluation after each."""
    training, data = Training(precision), TensorDataset(images(11 * batch_size + 3))
    while True:
        for (batch,) in DataLoader(data, batch_size=batch_size, num_workers=2):
            training.step(batch)
            with open(log, "a") as file:
                print("train", len(batch), file=file)
        with torch.no_grad():
            for (batch,) in DataLoader(data, batch_size=batch_size, num_workers=2):
                training.model(batch)
                with open(log, "a") as file:
                    print("evaluation", len(batch), file=file)


class Endless(Sampler[int]):
    """Never ends, and its length is that of the data set, as in OpenMMLab's libraries."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(self._length)


Loading = Literal[
    "evaluates with gradients", "looks first", "passes first", "accumulates", "draws ahead", "endless", "persistent",
    "validates ahead", "makes data anew",
]  # fmt: skip


def one_ahead(drawn: Iterator[Any]) -> Iterator[Any]:
    """Draw a batch before the one before it is used, as accelerate's loaders and timm's prefetcher do."""
    batch = next(drawn)
    for following in drawn:
        yield batch
        batch = following
    yield batch


def loads(batch_size: int, precision: str, how: Loading, log: str, workers: int = 1) -> None:
    """Load in a way that is usual in other people's trainings, and note each batch."""
    training, data = Training(precision), TensorDataset(images(20 * batch_size + 3))
    held_out = TensorDataset(images(30 * batch_size + 1))

    def loader(data: TensorDataset, *, factor: int = 1, **settings: Any) -> DataLoader[Any]:
        return DataLoader(data, batch_size=factor * batch_size, num_workers=workers, **settings)

    def note(what: str, batch: Tensor) -> None:
        with open(log, "a") as file:
            print(what, len(batch), file=file)

    persists = how == "persistent" and workers > 0
    for_training = loader(data, sampler=Endless(len(data)) if how == "endless" else None)
    for_evaluation = loader(held_out, factor=2 if how == "validates ahead" else 1, persistent_workers=persists)
    if how == "looks first":
        next(iter(for_training))
    if how == "passes first":
        for (batch,) in for_training:
            note("first", batch)
    for epoch in range(10):
        training.model.train()
        if how == "makes data anew":
            for_training = loader(TensorDataset(images(20 * batch_size + 3)))
        drawn = iter(for_training)
        if how == "draws ahead":
            drawn = one_ahead(drawn)
        if how == "validates ahead" and not epoch:
            iter(for_evaluation)
        for number, (batch,) in enumerate(drawn, start=1):
            note("train", batch)
            if how != "accumulates":
                training.step(batch)
                continue
            training.model(batch).sum().backward()
            if number % 8 == 0 or number == len(for_training):
                training.optimizer.step()
                training.optimizer.zero_grad()
        training.model.eval()
        for _ in range(2 if persists else 1):
            with contextlib.nullcontext() if how == "evaluates with gradients" else torch.no_grad():
                for (batch,) in for_evaluation:
                    note("evaluation", batch)
                    with torch.no_grad():
                        training.model(batch)
