"""Initialize the momentum that torch's fused SGD leaves uninitialized if GradScaler skips its first step.

`torch.optim.SGD(momentum=…, fused=True)` allocates its momentum buffers with `empty_like` in its first step; the kernel
writes them. If the gradients overflow, as they often do at GradScaler's initial scale, the kernel returns before it
writes, and the next step adds uninitialized memory: weights of 1.0 became 1e31 (torch 2.15, on a CPU; the source of
2.11 is the same). The other fused optimizers, Adam, AdamW and Adagrad, initialize their state with zeros.
"""

from __future__ import annotations

from typing import Any

import torch


def check_dampening(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if a fused SGD has dampening, which with a momentum of zeros would affect the first gradient."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in filter(_has_fused_momentum, optimizer.param_groups):
        if group["dampening"]:
            raise ValueError(
                f"torch.optim.SGD with fused=True and dampening={group['dampening']:g} is not supported under amp, "
                "which may skip its first steps. Leave fused=True out."
            )


def keep_momentum_written(optimizer: torch.optim.Optimizer) -> None:
    """Make each step of a fused SGD begin with zeros for parameters without momentum; other optimizers are unchanged.

    The first optimizer step stays identical to the bit, because `momentum * 0 + gradient` is the gradient.
    """
    if isinstance(optimizer, torch.optim.SGD):
        optimizer.register_step_pre_hook(_write_zeros)


def _write_zeros(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if not _has_fused_momentum(group):
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if parameter.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)


def has_fused_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is a fused SGD whose momentum has not been written yet."""
    is_new = not any("momentum_buffer" in state for state in optimizer.state.values())
    return isinstance(optimizer, torch.optim.SGD) and is_new and any(map(_has_fused_momentum, optimizer.param_groups))


def _has_fused_momentum(group: dict[str, Any]) -> bool:
    return bool(group["fused"] and group["momentum"])
