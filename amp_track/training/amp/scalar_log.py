"""Scalars that a step leaves on the device, kept there until they are fetched together."""

from __future__ import annotations

import torch
from torch import Tensor

_LOOSE = 64


class ScalarLog:
    """A preallocated buffer for up to `capacity` scalars.

    Appending keeps the tensor itself and launches nothing; every 64 of them go into the buffer at once. A copy for each
    would cost a tiny step 1 %.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._buffer = torch.zeros(capacity, device=device)
        self._loose: list[Tensor] = []
        self._packed = 0

    def __len__(self) -> int:
        return self._packed + len(self._loose)

    def append(self, scalar: Tensor) -> None:
        """Remember a scalar that nobody changes afterwards."""
        self._loose.append(scalar)
        if len(self._loose) == _LOOSE:
            self._pack()

    def _pack(self) -> None:
        if self._loose:
            end = self._packed + len(self._loose)
            self._buffer[self._packed : end].copy_(torch.stack(self._loose), non_blocking=True)
            self._packed = end
            self._loose = []

    def fetch(self) -> list[float]:
        """All of them, and forget them. Waits for the device once."""
        self._pack()
        values: list[float] = self._buffer[: self._packed].tolist()
        self._packed = 0
        return values

    def clear(self) -> None:
        self._loose = []
        self._packed = 0
