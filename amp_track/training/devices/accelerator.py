"""Devices with a caching allocator of torch: CUDA, ROCm, XPU and MPS, through torch.accelerator."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

from amp_track.records.hardware import Hardware
from amp_track.records.inspection import Support
from amp_track.training.devices.base import Device, MemoryPeak
from amp_track.training.devices.driver import driver_version


class AcceleratorDevice(Device):
    """A CUDA, ROCm, XPU or MPS device, whose memory torch.accelerator's caching allocator hands out.

    The budget is the allocator's own limit (`set_per_process_memory_fraction`), which counts reserved memory, but
    neither the context nor other processes.
    """

    has_queue = True
    is_shared = False

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        is_cuda = torch_device.type == "cuda"
        self.pins_memory = is_cuda
        self.distributed_backend = "nccl" if is_cuda else None
        self._reserved_before_reset_bytes = 0

    @property
    def name(self) -> str:
        if self.kind == "cuda":
            return torch.cuda.get_device_name(self.torch_device)
        if self.kind == "xpu":
            return torch.xpu.get_device_name(self.torch_device)
        return f"{platform.processor() or platform.machine()} ({self.kind})"

    def hardware(self) -> Hardware:
        return Hardware(
            kind=self.kind,
            name=self.name,
            capability=self._capability(),
            memory_bytes=self._limited_bytes(),
            driver=driver_version() if self.kind == "cuda" else "",
        )

    def _capability(self) -> str:
        if self.kind != "cuda":
            return ""
        if torch.version.hip is not None:
            return str(torch.cuda.get_device_properties(self.torch_device).gcnArchName)
        return "compute capability " + ".".join(map(str, torch.cuda.get_device_capability(self.torch_device)))

    @property
    def meter(self) -> str:
        return "caching allocator"

    def capacity_bytes(self) -> int:
        return int(torch.accelerator.get_memory_info(self.torch_device)[1])

    def free_bytes(self) -> int:
        return int(torch.accelerator.get_memory_info(self.torch_device)[0])

    def budget_support(self) -> Support:
        if self.kind in ("cuda", "xpu"):
            return Support(supported=True, reason="the caching allocator limits reserved memory")
        return Support(supported=False, reason=f"torch cannot limit a process's memory on {self.kind} exactly")

    def of_processes(self, count: int) -> Sequence[Device]:
        first = self.torch_device.index or 0
        return [AcceleratorDevice(torch.device(self.kind, first + rank)) for rank in range(count)]

    def set_up_process(self) -> None:
        torch.accelerator.set_device_index(self.torch_device.index or 0)  # pinned memory and nccl's objects go there

    def begin(self, budget_bytes: int | None, *, enforce: bool = True) -> None:
        torch.accelerator.set_device_index(self.torch_device.index or 0)
        if enforce and budget_bytes is not None and self.budget_support().supported:
            self._limit_fraction(fraction_for(budget_bytes, self._limited_bytes()))
        torch.accelerator.empty_cache()
        self.reset_peak()

    def _limited_bytes(self) -> int:
        """Return the memory of which torch's limit is a fraction."""
        if self.kind not in ("cuda", "xpu"):
            return self.capacity_bytes()
        backend = torch.cuda if self.kind == "cuda" else torch.xpu
        return int(backend.get_device_properties(self.torch_device).total_memory)

    def lift_budget(self) -> None:
        if self.budget_support().supported:
            self._limit_fraction(1.0)

    def _limit_fraction(self, fraction: float) -> None:
        backend = torch.cuda if self.kind == "cuda" else torch.xpu
        backend.set_per_process_memory_fraction(fraction, self.torch_device)

    def reset_peak(self) -> None:
        # torch resets both peaks at once, but the reserved one has to last.
        self._reserved_before_reset_bytes = self.peak().reserved_bytes
        torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def peak(self) -> MemoryPeak:
        reserved = torch.accelerator.max_memory_reserved(self.torch_device)
        return MemoryPeak(
            allocated_bytes=torch.accelerator.max_memory_allocated(self.torch_device),
            reserved_bytes=max(reserved, self._reserved_before_reset_bytes),
        )

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch_device)


def fraction_for(budget_bytes: int, total_bytes: int) -> float:
    """Return the fraction of which torch makes just this budget again, at most 1.

    torch computes `size_t(fraction * total_bytes)`, which drops what is after the point: without the half byte, 3.5 %
    of budgets come out a byte short, and one of whole blocks loses its last one.
    """
    return min((budget_bytes + 0.5) / total_bytes, 1.0)
