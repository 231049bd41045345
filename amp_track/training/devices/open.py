"""Open the device that a command line names, and check what is asked of it."""

from __future__ import annotations

import os

import torch

from amp_track.config.job import ALONE, Rank
from amp_track.records.errors import BadInput
from amp_track.records.units import format_bytes
from amp_track.training.devices.accelerator import AcceleratorDevice
from amp_track.training.devices.base import Device
from amp_track.training.devices.cpu import CpuDevice

_PROCESSES_PER_CORE = 8
"""More would only wait for each other, if there is memory for them at all."""


def open_device(text: str, rank: Rank = ALONE) -> Device:
    """Return the device that `--device` names, or the one for this rank of the processes that train together.

    The first process of a machine gets the named accelerator, the others get the ones after it; all share one CPU.

    Raises:
        BadInput: this machine has no device of that name; the message lists those it has.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if text == "auto":
        text = "cpu" if accelerator is None else accelerator.type
    if text == "cpu":
        return CpuDevice(torch.device("cpu"), rank.local_count)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    there = ["cpu", *(f"{accelerator.type}:{index}" for index in range(count))] if accelerator else ["cpu"]
    kind, _, index = text.partition(":")
    if accelerator is None or kind != accelerator.type or int(index or 0) >= count:
        raise BadInput(f"--device: got {text}, expected one that is here: auto, {', '.join(there)}")
    return AcceleratorDevice(torch.device(kind, int(index or 0) + rank.local_index))


def check_processes(device: Device, rank: Rank) -> None:
    """Raise BadInput if so many processes cannot train together on this device and the ones after it."""
    processes = rank.local_count
    if rank.count == 1:
        return
    flag = "--nproc" if processes == rank.count else "torchrun's --nproc-per-node"
    if device.distributed_backend is None:
        raise BadInput(
            f"{flag}: got {processes}, expected 1 on {device.kind}: several train together on CUDA "
            "devices and on CPUs; leave it out"
        )
    if device.is_shared:
        most = _PROCESSES_PER_CORE * (os.cpu_count() or 1)
        if processes > most:
            raise BadInput(f"{flag}: got {processes}, expected at most {most} on this {device.kind}; give fewer")
        return
    there = torch.accelerator.device_count() - (device.torch_device.index or 0)
    if processes > there:
        raise BadInput(
            f"{flag}: got {processes}, expected at most {there}: each needs a device of its own, from "
            f"{device.torch_device} on; give fewer"
        )


def free_bytes_each(device: Device, processes: int) -> int:
    """Return the memory that each of so many processes could take now.

    They share the memory of one device; or each has its own, and the fullest one decides.
    """
    free_bytes = min(each.free_bytes() for each in device.of_processes(processes))
    return free_bytes // processes if device.is_shared else free_bytes


def check_budget(device: Device, budget_bytes: int | None, processes: int = 1) -> None:
    """Raise BadInput if the budget cannot be enforced here, or is more than the device has.

    Each process has the budget for itself, even if they share the device.
    """
    if budget_bytes is None:
        return
    support = device.budget_support()
    if not support.supported:
        raise BadInput(
            f"--memory-budget: got {format_bytes(budget_bytes)}, expected none: {support.reason}; leave it out"
        )
    of_all = budget_bytes * processes if device.is_shared else budget_bytes
    capacity = device.capacity_bytes()
    if of_all > capacity:
        times = f" for each of {processes} processes" if of_all != budget_bytes else ""
        raise BadInput(
            f"--memory-budget: got {format_bytes(budget_bytes)}{times}, expected at most the {format_bytes(capacity)} "
            f"that {device.name} has; give a smaller one or leave it out"
        )
