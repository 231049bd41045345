"""Texts of different lengths, padded to the longest of their batch, and a model that takes keywords."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from amp_track import Workload

VOCABULARY, LONGEST, WIDTH = 200, 128, 64


class Texts(Dataset[tuple[list[int], int]]):
    """Most texts are short, and a few have the largest length."""

    def __init__(self, samples: int, seed: int) -> None:
        lengths = random.Random(seed)
        self.lengths = [max(4, min(LONGEST, int(lengths.lognormvariate(3.2, 0.6)))) for _ in range(samples)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return [1 + (index * 7 + place) % (VOCABULARY - 1) for place in range(self.lengths[index])], index % 2


class ByLength:
    """Batches of texts of similar length, in a random order; of long texts they have half as many."""

    def __init__(self, data: Any, batch_size: int) -> None:
        self.data, self.batch_size = data, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        by_length = sorted(range(len(self.data)), key=lambda index: (self.data.lengths[index], random.random()))
        batches, first = [], 0
        while first < len(by_length):
            is_long = self.data.lengths[by_length[first]] > LONGEST // 2
            size = max(self.batch_size // 2, 1) if is_long else self.batch_size
            batches.append(by_length[first : first + size])
            first += size
        random.shuffle(batches)
        yield from batches


class Classifier(nn.Module):
    """Returns its loss with its logits, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids) + self.position.weight[: input_ids.shape[1]]
        hidden = self.layers(hidden, src_key_padding_mask=attention_mask == 0)
        logits = self.head(hidden.mean(dim=1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@dataclass(frozen=True)
class TextClassifier(Workload):
    """The classes are those of even and odd indices."""

    samples: int = 1000
    by_length: bool = False
    batch_size = 16

    def model(self) -> nn.Module:
        return Classifier()

    def train_data(self) -> Dataset[Any]:
        return Texts(self.samples, seed=0)

    def eval_data(self) -> Dataset[Any]:
        return Texts(100, seed=1)

    def collate_fn(self, samples: list[tuple[list[int], int]]) -> tuple[dict[str, Tensor], Tensor]:
        longest = -(-max(len(ids) for ids, _ in samples) // 16) * 16  # few shapes: each needs its own kernels
        input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in samples])
        labels = torch.tensor([label for _, label in samples])
        return {"input_ids": input_ids, "attention_mask": (input_ids > 0).long(), "labels": labels}, labels

    def batch_sampler(self, data: Dataset[Any], batch_size: int) -> "ByLength | None":
        return ByLength(data, batch_size) if self.by_length else None

    def loss(self, output: dict[str, Tensor], target: Tensor) -> Tensor:
        return output["loss"]

    def score(self, output: dict[str, Tensor], target: Tensor) -> Tensor:
        return (output["logits"].argmax(dim=1) == target).float()
