"""Communication between the processes that train one job together. The only module that calls torch.distributed.

Each process computes its own part of every batch; DistributedDataParallel averages the gradients before they are
unscaled, so that an overflow in one process is an overflow in all of them: their GradScalers skip the same steps and
have the same scale, which `merge_totals` checks.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from pydantic import TypeAdapter
from torch import distributed, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented all the same

from amp_track.config.job import Rank
from amp_track.stores.addresses import is_of_this_machine
from amp_track.training.amp.step import StepTotals
from amp_track.training.devices.base import Device

_NOT_CONNECTED = "connectFullMesh failed"
"""Part of what gloo says where its processes do not reach each other."""
_FIRST_MESSAGES = 8
"""Enough messages for each of gloo's threads, which take turns, to handle one."""
Value = TypeVar("Value")
_FLAG, _NUMBERS, _TOTALS = TypeAdapter(bool), TypeAdapter(list[float]), TypeAdapter(StepTotals)
JSON: TypeAdapter[Any] = TypeAdapter(Any)
_MOST_BYTES = 2**28
"""Upper limit of one gathered value, so that a wrong size does not take all memory."""
_RECORDER_SIZE, _RECORDER_SIZE_BEFORE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""How many messages torch's flight recorder keeps: by default 2,000 (FlightRecorder.hpp). The second is older."""


class RankGroup:
    """One process's connection to the others that train the same job. Make it with `connected`.

    Every process must call the same methods in the same order, because they wait for each other. A process that trains
    alone answers itself.
    """

    def __init__(self, rank: Rank, host_group: distributed.ProcessGroup | None = None) -> None:
        self.rank = rank
        self._host_group = host_group
        """The process group for values in main memory; None uses that of the gradients."""

    @property
    def is_alone(self) -> bool:
        """True if one process trains the job."""
        return self.rank.count == 1

    @property
    def is_first(self) -> bool:
        """True for the one process that is tracked, and that writes files."""
        return self.rank.index == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up each of the values over all processes."""
        if self.is_alone:
            return list(values)
        return [sum(column) for column in zip(*self.gather(list(values), _NUMBERS), strict=True)]

    def agree(self, decision: bool) -> bool:
        """Return the first process's decision, so that all decide alike although their clocks differ."""
        if self.is_alone:
            return decision
        return self.gather(decision, _FLAG)[0]

    def gather(self, value: Value, adapter: TypeAdapter[Value]) -> list[Value]:
        """Return the value of each rank, by rank.

        Values travel as JSON and are validated. `all_gather_object` would unpickle them, and the backend's sockets have
        no authentication: other users of the machine can connect to them.

        Args:
            value: the value of this rank.
            adapter: validates the values of all ranks.

        Raises:
            RuntimeError: a rank sent more than any rank has to send.
            ValueError: a rank sent something else.
        """
        if self.is_alone:
            return [value]
        data = json.dumps(adapter.dump_python(value)).encode()  # pydantic's own JSON has no NaN
        return [adapter.validate_json(each) for each in self._gather_bytes(data)]

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        count, group = self.rank.count, self._host_group
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
        distributed.all_gather(sizes, torch.tensor([len(data)]), group=group)
        lengths = [int(size) for size in sizes]
        longest = max(lengths)
        if longest > _MOST_BYTES or min(lengths) < 0:
            raise RuntimeError(f"a rank announced a value of {longest} bytes; the limit is {_MOST_BYTES}")
        padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        received = [torch.empty_like(padded) for _ in range(count)]
        distributed.all_gather(received, padded, group=group)
        return [each[:length].numpy().tobytes() for each, length in zip(received, lengths, strict=True)]

    def merge(self, totals: StepTotals) -> StepTotals:
        """Merge the totals of all processes. Raises RuntimeError as `merge_totals` does."""
        return totals if self.is_alone else merge_totals(self.gather(totals, _TOTALS))

    def share_buffers(self, model: nn.Module) -> None:
        """Copy the first process's buffers to every process, as DistributedDataParallel does before each step.

        Otherwise the running means of batch norms differ by what each process has seen in the last step.
        """
        if self.is_alone:
            return
        for buffer in model.buffers():
            distributed.broadcast(buffer, src=0)


