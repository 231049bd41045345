"""Communication between the ranks of one job. The only module that calls torch.distributed.

Each rank computes its part of every batch. DistributedDataParallel averages the gradients before they are unscaled, so
an overflow on one rank is an overflow on all: their GradScalers skip the same steps and have the same scale, which
`merge_totals` checks.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from pydantic import TypeAdapter
from torch import distributed, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented all the same

from amp_track.config.job import Rank
from amp_track.training.amp.step import StepTotals
from amp_track.training.devices.base import Device

_FIRST_MESSAGES = 8
"""Enough messages for each of gloo's threads, which take turns, to handle one; the thread then allocates its memory."""
Value = TypeVar("Value")
_FLAG, _SIZE = TypeAdapter(bool), TypeAdapter(int)
_NUMBERS, _TOTALS = TypeAdapter(list[float]), TypeAdapter(StepTotals)
JSON: TypeAdapter[Any] = TypeAdapter(Any)
_MOST_BYTES = 2**28
"""Upper limit of one gathered value, so that a wrong size does not exhaust memory."""
_CHUNK_BYTES = 2**20
_RECORDER_SIZE, _RECORDER_SIZE_BEFORE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""Number of messages that torch's flight recorder keeps, 2,000 by default (FlightRecorder.hpp). The second is older."""


class RankGroup:
    """The connection of one rank to the other ranks of its job. Create it with `connected`.

    Every rank must call the same methods in the same order, because they wait for each other. With one rank nothing is
    sent.
    """

    def __init__(self, rank: Rank, host_group: distributed.ProcessGroup | None = None) -> None:
        self.rank = rank
        self._host_group = host_group
        """The process group for values in main memory; None uses the gradients' group."""
        self.is_alone = rank.count == 1
        self.is_first = rank.index == 0
        """Whether this is rank 0, which is tracked and writes files."""

    def sum(self, values: list[float]) -> list[float]:
        """Return the sum of each value over all ranks."""
        return [sum(column) for column in zip(*self.gather(values, _NUMBERS), strict=True)]

    def agree(self, decision: bool) -> bool:
        """Return rank 0's decision, so that all ranks decide alike although their clocks differ."""
        return self.gather(decision, _FLAG)[0]

    def gather(self, value: Value, adapter: TypeAdapter[Value]) -> list[Value]:
        """Return the values of all ranks, in rank order. Raises ValueError if a rank sent an invalid value.

        Values are sent as JSON and validated by the adapter. `all_gather_object` would unpickle them, and the backend's
        sockets have no authentication: other users of the machine can connect to them.
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
        """Merge the totals of all ranks."""
        return totals if self.is_alone else merge_totals(self.gather(totals, _TOTALS))

    def share_buffers(self, model: nn.Module) -> None:
        """Copy rank 0's buffers to every rank, as DistributedDataParallel does before each step.

        Otherwise running means of batch norms differ by each rank's part of the last step.
        """
        if not self.is_alone:
            for buffer in model.buffers():
                distributed.broadcast(buffer, src=0)

    def copy_file(self, file: Path) -> None:
        """Copy rank 0's file to the others under torchrun; the ranks of one command read the same file."""
        if urlsplit(self.rank.rendezvous).scheme != "tcp":
            return
        size = self.gather(file.stat().st_size if self.is_first else 0, _SIZE)[0]
        with file.open("rb" if self.is_first else "wb") as stream:
            for start in range(0, size, _CHUNK_BYTES):
                length = min(_CHUNK_BYTES, size - start)
                data = bytearray(stream.read(length) if self.is_first else length)
                distributed.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=0, group=self._host_group)
                if not self.is_first:
                    stream.write(data)


