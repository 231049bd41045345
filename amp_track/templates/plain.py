"""A training as a Workload. max-batch, search, train, compare, plan, dtypes and explain take this file:

    amp-track max-batch FILE --memory-budget 64MiB
    amp-track search FILE --memory-budget 64MiB
    amp-track train FILE
    amp-track plan FILE --gpu "RTX 4090"

On a GPU, omit --memory-budget: the limit is then its free memory. Replace each method by yours, one at a time. To keep
a loop that you have, pass max-batch a function of batch_size as module:function, or a script as it is; see amp-track
max-batch --help.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from amp_track import Metric, Workload

CLASSES = 10


def random_images(count: int, *, seed: int) -> TensorDataset:
    """Images that are noise and the pattern of their class: a model can learn them."""
    random = torch.Generator().manual_seed(seed)
    patterns = torch.randn(CLASSES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, CLASSES, (count,), generator=random)
    return TensorDataset(torch.randn(count, 3, 32, 32, generator=random) + 0.3 * patterns[labels], labels)


@dataclass(frozen=True)
class Training(Workload):
    """A small convolutional network. Each field is an option: --set width=32."""

    width: int = 16

    # The defaults of --batch-size, --lr and --epochs.
    batch_size: int = 32
    learning_rate: float = 1e-3
    epochs: int = 2
    # The number that says how good a model is: the mean of score().
    metric = Metric("accuracy", higher_is_better=True)

    def model(self) -> nn.Module:
        """A new model in float32 on the CPU. amp-track moves it to the device and sets the precision."""
        return nn.Sequential(
            nn.Conv2d(3, self.width, 3, stride=2, padding=1),
            nn.BatchNorm2d(self.width),
            nn.ReLU(),
            nn.Conv2d(self.width, self.width, 3, stride=2, padding=1),
            nn.BatchNorm2d(self.width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(self.width * 8 * 8, CLASSES),
        )

    def train_data(self) -> Dataset[tuple[Tensor, ...]]:
        """Items are (input, target), such as those of torchvision.datasets.ImageFolder."""
        return random_images(2000, seed=1)

    def eval_data(self) -> Dataset[tuple[Tensor, ...]]:
        return random_images(500, seed=2)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss of a batch. For a model that computes its own loss: return output.loss."""
        return nn.functional.cross_entropy(output, target)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """One number for each sample, whose mean is the metric."""
        return (output.argmax(dim=1) == target).float()

    # Also: optimizer(), schedule(), collate_fn() for samples of different size. Without them: Adam, a constant learning
    # rate, torch's collate_fn.
