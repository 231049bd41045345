"""Workload, the class that users subclass, and functions that check what its methods return."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, default_collate

from amp_track.records.errors import InvalidReturnValue


@dataclass(frozen=True)
class Metric:
    """The metric that a workload measures. MLflow shows it as `eval/<name>`."""

    name: str
    higher_is_better: bool = True


class Workload(ABC):
    """The model, data, loss and metric of one training.

    Subclass it as a frozen dataclass; its fields are the options that `--set name=value` sets.

    Input and target of a batch may be tensors, tuples or mappings of tensors with a first dimension N. A mapping whose
    names are all parameters of the model's `forward` is passed as keyword arguments, such as
    `forward(input_ids=…, attention_mask=…)`; any other input is one argument.
    """

    learning_rate: float = 1e-3
    """The learning rate that suits `batch_size`."""
    batch_size: int = 64
    """Samples in each batch; `--batch-size` overrides it."""
    epochs: int = 1
    """Passes over the training data; `--epochs` and `--steps` override it."""
    num_workers: int = 0
    """Loader processes; 0 loads data between the steps. `--num-workers` overrides it."""
    metric: ClassVar[Metric] = Metric("accuracy", higher_is_better=True)

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model with fresh weights, on the CPU, in float32."""

    @abstractmethod
    def train_data(self) -> Dataset[Any]:
        """Return the training data: a dataset whose items are (input, target).

        An IterableDataset has no length, so it requires `--steps`. It starts again where it ends; its processes share
        its samples in turn.
        """

    @abstractmethod
    def eval_data(self) -> Dataset[Any]:
        """Return the evaluation data: a map-style dataset whose items are (input, target)."""

    def collate_fn(self, samples: list[Any]) -> Any:
        """Return the batch (input, target) of a list of samples. Default: torch's `default_collate`.

        With another one, samples may have any type and different sizes. `max-batch` then trains on the largest ones.
        """
        return default_collate(samples)

    def batch_sampler(self, data: Dataset[Any], batch_size: int) -> Iterable[Sequence[int]] | None:
        """Return the batches of an epoch, lists of indices of `data`, such as those of a sampler that groups by length.

        It is iterated for each epoch, with other random numbers. Processes share each batch. Default: None, batches of
        `batch_size` samples in a random order.
        """
        return None

    def sample_size(self, index: int) -> float | None:
        """Return the size of a training sample, such as its number of tokens.

        A number, at least 0, in any unit. Default: None, so that the elements of the sample are counted, if
        `collate_fn` is another one than torch's. This loads at most 2,000 samples.
        """
        return None

    def worst_example(self, batch_size: int) -> tuple[Any, Any] | None:
        """Return the training batch (input, target) that takes the most memory.

        Default: None, so that it has the largest samples.
        """
        return None

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the mean loss over the batch, a scalar tensor.

        For a model that computes its own loss, return it: `return output.loss`.

        Default: cross entropy of logits (N, classes) and class numbers (N,).
        """
        return functional.cross_entropy(output, target)

    def score(self, output: Any, target: Any) -> Tensor:
        """Return one number per sample, shape (N,), whose mean is the metric. Default: 1 if the top class is right."""
        correct: Tensor = output.argmax(dim=-1) == target
        return correct.float()

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Return an optimizer of `parameters`. Default: Adam, fused where possible, so that amp never waits for it."""
        parameters = list(parameters)
        fused = all(p.device.type in ("cpu", "cuda", "xpu", "mps") and p.is_floating_point() for p in parameters)
        return torch.optim.Adam(parameters, lr=lr, fused=fused)

    def schedule(self, total_steps: int) -> Callable[[int], float] | None:
        """Return a pure function from the number of optimizer steps made so far to a factor of the learning rate.

        Steps that amp skips do not count, so a training may stop before the schedule's end. Default: None, a constant
        learning rate.

        Args:
            total_steps: the number of optimizer steps in the training.
        """
        return None

    def check(self) -> None:  # noqa: B027 — most workloads need nothing
        """Raise `BadInput` if something that the model needs is missing, such as pretrained weights.

        Called once, before anything is written.
        """

    def without_data(self) -> Workload:
        """Return the workload that `--synthetic` trains, without what only the metric needs: pretrained weights.

        Default: itself.
        """
        return self

    def plots(self, predict: Callable[[Any], Any]) -> Mapping[str, Tensor]:
        """Return plots of the trained model's output, by name. Default: none.

        Each has shape (height, width) or (height, width, 3) and values from 0 to 1. They are stored with the run, and
        `amp-track compare` shows those of all precisions side by side.

        Args:
            predict: maps a batch of inputs to the model's output, which is computed in the precision of the training
                and returned as float32 on the CPU.
        """
        return {}

    def example(self, batch_size: int) -> tuple[Any, Any]:
        """Return one batch (input, target) of the real shapes and dtypes.

        If it does not read the data, `--synthetic` works on machines without the data.

        Default: the first training samples, cycled. If samples differ in size, `plan` and `--synthetic` use the batch
        that takes the most memory instead of this default.
        """
        first = first_samples(self.train_data(), min(batch_size, 64))
        return self.collate_fn([first[index % len(first)] for index in range(batch_size)])  # type: ignore[no-any-return]


def first_samples(data: Dataset[Any], count: int) -> list[Any]:
    """Return the first `count` samples of a dataset, or all if it has fewer."""
    if isinstance(data, IterableDataset):
        return list(itertools.islice(data, count))
    return [data[index] for index in range(min(count, len(data)))]  # type: ignore[arg-type]


def has_own_collate_fn(workload: Workload) -> bool:
    """Return whether the workload collates samples itself, so that they may differ in size."""
    return type(workload).collate_fn is not Workload.collate_fn


def is_pair(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, tuple | list) and len(value) == 2


def new_model(workload: Workload) -> nn.Module:
    """Return a new model of the workload. Raises InvalidReturnValue if it is not a Module."""
    model: object = workload.model()
    if not isinstance(model, nn.Module):
        raise InvalidReturnValue.of_type("model()", model, "a torch.nn.Module")
    return model


def new_optimizer(workload: Workload, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Return the workload's optimizer of a model. Raises InvalidReturnValue if it is not an Optimizer."""
    optimizer: object = workload.optimizer(model.parameters(), learning_rate)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidReturnValue.of_type("optimizer()", optimizer, "a torch.optim.Optimizer of the parameters given")
    return optimizer


def new_schedule(workload: Workload, total_steps: int) -> Callable[[int], float] | None:
    """Return the workload's schedule. Raises InvalidReturnValue if it is not a function."""
    schedule: object = workload.schedule(total_steps)
    if schedule is not None and not callable(schedule):
        expected = "None, or a function from the number of optimizer steps to a factor of the learning rate"
        raise InvalidReturnValue.of_type("schedule()", schedule, expected)
    return schedule
