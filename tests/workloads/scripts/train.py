"""A script that knows nothing of amp_track: arguments, epochs, an evaluation, a checkpoint at the end."""

import argparse
import contextlib
import sys
from pathlib import Path

import torch
from helper import network  # beside the script
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=32)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--out")
parser.add_argument("--ends", choices=["before a step", "after out of memory", "with a bug"])
arguments = parser.parse_args()
if arguments.ends == "before a step":
    print("nothing to train")
    sys.exit(0)
torch.manual_seed(0)
data = TensorDataset(torch.randn(1000, 3, 32, 32), torch.randint(0, 10, (1000,)))
model = network()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    for images, labels in DataLoader(data, batch_size=arguments.bs, shuffle=True):
        with torch.autocast("cpu", torch.bfloat16) if arguments.bf16 else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if arguments.ends == "with a bug":
            raise KeyError("a bug of the script")
        if arguments.ends == "after out of memory":
            try:
                model(torch.randn(10**6, 3, 32, 32))
            except RuntimeError as error:
                print(error)
                sys.exit(1)
    with torch.no_grad():
        for images, _ in DataLoader(data, batch_size=arguments.bs):
            model(images)
if arguments.out:
    Path(arguments.out).write_bytes(b"a checkpoint")
