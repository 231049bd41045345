"""A first command whose machine goes silent, in a network of this process's own: print what the other one is told."""

import fcntl
import socket
import struct
import threading
from dataclasses import replace

from amp_track.records.errors import AgentLost
from amp_track.records.job import Rank
from amp_track.sandbox import agents
from amp_track.sandbox.torchrun import Launch

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1
"""From Linux's sockios.h and if.h."""


def set_loopback(*, up: bool) -> None:
    """Let messages to this machine arrive, or get lost without a word."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        known = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack("16sh14x", b"lo", 0))
        (flags,) = struct.unpack_from("h", known, 16)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP if up else flags & ~_UP))


def main() -> None:
    set_loopback(up=True)
    launch = Launch(rank=Rank(index=0, count=2), address="127.0.0.1", port=1, name="amp_track/r")
    gathering = agents.Gathering(launch)
    joined = []
    other = replace(launch, rank=Rank(index=1, count=2))
    joining = threading.Thread(target=lambda: joined.append(agents.join(other, gathering.point)))
    joining.start()
    first = gathering.all()
    joining.join()
    set_loopback(up=False)
    try:
        joined[0].next()
    except (EOFError, AgentLost) as error:
        print(type(error).__name__, error)
    first.close()


if __name__ == "__main__":
    main()
