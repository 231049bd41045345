"""Run a program that ends when the process which has started it is gone, however that ended: `tether.py PROGRAM …`.

The starter holds the other end of this process's stdin, which the kernel closes with it. A program alone would go on:
nothing tells it that its parent was killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

GRACE_SECONDS = 3
"""How long the program may take to end after SIGTERM."""
_PARENT_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG."""
_SIGNALLED = 128
"""What a shell adds to the number of the signal that has ended a program."""


def main() -> int:
    """Run the program in this process's group until it ends, or until it is let go. Returns its exit code."""
    os.set_inheritable(0, False)
    signal.signal(signal.SIGTERM, _ignore)  # which the group is sent; a program does not inherit a handler
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # which SLURM may send to all processes of a job; this is inherited
    # It hears of the end of this process, too, which may be killed: Ray does so to all that its processes have started.
    hears = _end_with_parent if sys.platform == "linux" else None
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=hears)
    let_go = threading.Event()
    threading.Thread(target=_end_when_let_go, args=(let_go,), daemon=True).start()
    code = program.wait()
    if let_go.is_set():  # nobody waits for the exit code: what is left of the group ends, this process included
        os.killpg(0, signal.SIGKILL)
    return as_of_a_shell(code)


def as_of_a_shell(code: int) -> int:
    """Return an exit code as a shell has it: Python's is negative where a signal has ended the program."""
    return code if code >= 0 else _SIGNALLED - code


def _end_when_let_go(let_go: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    let_go.set()
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _end_with_parent() -> None:
    """Let the kernel send this process SIGTERM when its parent has ended."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
