"""Run a program that ends when the process that started it ends, even if that was killed: `parent_death.py PROGRAM …`.

The starting process holds the other end of this process's stdin, which the kernel closes when it ends. Without this
supervisor the program would become an orphan.
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
"""How long the program may take to end after SIGTERM, before it is killed."""
_PARENT_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG."""
_SIGNALLED = 128
"""A shell adds this to the number of the signal that ended a program."""


def main() -> int:
    """Run the program in this process group until it or the starting process ends. Return its exit code."""
    os.set_inheritable(0, False)
    signal.signal(signal.SIGTERM, _ignore)  # sent to the group; the program does not inherit this handler
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM may send it to all processes of a job; this is inherited
    # The program also ends if this process is killed, as Ray does with all processes that its processes have started.
    hears = _end_with_parent if sys.platform == "linux" else None
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=hears)
    let_go = threading.Event()
    threading.Thread(target=_end_when_let_go, args=(let_go,), daemon=True).start()
    code = program.wait()
    if let_go.is_set():  # nobody waits for the exit code: kill the process group, including this process
        os.killpg(0, signal.SIGKILL)
    return as_of_a_shell(code)


def as_of_a_shell(code: int) -> int:
    """Return the exit code of a shell: 128 + N instead of Python's -N after signal N."""
    return code if code >= 0 else _SIGNALLED - code


def _end_when_let_go(let_go: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    let_go.set()
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
