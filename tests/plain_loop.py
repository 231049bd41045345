"""A plain PyTorch loop in every precision, with which the AMP step is compared to the bit, and what it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "amp": torch.float16}


def network(inputs: int = 16, outputs: int = 4, *, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


def batch(number: int, *, size: int = 8, overflows: bool = False) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of `network`. Those that overflow do so in float16."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(size, 16, generator=generator) * (1e5 if overflows else 1.0)
    return inputs, torch.randint(0, 4, (size,), generator=generator)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float()


def scales_after(changes: Iterable[tuple[int, float]], *, initial: float, steps: int) -> list[float]:
    """Return the scale after each step. A change is (step, scale after it)."""
    known, scale, found = dict(changes), initial, []
    for step in range(1, steps + 1):
        found.append(scale := known.get(step, scale))
    return found


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    """Assert that two models have the same weights and buffers, to the bit."""
    for (name, left), right in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(left, right), name


class PlainLoop:
    """The recipe of PyTorch's documentation for one optimizer, with gradient accumulation and clipping."""

    def __init__(self, optimizer: torch.optim.Optimizer, precision: str, *, max_grad_norm: float | None = None) -> None:
        self.optimizer, self._max_grad_norm = optimizer, max_grad_norm
        self._dtype = DTYPES[precision]
        self.scaler = torch.amp.GradScaler("cpu", enabled=precision == "amp")
        self._is_new = True

    def backward(self, loss: Callable[..., Tensor], *arguments: Tensor, share: float = 1.0) -> float:
        """Add the gradients of `loss(*arguments)` to those of the step, and return it."""
        if self._is_new:
            self.optimizer.zero_grad()
        self._is_new = False
        with torch.autocast("cpu", dtype=self._dtype, enabled=self._dtype is not None):
            value = loss(*arguments)
        self.scaler.scale(value * share).backward()
        return value.item()

    def update(self) -> bool:
        """Make the optimizer step, and return whether the scaler has skipped it."""
        if self._max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._is_new = True
        return self.scaler.get_scale() < before
