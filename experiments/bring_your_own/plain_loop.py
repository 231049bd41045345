"""A plain PyTorch loop: the generator yields after each optimizer step, so that amp_track can stop it.

amp-track max-batch plain_loop:train_steps --device cpu --memory-budget 64MiB --precision fp32,bf16
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DTYPES = {"amp": torch.float16, "bf16": torch.bfloat16}


def train_steps(batch_size: int, precision: str, device: str = "cpu", width: int = 32) -> Iterator[None]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2000, 3, 32, 32), torch.randint(0, 10, (2000,)))
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, stride=2), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, enabled=precision == "amp")
    while True:
        for images, labels in DataLoader(data, batch_size=batch_size, shuffle=True):
            with torch.autocast(device, DTYPES.get(precision, torch.bfloat16), enabled=precision in DTYPES):
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield
