"""Any timm model by name, with random weights and images.

amp-track max-batch timm_model:train_steps --set model=vit_tiny_patch16_224 --precision fp32,bf16 --memory-budget 2GiB
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import timm
import torch
from torch import nn

DTYPES = {"amp": torch.float16, "bf16": torch.bfloat16}


def train_steps(
    batch_size: int, precision: str, model: str, device: str = "cpu", classes: int = 1000, image_size: int = 0
) -> Iterator[None]:
    network: Any = timm.create_model(model, pretrained=False, num_classes=classes).to(device)
    size = image_size or network.default_cfg["input_size"][-1]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, enabled=precision == "amp")
    while True:
        images = torch.randn(batch_size, 3, size, size, device=device)
        labels = torch.randint(0, classes, (batch_size,), device=device)
        with torch.autocast(device, DTYPES.get(precision, torch.bfloat16), enabled=precision in DTYPES):
            loss = nn.functional.cross_entropy(network(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield
