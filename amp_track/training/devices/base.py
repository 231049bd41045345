"""The interface of a kind of device: its name, capacity, budget, and meter of peak memory.

A budget is enforced, never simulated: an allocation that exceeds it really fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from amp_track.config.inspection import Support
from amp_track.records.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """Peak memory since the budget began (`reserved_bytes`) and since the last `reset_peak` (`allocated_bytes`)."""

    allocated_bytes: int
    reserved_bytes: int
    """Read from the meter that the budget limits."""


class Device(ABC):
    """The device that a job runs on. Make it in the process that uses it."""

    has_queue: bool
    """Whether it works through a queue behind the host's back, and not within the call that gives it work."""
    is_shared: bool
    """Whether the processes that train together share this one device and its memory, and not have one each."""
    pins_memory: bool = False
    """Whether batches are copied to it from pinned memory, for which the host need not wait."""
    distributed_backend: str | None = None
    """The backend of torch.distributed for it; None if several processes cannot train together on such devices."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @property
    def kind(self) -> str:
        """The name of its kind in torch: `cpu`, `cuda`."""
        return self.torch_device.type

    @property
    @abstractmethod
    def name(self) -> str:
        """The model's name for people: `NVIDIA H200`, `AMD EPYC`."""

    @abstractmethod
    def hardware(self) -> Hardware:
        """Return the device by its name and by what it can do."""

    @property
    @abstractmethod
    def meter(self) -> str:
        """What its peak memory is read from."""

    @abstractmethod
    def capacity_bytes(self) -> int:
        """Return the device's whole memory."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the memory that a job could take now, which is its budget if none is given."""

    @abstractmethod
    def budget_support(self) -> Support:
        """Return whether a budget can be enforced on this device, and the reason."""

    @abstractmethod
    def of_processes(self, count: int) -> Sequence[Device]:
        """Return the devices that so many processes use: this one and those after it, or this one if they share it."""

    @abstractmethod
    def set_up_process(self) -> None:
        """Make this process use this device, before its workload, its pinned memory and its peers do."""

    @abstractmethod
    def begin(self, budget_bytes: int | None, *, enforce: bool = True) -> None:
        """Let this process take `budget_bytes` more from now on (None: what is free), and start the meter.

        With `enforce=False` the meter counts as under that budget, and nothing is limited.
        """

    @abstractmethod
    def lift_budget(self) -> None:
        """Remove the limit, so that a process that ran out of memory can report it."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak of allocated memory; the reserved peak stays."""

    @abstractmethod
    def peak(self) -> MemoryPeak:
        """Return the peaks so far."""

    def allocation_retries(self) -> int | None:
        """Return how often the allocator gave its cache back to make room; None where there is no such cache."""
        return None

    def settle(self) -> None:  # noqa: B027 — memory of a process that died is free at once unless a driver holds it
        """Wait until the memory of a process that was killed is free again."""

    def synchronize(self) -> None:  # noqa: B027 — without a queue there is nothing to wait for
        """Wait until all queued work is done. Call it before every reading of the clock."""
