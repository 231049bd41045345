"""One small class per kind of device: its name, capacity, budget, meter of peak memory, and how it runs out of memory.

A budget is enforced, never simulated: what goes over it really fails to allocate.
"""

from __future__ import annotations

import mmap
import platform
import re
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from amp_track.records.errors import BadInput
from amp_track.records.job import ALONE, Rank, Support
from amp_track.records.values import format_bytes
from amp_track.training.devices import heap

_KIBIBYTE = 1024


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


def _proc_status(key: str) -> int:
    """A size of this process, in bytes, from Linux's /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * _KIBIBYTE
    raise RuntimeError(f"/proc/self/status has no {key}: this kernel cannot meter memory")


def _cgroup_bytes() -> tuple[int, int] | None:
    """Limit and use of this process's control group: in a container the machine's memory is not all ours."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return None
    reclaimable = int(cached.group(1)) if cached else 0  # file cache, torch's own libraries among it
    return None if limit == "max" else (int(limit), max(used - reclaimable, 0))


class CpuDevice(Device):
    """Main memory. The budget is RLIMIT_DATA above what the process holds when it begins, so that running out is a real
    failed allocation, repeatable to the exact batch; the meter is VmPeak, whose growth is what the budget limits.

    Peak resident memory is another quantity, and as a search's meter misleads by 5-40 %: see `peak_resident_bytes`.
    """

    def __init__(self, torch_device: torch.device, processes: int = 1) -> None:
        super().__init__(torch_device)
        self._processes = processes
        self._padding: mmap.mmap | None = None
        self._start_bytes = 0
        self._before_reset_bytes = 0
        self._is_exact = False

    @property
    def name(self) -> str:
        try:
            match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        except OSError:
            match = None
        return match.group(1).strip() if match else platform.processor() or platform.machine()

    def capacity_bytes(self) -> int:
        total = psutil.virtual_memory().total
        cgroup = _cgroup_bytes()
        return min(total, cgroup[0]) if cgroup else int(total)

    def free_bytes(self) -> int:
        available = psutil.virtual_memory().available
        cgroup = _cgroup_bytes()
        return max(min(available, cgroup[0] - cgroup[1]), 0) if cgroup else int(available)

    def budget_support(self) -> Support:
        if sys.platform == "linux":
            return Support(supported=True, reason="RLIMIT_DATA limits this process's memory")
        return Support(supported=False, reason=f"a CPU budget needs Linux's RLIMIT_DATA, this is {platform.system()}")

    def begin(self, budget_bytes: int | None, *, enforce: bool = True) -> None:
        # The thread pool's stacks belong to the process, not to the batch: start it before the count begins.
        torch.ones(512, 512) @ torch.ones(512, 512)
        if sys.platform != "linux":
            self._start_bytes = psutil.Process().memory_info().rss
            return
        import resource

        heap.keep_to_one_arena()
        if budget_bytes is not None:
            # At a price in speed that only a job with a budget pays. Without, what the process happens to have free is
            # used first and does not show: a few MiB, and 20 % of a small job's speed, were it taken away.
            heap.make_exact()
            self._is_exact = True
        self._start_bytes = self._held_bytes()
        self.reset_peak()
        if enforce:
            allowed = budget_bytes if budget_bytes is not None else free_bytes_each(self, self._processes)
            limit = _proc_status("VmData") + allowed
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def _held_bytes(self) -> int:
        return _proc_status("VmSize") - (len(self._padding) if self._padding is not None else 0)

    def lift_budget(self) -> None:
        if sys.platform == "linux":
            import resource

            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def reset_peak(self) -> None:
        if sys.platform != "linux":
            return
        self._before_reset_bytes = max(self._before_reset_bytes, self._peak_since_reset())
        if self._is_exact:
            heap.use_up_large_free_blocks()
        # VmPeak cannot be reset. Instead the address space is padded up to it, with a mapping that may not be touched
        # and that RLIMIT_DATA does not count, so that whatever is allocated next shows as a new peak.
        held, peak = self._held_bytes(), _proc_status("VmPeak")
        if self._padding is not None:
            self._padding.close()
        gap = max(peak - held, mmap.PAGESIZE)
        self._padding = mmap.mmap(-1, gap, prot=0, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _peak_since_reset(self) -> int:
        if self._padding is None:
            return 0
        return _proc_status("VmPeak") - len(self._padding) - self._start_bytes

    def peak(self) -> MemoryPeak:
        if sys.platform != "linux":
            grown = max(psutil.Process().memory_info().rss - self._start_bytes, 0)
            return MemoryPeak(allocated_bytes=grown, reserved_bytes=grown)
        now = self._peak_since_reset()
        return MemoryPeak(allocated_bytes=now, reserved_bytes=max(now, self._before_reset_bytes))


class AcceleratorDevice(Device):
    """CUDA, ROCm, XPU, MPS: torch.accelerator's caching allocator. The budget is the allocator's own limit
    (`set_per_process_memory_fraction`), which counts reserved memory, not the context nor other processes."""

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self._reserved_before_reset_bytes = 0

    @property
    def name(self) -> str:
        if self.torch_device.type == "cuda":
            return torch.cuda.get_device_name(self.torch_device)
        if self.torch_device.type == "xpu":
            return torch.xpu.get_device_name(self.torch_device)
        return f"{platform.processor() or platform.machine()} ({self.torch_device.type})"

    def capacity_bytes(self) -> int:
        return int(torch.accelerator.get_memory_info(self.torch_device)[1])

    def free_bytes(self) -> int:
        return int(torch.accelerator.get_memory_info(self.torch_device)[0])

    def budget_support(self) -> Support:
        if self.torch_device.type in ("cuda", "xpu"):
            return Support(supported=True, reason="the caching allocator limits reserved memory")
        return Support(
            supported=False, reason=f"torch cannot limit a process's memory on {self.torch_device.type} exactly"
        )

    def begin(self, budget_bytes: int | None, *, enforce: bool = True) -> None:
        torch.accelerator.set_device_index(self.torch_device.index or 0)
        if enforce and budget_bytes is not None and self.budget_support().supported:
            self._limit_fraction(min(budget_bytes / self.capacity_bytes(), 1.0))
        torch.accelerator.empty_cache()
        self.reset_peak()

    def lift_budget(self) -> None:
        if self.budget_support().supported:
            self._limit_fraction(1.0)

    def _limit_fraction(self, fraction: float) -> None:
        backend = torch.cuda if self.torch_device.type == "cuda" else torch.xpu
        backend.set_per_process_memory_fraction(fraction, self.torch_device)

    def reset_peak(self) -> None:
        # torch resets both peaks at once; the reserved one is to go on.
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


def peak_resident_bytes() -> int:
    """The most main memory this process has held at once, libraries and all: what `top` shows, not what a budget
    limits."""
    if sys.platform == "linux":
        return _proc_status("VmHWM")
    return int(psutil.Process().memory_info().rss)


def open_device(text: str, rank: Rank = ALONE) -> Device:
    """The device that `--device` names, or of the processes that train together, this one's: the next ones after it.

    Raises:
        BadInput: there is none of that name here; says which there are.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if text == "auto":
        text = "cpu" if accelerator is None else accelerator.type
    if text == "cpu":
        return CpuDevice(torch.device("cpu"), rank.count)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    there = ["cpu", *(f"{accelerator.type}:{index}" for index in range(count))] if accelerator else ["cpu"]
    kind, _, index = text.partition(":")
    if accelerator is None or kind != accelerator.type or int(index or 0) >= count:
        raise BadInput(f"--device: got {text}, expected one that is here: auto, {', '.join(there)}")
    return AcceleratorDevice(torch.device(kind, int(index or 0) + rank.index))


def check_processes(device: Device, processes: int) -> None:
    """Raises BadInput where so many cannot train together."""
    if processes == 1 or device.torch_device.type == "cpu":
        return
    if device.torch_device.type != "cuda":
        raise BadInput(
            f"--processes: got {processes}, expected 1 on {device.torch_device.type}: several train together on CUDA "
            "devices and on CPUs; leave it out"
        )
    there = torch.accelerator.device_count() - (device.torch_device.index or 0)
    if processes > there:
        raise BadInput(
            f"--processes: got {processes}, expected at most {there}: each needs a device of its own, from "
            f"{device.torch_device} on; give fewer"
        )


def devices_of(device: Device, processes: int) -> list[Device]:
    """Those of so many processes; of accelerators, this one and the next ones."""
    if device.torch_device.type == "cpu":
        return [device]
    first = device.torch_device.index or 0
    return [AcceleratorDevice(torch.device(device.torch_device.type, first + rank)) for rank in range(processes)]


def free_bytes_each(device: Device, processes: int) -> int:
    """What each of so many processes could take now: main memory is one for all of them, and of accelerators the
    fullest one decides."""
    if device.torch_device.type == "cpu":
        return device.free_bytes() // processes
    return min(each.free_bytes() for each in devices_of(device, processes))


# Messages of a failed allocation, each as the library that raises it spells it.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # Windows
    "std::bad_alloc",
    "bad allocation",
    "Cannot allocate memory",
    "CUDA error: out of memory",
    "CUDA out of memory",
    "Cuda failure 2 'out of memory'",  # nccl, whose memory is not torch's
    "Cuda failure 'out of memory'",
    "Failed to CUDA malloc",
    "Failed to CUDA calloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "MPS backend out of memory",
    "HIP out of memory",
    "HIP error: out of memory",
)
_KERNEL_LIMIT = (
    "CUDA error: invalid configuration argument",
    "canUse32BitIndexMath",
    "too many resources requested for launch",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, and nothing else."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def is_kernel_limit(error: BaseException) -> bool:
    """Whether an exception says that the batch is too large for a kernel of the device, however much memory it has."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _KERNEL_LIMIT)


def requested_bytes(error: BaseException) -> int | None:
    """What the failed allocation asked for, if the message says so."""
    if match := re.search(r"you tried to allocate (\d+) bytes", str(error)):
        return int(match.group(1))
    if match := re.search(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)", str(error)):
        factor = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match.group(2)]
        return int(float(match.group(1)) * factor)
    return None


def check_budget(device: Device, budget_bytes: int | None, processes: int = 1) -> None:
    """Raises BadInput when the budget cannot be enforced here, or is more than the device has: main memory is one for
    all processes."""
    if budget_bytes is None:
        return
    support = device.budget_support()
    if not support.supported:
        raise BadInput(
            f"--memory-budget: got {format_bytes(budget_bytes)}, expected none: {support.reason}; leave it out"
        )
    of_all = budget_bytes * (processes if device.torch_device.type == "cpu" else 1)
    capacity = device.capacity_bytes()
    if of_all > capacity:
        times = f" for each of {processes} processes" if of_all != budget_bytes else ""
        raise BadInput(
            f"--memory-budget: got {format_bytes(budget_bytes)}{times}, expected at most the {format_bytes(capacity)} "
            f"that {device.name} has; give a smaller one or leave it out"
        )
