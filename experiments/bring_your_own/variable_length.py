"""Texts of different lengths, padded to the longest of their batch: the max batch is that of the longest texts.

amp-track max-batch variable_length:train --device cpu --memory-budget 64MiB --precision fp32
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

DTYPES = {"amp": torch.float16, "bf16": torch.bfloat16}
VOCABULARY, LONGEST, WIDTH = 200, 128, 64
Sample = tuple[list[int], int]


def texts(count: int) -> list[Sample]:
    """Most texts are short, a few have the largest length."""
    lengths = random.Random(0)
    sizes = [max(4, min(LONGEST, int(lengths.lognormvariate(3.2, 0.6)))) for _ in range(count)]
    return [([1 + (index + place) % 199 for place in range(size)], index % 2) for index, size in enumerate(sizes)]


def collate(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    longest = -(-max(len(ids) for ids, _ in samples) // 16) * 16  # few shapes: each needs its own kernels
    padded = [ids + [0] * (longest - len(ids)) for ids, _ in samples]
    return torch.tensor(padded), torch.tensor([label for _, label in samples])


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) + self.position.weight[: ids.shape[1]]
        output: Tensor = self.head(self.layers(hidden, src_key_padding_mask=ids == 0).mean(dim=1))
        return output


def train(batch_size: int, precision: str, device: str = "cpu", epochs: int = 3, samples: int = 4000) -> None:
    torch.manual_seed(0)
    model = Classifier().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler(device, enabled=precision == "amp")
    data: Any = texts(samples)
    for _ in range(epochs):
        for ids, labels in DataLoader(data, batch_size=batch_size, shuffle=True, collate_fn=collate):
            with torch.autocast(device, DTYPES.get(precision, torch.bfloat16), enabled=precision in DTYPES):
                loss = nn.functional.cross_entropy(model(ids.to(device)), labels.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
