"""Devices with a caching allocator of torch: CUDA, ROCm, XPU and MPS, through torch.accelerator."""

from __future__ import annotations

import platform
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
        return max(self._free_bytes() - reserve_bytes(self.capacity_bytes()), 0)

    def _free_bytes(self) -> int:
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
        if enforce and self.budget_support().supported:
            allowed = budget_bytes if budget_bytes is not None else self.free_bytes()
            self._limit_fraction(fraction_for(allowed, self._limited_bytes()))
        torch.accelerator.empty_cache()
        self.reset_peak()

    def _limited_bytes(self) -> int:
        """Return the memory that torch's limit is a fraction of."""
        if self.kind not in ("cuda", "xpu"):
            return self.capacity_bytes()
        backend = torch.cuda if self.kind == "cuda" else torch.xpu
        return int(backend.get_device_properties(self.torch_device).total_memory)

    def allocation_retries(self) -> int | None:
        if self.kind not in ("cuda", "xpu"):
            return None
        return int(torch.accelerator.memory_stats(self.torch_device).get("num_alloc_retries", 0))

    def settle(self) -> None:
        wait_until_settled(self._free_bytes)

    def lift_budget(self) -> None:
        if self.budget_support().supported:
            self._limit_fraction(1.0)

    def _limit_fraction(self, fraction: float) -> None:
        backend = torch.cuda if self.kind == "cuda" else torch.xpu
        backend.set_per_process_memory_fraction(fraction, self.torch_device)

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

    Handles of cuBLAS and cuDNN, lazily loaded kernels, and nccl's buffers are allocated outside of torch. Their size
    has not been measured.
    """
    return min(capacity_bytes // _RESERVED_PART, _MOST_RESERVED_BYTES)


def wait_until_settled(
    free_bytes: Callable[[], int],
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until free memory has not grown for half a second, at most ten seconds."""
    started = since = now()
    most = free_bytes()
    while now() - since < _SETTLED_SECONDS and now() - started < _MOST_SETTLING_SECONDS:
        sleep(_POLL_SECONDS)
        free = free_bytes()
        if free > most:
            most, since = free, now()


def fraction_for(budget_bytes: int, total_bytes: int) -> float:
    """Return the fraction, at most 1, that torch converts back to exactly this budget.

    torch computes `size_t(fraction * total_bytes)`, which truncates: without the half byte, 3.5 % of budgets would be
    one byte short, and a budget of full blocks would lose its last block.
    """
    return min((budget_bytes + 0.5) / total_bytes, 1.0)


_DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")


def driver_version() -> str:
    """Return the NVIDIA driver's version, such as `570.86.15`, or "" if neither the kernel nor nvidia-smi reports it.

    The driver and the device determine the memory of a context and of a kernel.
    """
    try:
        found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", _DRIVER_VERSION_FILE.read_text())
        if found:
            return found.group(1)
    except OSError:
        pass
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].strip()
