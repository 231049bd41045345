"""Open the device that `--device` names, and check budgets and process counts against it."""

from __future__ import annotations

import os

import torch

from amp_track.config.job import ALONE, Rank
from amp_track.records.errors import BadInput
from amp_track.records.units import format_bytes
from amp_track.training.devices.accelerator import AcceleratorDevice
from amp_track.training.devices.base import Device
from amp_track.training.devices.cpu import CpuDevice

_PROCESSES_PER_CORE = 8  # more would only wait for each other


def open_device(text: str, rank: Rank = ALONE) -> Device:
    """Return the device that `--device` names, for this rank. Raises BadInput if this machine has none of that name.

    The first rank on a machine gets the named accelerator, the others the ones after it. All ranks share one CPU.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if text == "auto":
        text = accelerator.type if accelerator else "cpu"
    if text == "cpu":
        return CpuDevice(torch.device("cpu"), rank.local_count)
    names = [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())] if accelerator else []
    kind, _, index = text.partition(":")
    if f"{kind}:{int(index or 0)}" not in names:
        raise BadInput(f"--device: got {text!r}, expected one of {', '.join(['auto', 'cpu', *names])}.")
    return AcceleratorDevice(torch.device(kind, int(index or 0) + rank.local_index))


def check_processes(device: Device, rank: Rank) -> None:
    """Raise BadInput if this device, with those after it, does not support the number of local ranks."""
    processes = rank.local_count
    if rank.count == 1:
        return
    flag = "--nproc" if processes == rank.count else "torchrun's --nproc-per-node"
    if device.distributed_backend is None:
        fix = "Only CUDA devices and CPUs train with several processes."
        raise BadInput(f"{flag}: got {processes}, expected 1 on {device.kind}. {fix}")
    if device.is_shared:
        most, where = _PROCESSES_PER_CORE * (os.cpu_count() or 1), f" on this {device.kind}"
    else:
        most = torch.accelerator.device_count() - (device.torch_device.index or 0)
        where = f": one process for each device from {device.torch_device} on"
    if processes > most:
        raise BadInput(f"{flag}: got {processes}, expected at most {most}{where}.")


def free_bytes_each(device: Device, processes: int) -> int:
    """Return the memory that each of `processes` could allocate now: their part of a shared device, or the least."""
    free_bytes = min(each.free_bytes() for each in device.of_processes(processes))
    return free_bytes // processes if device.is_shared else free_bytes


def check_budget(device: Device, budget_bytes: int | None, processes: int = 1) -> None:
    """Raise BadInput if the budget of each process cannot be enforced on this device, or exceeds its memory."""
    if budget_bytes is None:
        return
    support = device.budget_support()
    if not support.supported:
        raise BadInput(f"--memory-budget is not supported here: {support.reason}. Leave it out.")
    of_all = budget_bytes * processes if device.is_shared else budget_bytes
    capacity = device.capacity_bytes()
    if of_all > capacity:
        times = f" for each of {processes} processes" if of_all != budget_bytes else ""
        raise BadInput(
            f"--memory-budget: got {format_bytes(budget_bytes)}{times}, expected at most {format_bytes(capacity)}, the "
            f"memory of {device.hardware().name}."
        )
