"""Workloads that planning meets: a huge one, and some that need the values of tensors."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from amp_track import Workload


@dataclass(frozen=True)
class Wide(Workload):
    """Linear layers, with whatever `act` does between them."""

    width: int = 64
    depth: int = 2
    act: str = "relu"

    def model(self) -> nn.Module:
        if self.act == "built-with-item":
            return Layers(self.width, self.depth, str(nn.Linear(3, 3).weight.mean().item()))
        return Layers(self.width, self.depth, self.act)

    def train_data(self) -> Any:
        raise AssertionError("a plan needs no data")

    eval_data = train_data

    def example(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch_size, self.width), torch.zeros(batch_size, dtype=torch.int64)


class Layers(nn.Module):
    def __init__(self, width: int, depth: int, act: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.act = act
        if act == "recurrent":
            self.recurrent = nn.LSTM(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = between(layer(x), self.act)
        return x


def between(x: Tensor, act: str) -> Tensor:
    match act:
        case "death in 16 bits" if x.dtype is not torch.float32:
            os._exit(3)
        case "hang in 16 bits" if x.dtype is not torch.float32:
            time.sleep(600)
        case "numpy":
            return x + float(x.detach().numpy().mean())
        case "mask":
            return x + x[x > 0].sum()
        case "item":
            return x * x.detach().mean().item()
        case "trim":
            return x + (2 * x[:, : int(x.detach().amax().item())]).sum()
        case "sigmoid-bce":
            target = torch.zeros_like(x)
            return x + nn.functional.binary_cross_entropy(x.sigmoid(), target)
        case "wrong":
            return x @ x
        case "dropout":
            return nn.functional.dropout(x, 0.5)
        case "softmax-of-dtype":
            return nn.functional.softmax(x, -1, dtype=torch.float32).to(x.dtype)
        case "attention":
            heads = x.view(1, 4, -1, x.shape[-1] // 4)
            return nn.functional.scaled_dot_product_attention(heads, heads, heads).reshape(x.shape)
        case "attention-by-hand":
            heads = x.view(1, 4, -1, x.shape[-1] // 4)
            with sdpa_kernel(SDPBackend.MATH):
                return nn.functional.scaled_dot_product_attention(heads, heads, heads).reshape(x.shape)
        case "attention-of-groups":
            heads = x.view(1, 4, -1, x.shape[-1] // 4)
            fewer = heads[:, :2].contiguous()
            return nn.functional.scaled_dot_product_attention(heads, fewer, fewer, enable_gqa=True).reshape(x.shape)
        case "attention-of-smaller-values":
            heads = x.view(1, 4, -1, x.shape[-1] // 4)
            found = nn.functional.scaled_dot_product_attention(heads, heads, heads[..., :8].contiguous())
            return x + found.repeat_interleave(heads.shape[-1] // 8, -1).reshape(x.shape)
        case "island":  # the way out that torch's error about autocast names
            assert torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is x.dtype
            with torch.autocast("cuda", enabled=False):
                assert not torch.is_autocast_enabled()
                target = torch.zeros_like(x, dtype=torch.float32)
                return x + nn.functional.binary_cross_entropy(x.float().sigmoid(), target)
        case "recomputes":
            made = checkpoint(lambda y: (y.sin() + y.cos()).tanh(), x, use_reentrant=False)
            assert isinstance(made, Tensor)
            return made
        case "attention-without-heads":
            tokens = x[None]
            return nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)[0]
        case "recurrent":
            return nn.functional.relu(x)
    return x.relu()
