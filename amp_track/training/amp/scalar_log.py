"""A log of scalars on the device, which are fetched together."""

from __future__ import annotations

import torch
from torch import Tensor

_LOOSE = 64
"""Number of scalars that are kept as separate tensors before they are copied into the buffer."""


class ScalarLog:
    """A preallocated buffer for up to `capacity` float32 scalars on a device.

    Appending stores the tensor and launches no kernel; every 64 tensors are copied into the buffer at once. A copy for
    each scalar would slow a tiny step down by 1 %.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._buffer = torch.zeros(capacity, device=device)
        self._loose: list[Tensor] = []
        self._packed = 0

    def __len__(self) -> int:
        return self._packed + len(self._loose)

    def append(self, scalar: Tensor) -> None:
        """Append a scalar tensor, which must not be changed in place afterwards.

        Raises:
            IndexError: the log is full; `copy_` would silently drop the scalar.
        """
        if len(self) == len(self._buffer):
            raise IndexError(f"the log is full ({len(self._buffer)} scalars); fetch them first")
        self._loose.append(scalar)
        if len(self._loose) == _LOOSE:
            self._pack()

    def _pack(self) -> None:
        """Copy the separate tensors into the buffer."""
        if self._loose:
            end = self._packed + len(self._loose)
            self._buffer[self._packed : end].copy_(torch.stack(self._loose), non_blocking=True)
            self._packed = end
            self._loose = []

    def fetch(self) -> list[float]:
        """Return all scalars as numbers, and empty the log. Waits for the device once."""
        self._pack()
        values: list[float] = self._buffer[: self._packed].tolist()
        self._packed = 0
        return values

    def truncate(self, length: int) -> None:
        """Keep the first `length` scalars. Does not wait for the device."""
        self._loose = self._loose[: max(length - self._packed, 0)]
        self._packed = min(self._packed, length)

    def clear(self) -> None:
        """Empty the log."""
        self._loose = []
        self._packed = 0
