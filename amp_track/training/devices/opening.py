"""Open the device that a command line names, and check what is asked of it."""

from __future__ import annotations

import torch

from amp_track.records.errors import BadInput
from amp_track.records.job import ALONE, Rank
from amp_track.records.values import format_bytes
from amp_track.training.devices.accelerator import AcceleratorDevice
from amp_track.training.devices.base import Device
from amp_track.training.devices.cpu import CpuDevice


def open_device(text: str, rank: Rank = ALONE) -> Device:
    """Return the device that `--device` names, or the one for this rank of the processes that train together.

    The first process gets the named accelerator, the others get the ones after it; all share one CPU.

    Raises:
        BadInput: this machine has no device of that name; the message lists those it has.
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
    """Raise BadInput if so many processes cannot train together on this device."""
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
    """Return the devices that so many processes use: one CPU, or this accelerator and the ones after it."""
    if device.torch_device.type == "cpu":
        return [device]
    first = device.torch_device.index or 0
    return [AcceleratorDevice(torch.device(device.torch_device.type, first + rank)) for rank in range(processes)]


def free_bytes_each(device: Device, processes: int) -> int:
    """Return the memory that each of so many processes could take now.

    They share main memory; among accelerators the fullest one decides.
    """
    if device.torch_device.type == "cpu":
        return device.free_bytes() // processes
    return min(each.free_bytes() for each in devices_of(device, processes))


def check_budget(device: Device, budget_bytes: int | None, processes: int = 1) -> None:
    """Raise BadInput if the budget cannot be enforced here, or is more than the device has.

    Each process has the budget for itself; they share main memory.
    """
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
