"""The interface of a kind of device: its name, capacity, budget, and meter of peak memory.

A budget is enforced, never simulated: what goes over it really fails to allocate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from amp_track.records.inspection import Support


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """Peaks since the budget began (`reserved_bytes`) and since the last `reset_peak` (`allocated_bytes`)."""

    allocated_bytes: int
    reserved_bytes: int
    """From the meter that the budget limits."""


class Device(ABC):
    """Where a job runs. Made in the process that uses it."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @property
    @abstractmethod
    def name(self) -> str:
        """The model, as a person would say it: `NVIDIA H200`, `AMD EPYC`."""

    @abstractmethod
    def capacity_bytes(self) -> int:
        """All the memory there is."""

    @abstractmethod
    def free_bytes(self) -> int:
        """What a job could take now: the budget where none is given."""

    @abstractmethod
    def budget_support(self) -> Support:
        """Whether a budget can be enforced here, and why not."""

    @abstractmethod
    def begin(self, budget_bytes: int | None, *, enforce: bool = True) -> None:
        """From here on, this process may take `budget_bytes` more (None: what is free), and the meter counts from here.
        With `enforce=False` it counts as under that budget, and nothing is limited."""

    @abstractmethod
    def lift_budget(self) -> None:
        """Let the process report what happened after it ran out of memory."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak of allocated memory; the reserved peak goes on."""

    @abstractmethod
    def peak(self) -> MemoryPeak: ...

    def synchronize(self) -> None:  # noqa: B027 — where work is not queued there is nothing to wait for
        """Wait until all queued work is done: before every reading of the clock."""
