"""A plain loop that runs out of a limit of 256 MiB, watched. Arguments: the batch size, and the precision."""

from __future__ import annotations

import resource
import sys

import torch
from torch import nn

import amp_track
from amp_track.training.devices.cpu import process_bytes

MIB = 2**20
batch_size, precision = int(sys.argv[1]), sys.argv[2]
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.AdamW(model.parameters())
torch.ones(512, 512) @ torch.ones(512, 512)  # starts the threads
held_bytes = process_bytes("VmData")
assert held_bytes is not None
resource.setrlimit(resource.RLIMIT_DATA, (held_bytes + 256 * MIB, resource.RLIM_INFINITY))
with amp_track.watch(None, optimizer, model=model, on_oom="explain", log=False):
    for _ in range(3):
        inputs, target = torch.randn(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = nn.functional.cross_entropy(model(inputs).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
