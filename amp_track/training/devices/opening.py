"""From the name on the command line to a device, and the checks that need one."""

from __future__ import annotations

import torch

from amp_track.records.errors import BadInput
from amp_track.records.job import ALONE, Rank
from amp_track.records.values import format_bytes
from amp_track.training.devices.accelerator import AcceleratorDevice
from amp_track.training.devices.base import Device
from amp_track.training.devices.cpu import CpuDevice


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
