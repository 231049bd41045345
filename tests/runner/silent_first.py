"""Simulate a rank 0 whose machine stops answering, in a separate network; print the error of the other rank."""

import fcntl
import os
import socket
import struct

from torch.distributed import TCPStore

from amp_track.config.job import Rank
from amp_track.config.torchrun import Launch
from amp_track.records.errors import AgentLost
from amp_track.runner.distributed import Orders, OtherRanks

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1
"""From Linux's sockios.h and if.h."""


def set_loopback(*, up: bool) -> None:
    """Let messages to this machine arrive, or drop them silently."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        known = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack("16sh14x", b"lo", 0))
        (flags,) = struct.unpack_from("h", known, 16)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP if up else flags & ~_UP))


def main() -> None:
    set_loopback(up=True)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launches = [
        Launch(rank=Rank(index=index, count=2), address="127.0.0.1", port=server.port, name="launch")
        for index in (0, 1)
    ]
    orders = Orders(launches[1], "mine.py")
    OtherRanks(launches[0]).wait_until_joined()
    orders._receive()
    set_loopback(up=False)
    try:
        orders.next()
    except (EOFError, AgentLost) as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)  # both threads wait for the store


if __name__ == "__main__":
    main()
