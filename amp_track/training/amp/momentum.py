"""Write the momentum that torch's fused SGD leaves unwritten when GradScaler skips its first step.

`torch.optim.SGD(momentum=…, fused=True)` makes its momentum buffers with `empty_like` in its first step and has the
kernel write them. If the gradients overflow, as they often do at GradScaler's first scale, the kernel returns before
it writes, and the next step adds whatever the memory held: weights of 1.0 became 1e31 (torch 2.15, on a CPU; the source
of 2.11 is the same). The other fused optimizers, Adam, AdamW and Adagrad, fill their state with zeros themselves.
"""

from __future__ import annotations

from typing import Any

import torch


def check_dampening(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if a fused SGD dampens: with momentum of zeros it would dampen the first gradient as well."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in filter(_has_fused_momentum, optimizer.param_groups):
        if group["dampening"]:
            raise ValueError(
                f"torch.optim.SGD: got fused=True with dampening={group['dampening']:g}, expected no dampening under "
                "amp, whose first steps may be skipped; leave fused=True out"
            )


def keep_momentum_written(optimizer: torch.optim.Optimizer) -> None:
    """Let each step of a fused SGD begin with zeros where a parameter has no momentum yet; leave any other alone.

    The first update is then the same to the bit, since `momentum * 0 + gradient` is the gradient.
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


def _has_fused_momentum(group: dict[str, Any]) -> bool:
    return bool(group["fused"] and group["momentum"])
