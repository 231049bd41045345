"""ScalarLog brings scalars from a device to the host without waiting for each."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

_TOGETHER = 64
"""Number of scalars that are stacked and copied at once. A copy for each would slow a tiny step down by 1 %."""


class ScalarLog:
    """Scalars on their way from a device to the host, in order.

    Appending stores the tensor and launches no kernel. Every 64 tensors are stacked and copied to pinned memory, behind
    the work that the device has queued.
    """

    def __init__(self) -> None:
        self._loose: list[Tensor] = []
        self._sent: deque[tuple[Tensor, torch.Event | None]] = deque()

    def __len__(self) -> int:
        return sum(len(values) for values, _ in self._sent) + len(self._loose)

    def append(self, scalar: Tensor) -> None:
        """Append a scalar tensor, which must not be changed in place afterwards."""
        self._loose.append(scalar)
        if len(self._loose) == _TOGETHER:
            self._send()

    def _send(self) -> None:
        if not self._loose:
            return
        device = self._loose[-1].device
        values, event = torch.stack([_number(each, device) for each in self._loose]), None
        if device.type not in ("cpu", "mps"):  # MPS has no pinned memory
            there, values = values, torch.empty(len(values), device="cpu", pin_memory=True)
            values.copy_(there, non_blocking=True)
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))  # by default, on the current device's stream
        self._loose = []
        self._sent.append((values, event))

    def fetch(self, *, wait: bool = True) -> list[float]:
        """Return the scalars as numbers, and drop them. Without `wait`, only those that have arrived."""
        self._send()
        fetched: list[float] = []
        while self._sent:
            values, event = self._sent[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            fetched += values.tolist()
            self._sent.popleft()
        return fetched

    def truncate(self, length: int) -> None:
        """Keep the first `length` scalars. Does not wait for the device."""
        while self._loose and len(self) > length:
            self._loose.pop()
        while (over := len(self) - length) > 0:
            values, event = self._sent.pop()
            if len(values) > over:
                self._sent.append((values[:-over], event))

    def clear(self) -> None:
        self._loose = []
        self._sent.clear()


def _number(scalar: Tensor, device: torch.device) -> Tensor:
    """Return a scalar as a float32 tensor without dimensions on the device: most are one, and need no operation."""
    if scalar.dtype is torch.float32 and not scalar.dim() and scalar.device == device:
        return scalar
    return scalar.to(device, torch.float32).reshape(())
