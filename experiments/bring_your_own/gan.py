"""A GAN: two models, two optimizers and one scaler. amp_track waits until both optimizers have stepped.

amp-track max-batch gan:train --device cpu --memory-budget 64MiB --precision fp32,bf16
"""

from __future__ import annotations

import torch
from torch import nn

DTYPES = {"amp": torch.float16, "bf16": torch.bfloat16}
NOISE = 32


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs)
    )


def train(batch_size: int, precision: str, device: str = "cpu", steps: int = 200, critic_steps: int = 2) -> None:
    torch.manual_seed(0)
    generator, critic = network(NOISE, 784).to(device), network(784, 1).to(device)
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4)
    scaler = torch.amp.GradScaler(device, enabled=precision == "amp")
    autocast = torch.autocast(device, DTYPES.get(precision, torch.bfloat16), enabled=precision in DTYPES)
    loss_of = nn.functional.binary_cross_entropy_with_logits
    real, fake = torch.ones(batch_size, 1, device=device), torch.zeros(batch_size, 1, device=device)
    for step in range(1, steps + 1):
        with autocast:
            images = torch.randn(batch_size, 784, device=device)
            made = generator(torch.randn(batch_size, NOISE, device=device))
            loss = loss_of(critic(images), real) + loss_of(critic(made.detach()), fake)
        of_critic.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(of_critic)
        if step % critic_steps == 0:
            with autocast:
                loss = loss_of(critic(made), real)
            of_generator.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(of_generator)
        scaler.update()
