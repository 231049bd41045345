"""Devices with a caching allocator of torch: CUDA, ROCm, XPU and MPS, through torch.accelerator."""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from amp_track.config.inspection import Support
from amp_track.records.hardware import Hardware
from amp_track.training.devices.base import Device, MemoryPeak

_RESERVED_PART, _MOST_RESERVED_BYTES = 16, 512 * 2**20
_SETTLED_SECONDS, _MOST_SETTLING_SECONDS, _POLL_SECONDS = 0.5, 10.0, 0.05


class AcceleratorDevice(Device):
    """A CUDA, ROCm, XPU or MPS device, whose memory torch.accelerator's caching allocator hands out.

    The budget is the allocator's limit (`set_per_process_memory_fraction`), which counts reserved memory, but neither
    the context nor other processes. Without a budget, the limit is the free memory when the job begins, less a reserve:
    if a job took all memory, libraries that allocate outside of torch would fail with unclear messages, also in other
    processes on the GPU.
    """

    has_queue = True
    is_shared = False
    meter = "caching allocator"

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        if self.kind == "cuda":
            self.pins_memory, self.distributed_backend = True, "nccl"
        self._backend: Any = getattr(torch, self.kind, None) if self.kind in ("cuda", "xpu") else None
        """torch.cuda or torch.xpu, which can limit a process's memory."""
        self._reserved_before_reset_bytes = 0

    def hardware(self) -> Hardware:
        processor = f"{platform.processor() or platform.machine()} ({self.kind})"
        return Hardware(
            kind=self.kind,
            name=self._backend.get_device_name(self.torch_device) if self._backend else processor,
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

    def capacity_bytes(self) -> int:
        return self._memory_info()[1]

    def free_bytes(self) -> int:
        return max(self._free_bytes() - reserve_bytes(self.capacity_bytes()), 0)

    def _free_bytes(self) -> int:
        return self._memory_info()[0]

    def _memory_info(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device. torch.accelerator can tell them from torch 2.10 on."""
        read = self._backend.mem_get_info if self._backend else torch.accelerator.get_memory_info
        free_bytes, total_bytes = read(self.torch_device)
        return int(free_bytes), int(total_bytes)

    def budget_support(self) -> Support:
        if self._backend:
            return Support(supported=True, reason="the caching allocator limits reserved memory")
        return Support(supported=False, reason=f"torch cannot limit a process's memory on {self.kind} exactly")

    def set_up_process(self) -> None:
        torch.accelerator.set_device_index(self.torch_device.index or 0)  # pinned memory and nccl's objects go there

    def begin(self, budget_bytes: int | None, *, enforce: bool = True) -> None:
        self.set_up_process()
        torch.accelerator.empty_cache()
        if enforce and self._backend:
            # The limit includes what this process holds already, such as data of a function, which is not free.
            own = torch.accelerator.memory_reserved(self.torch_device)
            allowed = budget_bytes if budget_bytes is not None else self.free_bytes() + own
            fraction = fraction_for(allowed, self._limited_bytes())
            self._backend.set_per_process_memory_fraction(fraction, self.torch_device)
        self._reserved_before_reset_bytes = 0  # what was freed before the budget began does not count
        torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def _limited_bytes(self) -> int:
        """Return the memory that torch's limit is a fraction of."""
        if not self._backend:
            return self.capacity_bytes()
        return int(self._backend.get_device_properties(self.torch_device).total_memory)

    def allocation_retries(self) -> int | None:
        if not self._backend:
            return None
        return int(torch.accelerator.memory_stats(self.torch_device).get("num_alloc_retries", 0))

    def settle(self) -> None:
        """Wait until free memory has not grown for half a second, at most ten seconds."""
        started = since = time.monotonic()
        most = self._free_bytes()
        while time.monotonic() - since < _SETTLED_SECONDS and time.monotonic() - started < _MOST_SETTLING_SECONDS:
            time.sleep(_POLL_SECONDS)
            free = self._free_bytes()
            if free > most:
                most, since = free, time.monotonic()

    def lift_budget(self) -> None:
        if self._backend:
            self._backend.set_per_process_memory_fraction(1.0, self.torch_device)

    def reset_peak(self) -> None:
        # torch resets both peaks at once, but the reserved one has to be kept.
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


def reserve_bytes(capacity_bytes: int) -> int:
    """Return the memory that a job without a budget leaves free: a sixteenth of the device, at most 512 MiB.

    Handles of cuBLAS and cuDNN, lazily loaded kernels, and nccl's buffers are allocated outside of torch: 0.15 GiB by a
    ResNet-50 and a ViT on an H100, after its context of 0.6 GiB (torch 2.11, CUDA 13.0, 2026-11-26). nccl was not
    measured.
    """
    return min(capacity_bytes // _RESERVED_PART, _MOST_RESERVED_BYTES)


def fraction_for(budget_bytes: int, total_bytes: int) -> float:
    """Return the fraction, at most 1, that torch converts back to exactly this budget.

    torch computes `size_t(fraction * total_bytes)`, which truncates: without the half byte, 3.5 % of budgets would be
    one byte short, and a budget of full blocks would lose its last block.
    """
    return min((budget_bytes + 0.5) / total_bytes, 1.0)


_DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")


def driver_version() -> str:
    """Return the NVIDIA driver's version, such as `570.86.15`; "" if neither kernel nor nvidia-smi reports it."""
    with contextlib.suppress(OSError):
        if found := re.search(r"Kernel Module.*?(\d+\.[\d.]+)", _DRIVER_VERSION_FILE.read_text()):
            return found.group(1)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].strip()