@contextmanager
def connected(rank: Rank, device: Device) -> Iterator[RankGroup]:
    """Connect this rank to the other ranks of its job, and yield the connection.

    A failing rank does not notify the others: the process that started them must end them all.
    """
    if rank.count == 1:
        yield RankGroup(rank)
        return
    place = urlsplit(rank.rendezvous)
    host = place.hostname or ""
    is_on_one_machine = rank.local_count == rank.count or host == "localhost" or host.startswith("127.")
    if is_on_one_machine:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback)
    if place.scheme == "file":
        meeting: dict[str, Any] = {"init_method": rank.rendezvous}
    else:
        meeting = {"store": PrefixStore(place.path, store_at(host, place.port or 0))}
    if device.is_shared and _RECORDER_SIZE_BEFORE not in os.environ:
        # The flight recorder grows to 1 MiB of the budget, over more epochs than a confirmation run has: four ranks
        # trained the digits within 40 MiB at batch size 272, and ran out of memory in the seventh epoch.
        os.environ.setdefault(_RECORDER_SIZE, "0")
    with nullcontext() if is_on_one_machine else _interface_hint():
        distributed.init_process_group(
            device.distributed_backend,
            rank=rank.index,
            world_size=rank.count,
            device_id=None if device.is_shared else device.torch_device,
            **meeting,
        )
        # An accelerator's group for gradients would wait for the device, and use some of its limited memory.
        host_group: Any = None if device.is_shared else distributed.new_group(backend="gloo")
    # The backend's threads allocate memory with their first message: send it before the job's memory is counted.
    for _ in range(_FIRST_MESSAGES):
        distributed.all_reduce(torch.zeros(1, device=device.torch_device))
    yield RankGroup(rank, host_group)
    distributed.destroy_process_group()


@contextmanager
def _interface_hint() -> Iterator[None]:
    """Raise ConnectionError with a hint at GLOO_SOCKET_IFNAME if gloo cannot connect.

    gloo listens at the address of the host's name, which Debian's installer sets to 127.0.1.1 in /etc/hosts.
    """
    try:
        yield
    except RuntimeError as error:
        if "connectFullMesh failed" not in str(error):
            raise
        raise ConnectionError(
            f"the ranks on several machines cannot connect to each other ({error}). If none of them has died, set "
            "GLOO_SOCKET_IFNAME to the network interface between the machines."
        ) from error


def store_at(host: str, port: int, *, timeout_seconds: float = 300) -> TCPStore:
    """Return a client of a TCPStore, such as torchrun's at MASTER_ADDR and MASTER_PORT."""
    return TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_seconds))


def merge_totals(totals: Sequence[StepTotals]) -> StepTotals:
    """Merge the totals of all ranks for the same steps. The diagnosis is rank 0's.

    Raises:
        RuntimeError: the ranks made or skipped different steps, or have different scales: some gradients were not
            averaged.
    """
    first = totals[0]
    for rank, other in enumerate(totals[1:], start=1):
        if (other.first_step, other.steps) != (first.first_step, first.steps):
            raise RuntimeError(f"rank {rank} and rank 0 made different steps: their batches differ")
        if (other.skipped_steps, other.scale_changes) != (first.skipped_steps, first.scale_changes):
            raise RuntimeError(
                f"rank {rank} skipped steps {other.skipped_steps}, rank 0 skipped {first.skipped_steps}: some "
                "gradients were not averaged. Check that all parameters are part of the model."
            )
    samples = tuple(sum(column) for column in zip(*(each.step_samples for each in totals), strict=True))
    weighted = [[loss * size for loss, size in zip(t.step_losses, t.step_samples, strict=True)] for t in totals]
    losses = tuple(sum(column) / size for column, size in zip(zip(*weighted, strict=True), samples, strict=True))
    scores = [each.score_sum for each in totals if each.score_sum is not None]
    return dataclasses.replace(
        first,
        step_losses=losses,
        step_samples=samples,
        score_sum=sum(scores) if scores else None,
        non_finite_losses=tuple(sorted({bad for each in totals for bad in each.non_finite_losses})),
    )
