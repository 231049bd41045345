"""The interface of a kind of device. A budget is enforced, never simulated: an allocation that exceeds it fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    """The device that a job runs on. Create it in the process that uses it."""

    has_queue: bool
    """Whether work is queued and runs asynchronously to the host."""
    is_shared: bool
    """Whether all ranks share this device and its memory, instead of having one each."""
    pins_memory = False
    """Whether batches are copied from pinned memory, so that the host does not wait for the copy."""
    distributed_backend: str | None = None
    """Its backend of torch.distributed; None if several ranks cannot train on such devices."""
    meter: str
    """The source of peak memory readings."""
    first_step_peak_bytes: int | None = None
    """The peak of allocated memory up to the end of the first optimizer step, if it was noted."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.kind = torch_device.type

    def of_processes(self, count: int) -> list[Device]:
        """Return the devices of `count` ranks: this one and those after it, or only this one if it is shared."""
        if self.is_shared:
            return [self]
        first = self.torch_device.index or 0
        return [type(self)(torch.device(self.kind, first + rank)) for rank in range(count)]

    @abstractmethod
    def hardware(self) -> Hardware:
        """Return the device's name and capabilities."""

    @abstractmethod
    def capacity_bytes(self) -> int:
        """Return the device's total memory."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the memory that a job could allocate now: its budget if none is given."""

    @abstractmethod
    def budget_support(self) -> Support:
        """Return whether a budget can be enforced on this device, and why."""

    @abstractmethod
    def set_up_process(self) -> None:
        """Select this device for this process, before the workload, pinned memory and the process group use it."""

    @abstractmethod
    def begin(self, budget_bytes: int | None, *, enforce: bool = True) -> None:
        """Limit this process to `budget_bytes` of additional memory (None: the free memory), and start the meter.

        With `enforce=False` only the meter starts, in the same mode as with the budget.
        """

    @abstractmethod
    def lift_budget(self) -> None:
        """Remove the limit, so that a process that ran out of memory can report it."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak of allocated memory; the reserved peak stays."""

    @abstractmethod
    def peak(self) -> MemoryPeak:
        """Return the current peaks."""

    def note_first_step(self) -> None:
        """Note the peak of the first optimizer step, which a job that runs out of memory later reports, too."""
        self.first_step_peak_bytes = self.peak().allocated_bytes

    def allocation_retries(self) -> int | None:
        """Return how often the allocator released its cache to retry an allocation; None without such a cache."""
        return None

    def settle(self) -> None:  # noqa: B027 — without a driver, memory is free as soon as the process has ended
        """Wait until the memory of a killed process is free again."""

    def synchronize(self) -> None:  # noqa: B027 — without a queue there is nothing to wait for
        """Wait for all queued work. Call it before every reading of the clock."""
