"""The CPU: main memory as the device's memory, limited by RLIMIT_DATA and metered by VmPeak where Linux has it.

Exact metering exists so that everything can be tested without a GPU: the same job takes the same memory to the page, a
budget is a real limit, and a search has one correct max batch. Ordinary meters vary by several percent between runs.
`heap` makes malloc exact; it is a separate module because it must run before torch is imported.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from amp_track.config.inspection import Support
from amp_track.records.hardware import Hardware
from amp_track.training.devices import cgroup, heap
from amp_track.training.devices.base import Device, MemoryPeak

_BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "avx10_2", "bf16", "sve_bf16")
_FLOAT16_UNITS = ("amx_fp16", "avx512_fp16", "avx10_2", "fp16_arith")
"""Names of `torch.cpu.get_capabilities`, of x86 and of ARM."""
_ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
"""Limits what oneDNN uses, whose kernels do the matrix products; its values are names such as AVX2 or AVX512_CORE_BF16.
See https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html."""
_STATUS_FILE = Path("/proc/self/status")
_KIBIBYTE = 1024


class CpuDevice(Device):
    """The CPU, whose free memory the local ranks (`processes`) share.

    The budget is RLIMIT_DATA above the memory that the process holds when the budget begins. Running out of memory is
    then a real failed allocation, repeatable to the exact batch size. The meter is VmPeak, whose growth the budget
    limits. Peak resident memory is a different quantity, and would mislead a search by 5-40 %. Without VmPeak, jobs
    without a budget report it, and budgets are not supported.
    """

    has_queue = False
    is_shared = True
    distributed_backend = "gloo"

    def __init__(self, torch_device: torch.device, processes: int = 1) -> None:
        super().__init__(torch_device)
        self._processes = processes
        self._padding: mmap.mmap | None = None
        self._start_bytes = self._before_reset_bytes = 0
        self._is_exact = False
        self._has_peak = process_bytes("VmPeak") is not None
        self.meter = "VmPeak" if self._has_peak else "peak resident memory"

    def hardware(self) -> Hardware:
        try:
            match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        except OSError:
            match = None
        name = match.group(1).strip() if match else platform.processor() or platform.machine()
        return Hardware(kind="cpu", name=name, capability=capability())

    def capacity_bytes(self) -> int:
        total = int(psutil.virtual_memory().total)
        group = cgroup.limit_and_free_bytes()
        return min(total, group[0]) if group else total

    def free_bytes(self) -> int:
        available = int(psutil.virtual_memory().available)
        group = cgroup.limit_and_free_bytes()
        return min(available, group[1]) if group else available

    def budget_support(self) -> Support:
        if self._has_peak:
            return Support(supported=True, reason="RLIMIT_DATA limits this process's memory")
        if sys.platform == "linux":
            reason = f"a CPU budget needs VmPeak, which is missing in this kernel's {_STATUS_FILE}"
        else:
            reason = f"a CPU budget needs RLIMIT_DATA of Linux; this is {platform.system()}"
        return Support(supported=False, reason=reason)

    def set_up_process(self) -> None:
        if self._processes > 1:
            torch.set_num_threads(max(torch.get_num_threads() // self._processes, 1))

    def begin(self, budget_bytes: int | None, *, enforce: bool = True) -> None:
        heap.keep_to_one_arena()  # for programs other than jobs, which inherit the setting
        # The thread pool's stacks belong to the process, not to the batch: start it before the meter.
        torch.ones(512, 512) @ torch.ones(512, 512)
        if not self._has_peak:
            self._start_bytes = peak_resident_bytes()
            return
        import resource

        if budget_bytes is not None:
            # Only for jobs with a budget, because it would cost a small job 20 % of its speed. Without a budget the
            # process first uses the free blocks that it holds, a few MiB, which the meter does not see.
            heap.make_exact()
            self._is_exact = True
        self._start_bytes = self._held_bytes()
        self.reset_peak()
        if enforce:
            allowed = budget_bytes if budget_bytes is not None else self.free_bytes() // self._processes
            limit = _required_bytes("VmData") + allowed
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def _held_bytes(self) -> int:
        return _required_bytes("VmSize") - (len(self._padding) if self._padding is not None else 0)

    def lift_budget(self) -> None:
        if sys.platform == "linux":
            import resource

            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def reset_peak(self) -> None:
        if not self._has_peak:
            return
        self._before_reset_bytes = max(self._before_reset_bytes, self._peak_since_reset())
        if self._is_exact:
            heap.use_up_large_free_blocks()
        # VmPeak cannot be reset. Instead an inaccessible mapping, which RLIMIT_DATA does not count, fills the address
        # space up to it, so that the next allocation shows as a new peak.
        held, peak = self._held_bytes(), _required_bytes("VmPeak")
        if self._padding is not None:
            self._padding.close()
        gap = max(peak - held, mmap.PAGESIZE)
        self._padding = mmap.mmap(-1, gap, prot=0, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _peak_since_reset(self) -> int:
        if self._padding is None:
            return 0
        return _required_bytes("VmPeak") - len(self._padding) - self._start_bytes

    def peak(self) -> MemoryPeak:
        if not self._has_peak:
            grown = peak_resident_bytes() - self._start_bytes
            return MemoryPeak(allocated_bytes=grown, reserved_bytes=grown)
        now = self._peak_since_reset()
        return MemoryPeak(allocated_bytes=now, reserved_bytes=max(now, self._before_reset_bytes))


def _required_bytes(key: str) -> int:
    size = process_bytes(key)
    assert size is not None, f"every Linux kernel with VmPeak has {key}"
    return size


def capability() -> str:
    """Return the instruction sets that distinguish CPUs of the same name, such as `AVX512, avx512_bf16`."""
    limited = (f"{_ISA_VARIABLE}={limit}",) if (limit := _isa_limit()) else ()
    units = dict.fromkeys((*units_of("bfloat16"), *units_of("float16")))
    return ", ".join((torch.backends.cpu.get_cpu_capability(), *units, *limited))


def units_of(dtype: str) -> tuple[str, ...]:
    """Return the instruction sets that compute in `bfloat16` or `float16`; none if the dtype is emulated."""
    names = {"bfloat16": _BFLOAT16_UNITS, "float16": _FLOAT16_UNITS}[dtype]
    limit = _isa_limit()
    if limit and not any(part in limit for part in ("BF16", "FP16", "AMX", "AVX10")):
        return ()
    capabilities = _capabilities()
    return tuple(name for name in names if capabilities.get(name))


def _isa_limit() -> str:
    """Return the upper limit of the instruction sets that oneDNN uses, or "" without a limit."""
    limit = os.environ.get(_ISA_VARIABLE, "").upper()
    return "" if limit in ("ALL", "DEFAULT") else limit


def _capabilities() -> Mapping[str, Any]:
    """Return which instruction sets the CPU has, by name; in older releases of torch, only those of x86."""
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    private = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_fp16": "_is_amx_fp16_supported"}
    private["amx_bf16"] = "_is_amx_tile_supported"  # every CPU with AMX tiles has its bfloat16 products
    return {name: getattr(torch.cpu, function, lambda: False)() for name, function in private.items()}


def process_bytes(key: str) -> int | None:
    """Return a size in /proc/self/status in bytes; None on other systems, or if the kernel lacks it, as gVisor's."""
    if sys.platform != "linux":
        return None
    match = re.search(rf"^{key}:\s*(\d+) kB$", _STATUS_FILE.read_text(), re.MULTILINE)
    return int(match.group(1)) * _KIBIBYTE if match else None


def peak_resident_bytes() -> int:
    """Return the peak of this process's resident main memory, including libraries, which a budget does not limit."""
    peak_bytes = process_bytes("VmHWM")
    if peak_bytes is not None:
        return peak_bytes
    import resource

    unit = 1 if sys.platform == "darwin" else _KIBIBYTE
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