@contextmanager
def connected(rank: Rank, device: Device) -> Iterator[RankGroup]:
    """Connect this process to the others of its job, and yield the connection.

    A process that fails does not tell the others: whoever started them has to end them all.
    """
    if rank.count == 1:
        yield RankGroup(rank)
        return
    place = urlsplit(rank.rendezvous)
    is_on_one_machine = rank.local_count == rank.count or is_of_this_machine(place.hostname or "")
    if is_on_one_machine:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, _loopback())
    if place.scheme == "file":
        meeting: dict[str, Any] = {"init_method": rank.rendezvous}
    else:
        meeting = {"store": PrefixStore(place.path, store_at(place.hostname or "", place.port or 0))}
    if device.is_shared and _RECORDER_SIZE_BEFORE not in os.environ:
        # Its record grows to 1 MiB of the memory that a budget limits, over more epochs than any confirmation has: with
        # it, four processes fitted the digits within 40 MiB at a batch of 272, and ran out of it in the seventh epoch.
        os.environ.setdefault(_RECORDER_SIZE, "0")
    with nullcontext() if is_on_one_machine else _interface_named():
        distributed.init_process_group(
            device.distributed_backend,
            rank=rank.index,
            world_size=rank.count,
            device_id=None if device.is_shared else device.torch_device,
            **meeting,
        )
        host_group = _host_group(device)
    # The threads of the backend take their memory with their first message: before the job's own is counted.
    for _ in range(_FIRST_MESSAGES):
        distributed.all_reduce(torch.zeros(1, device=device.torch_device))
    yield RankGroup(rank, host_group)
    distributed.destroy_process_group()


@contextmanager
def _interface_named() -> Iterator[None]:
    """Name the variable of the network interface where gloo cannot connect within the block.

    It listens at the address of the host's own name, which Debian's installer sets to 127.0.1.1 in /etc/hosts.
    """
    try:
        yield
    except RuntimeError as error:
        if _NOT_CONNECTED not in str(error):
            raise
        raise ConnectionError(
            "the processes of several machines cannot connect, expected each to listen where the others reach it; if "
            f"none of them has died, name the network interface between them in GLOO_SOCKET_IFNAME ({error})"
        ) from error


def store_at(host: str, port: int, *, timeout_seconds: float = 300) -> TCPStore:
    """Return a client of a store of torch, such as torchrun has at MASTER_ADDR and MASTER_PORT."""
    return TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_seconds))


def _host_group(device: Device) -> distributed.ProcessGroup | None:
    """Return a gloo process group for values in main memory; None if the gradients' own group is one.

    The gradients' group of an accelerator would wait for the device, and take some of the memory that is limited.
    """
    if device.is_shared:
        return None
    group = distributed.new_group(backend="gloo")
    assert isinstance(group, distributed.ProcessGroup), "every process of the job is a member"
    return group


def _loopback() -> str:
    """Return the name of the network interface that only this machine can reach."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def merge_totals(totals: Sequence[StepTotals]) -> StepTotals:
    """Merge the totals that the processes of a job have for the same steps. The diagnosis is the first process's.

    Raises:
        RuntimeError: the processes made or skipped different steps, or have different scales: some gradients were not
            averaged.
    """
    first = totals[0]
    for rank, other in enumerate(totals[1:], start=1):
        if (other.first_step, other.steps) != (first.first_step, first.steps):
            raise RuntimeError(f"process {rank} has made steps that process 0 has not: their batches differ")
        if (other.skipped_steps, other.scale_changes) != (first.skipped_steps, first.scale_changes):
            raise RuntimeError(
                f"process {rank} skipped steps {other.skipped_steps}, process 0 {first.skipped_steps}: some gradients "
                "are not averaged over the processes; are all parameters part of the model?"
            )
    samples = tuple(sum(column) for column in zip(*(each.step_samples for each in totals), strict=True))
    weighted = [[loss * size for loss, size in zip(t.step_losses, t.step_samples, strict=True)] for t in totals]
    losses = tuple(sum(column) / size for column, size in zip(zip(*weighted, strict=True), samples, strict=True))
    scores = [each.score_sum for each in totals if each.score_sum is not None]
    return StepTotals(
        first_step=first.first_step,
        step_losses=losses,
        step_samples=samples,
        score_sum=sum(scores) if scores else None,
        non_finite_losses=tuple(sorted({bad for each in totals for bad in each.non_finite_losses})),
        skipped_steps=first.skipped_steps,
        scale_changes=first.scale_changes,
        diagnosed=first.diagnosed,
    )
