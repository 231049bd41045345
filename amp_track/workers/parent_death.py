"""Run a program that ends when the process that started it ends, even if that was killed: `parent_death.py PROGRAM …`.

The starting process holds the other end of this process's stdin, which the kernel closes when it ends. Without this
supervisor the program would become an orphan.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import BinaryIO

GRACE_SECONDS = 3
"""How long the program may take to end after SIGTERM, before it is killed."""
_PARENT_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG."""
_SIGNALLED = 128
"""A shell adds this to the number of the signal that ended a program."""


class SupervisedProcess:
    """A program with its supervisor, in a process group that Ctrl-C in the terminal does not reach.

    Args:
        command: the command line; every user of the machine can read it.
        environment: additional environment variables; secrets belong here.
        output: the file for stdout.
        errors: the file for stderr.
        folder: the working folder; by default that of this process.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *,
        output: BinaryIO, errors: BinaryIO, folder: str | None = None,
    ) -> None:  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, *command],
            stdin=subprocess.PIPE, stdout=output, stderr=errors, env={**os.environ, **environment},
            cwd=folder, start_new_session=True,
        )  # fmt: skip

    def exit_code(self) -> int | None:
        """Return the program's exit code as a shell does (137 if it was killed); None while it runs."""
        code = self._process.poll()  # of the supervisor, which may be killed too
        return as_of_a_shell(code) if code is not None else None

    def interrupt(self) -> None:
        """Send SIGTERM to the program."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)  # the supervisor ignores it

    def let_go(self) -> None:
        """Ask the supervisor to end the program, within its grace period."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the program has ended, for at most `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """Kill all remaining processes of the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS rejects it if only zombies are left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def main() -> int:
    """Run the program in this process group until it or the starting process ends. Return its exit code."""
    os.set_inheritable(0, False)
    signal.signal(signal.SIGTERM, _ignore)  # sent to the group; the program does not inherit this handler
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM may send it to all processes of a job; this is inherited
    # The program also ends if this process is killed, as Ray does with all processes that its processes have started.
    preexec = _end_with_parent if sys.platform == "linux" else None
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=preexec)
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
