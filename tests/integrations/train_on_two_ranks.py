"""A loop on two ranks with ShardedGradScaler, watched. Prints what each rank has found, and whether it is true.

A rank's gradients overflow without the other's, as they do if each has another shard.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import amp_track

STEPS = 400


def train(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=7)
    random_numbers = random.Random(rank)
    scales, skipped = [(0, scaler.get_scale())], []
    with amp_track.watch(scaler, optimizer, model=model) as watched:
        for step in range(1, STEPS + 1):
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(8, 16)).float().pow(2).mean()
            scaler.scale(loss).backward()
            overflows = random_numbers.random() < 0.05 or (rank == 0 and step in (1, 200, 201))
            if overflows:
                next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            on_any_rank = torch.tensor(float(overflows))
            dist.all_reduce(on_any_rank)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped += [step] if on_any_rank else []
            if scaler.get_scale() != scales[-1][1]:
                scales.append((step, scaler.get_scale()))
    found = {"skipped_steps": watched.skipped_steps, "scale_history": watched.scale_history}
    truth = {"skipped_steps": tuple(skipped), "scale_history": tuple(scales)}
    Path(f"rank-{rank}.json").write_text(json.dumps({"is_true": found == truth, **found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (f"{folder}/rendezvous",), nprocs=2)
    sys.exit()
