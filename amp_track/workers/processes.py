"""Start fresh processes: the command line that calls a function of this package, its environment, a scratch folder."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_SCRATCH = "amp_track-"
"""Short, because the path of a Unix socket in such a folder is limited to about 100 characters."""
_LOCK = ".lock"
_GRACE_SECONDS = 3
"""How long a program may take to end after SIGTERM, before it is killed."""
_POLL_SECONDS = 0.1
_PARENT_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG."""


def command(module: str, call: str) -> list[str]:
    """Return the command line of a process that makes one call, such as `main(5000)`, of a function of a module.

    It finds the package even if it is not installed. Modules of the working folder do not shadow others (`-P`).
    """
    package, name = str(Path(__file__).parents[2]), call.partition("(")[0]
    code = f"import sys; sys.path.append({package!r}); from {module} import {name}; {call}"
    return [sys.executable, "-P", "-c", code]


@contextmanager
def variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block, for programs that it starts."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class SupervisedProcess:
    """A program that ends when this process ends, even if this process is killed.

    A supervisor, which holds this process's pipe as its stdin, ends the program when the kernel closes the pipe. Both
    are in a process group that Ctrl-C in the terminal does not reach. Every user of the machine can read the command
    line: secrets belong in the additional environment variables.
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

    def exit_code(self, wait_seconds: float | None = 0) -> int | None:
        """Return the program's exit code as a shell does (137 if it was killed); None if it still runs."""
        if self._process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_seconds)
                self.send(signal.SIGKILL)  # what it has left; only now: later, the id may be that of another group
        code = self._process.returncode
        return None if code is None else _as_in_a_shell(code)  # also the supervisor may have been killed

    def interrupt(self) -> None:
        """Send SIGTERM to the program."""
        if self.exit_code() is None:
            self.send(signal.SIGTERM)  # the supervisor ignores it

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process group."""
        with suppress(ProcessLookupError, PermissionError):  # macOS rejects it if only zombies are left
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Close the supervisor's pipe, so that it ends the program within the grace period."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()


def end(processes: Sequence[SupervisedProcess]) -> None:
    """Send SIGTERM to processes, and SIGKILL to those that have not ended within the grace period."""
    for process in processes:
        process.close()
    deadline = time.monotonic() + _GRACE_SECONDS + 2  # the supervisors kill them after the grace period
    for process in processes:
        if process.exit_code(max(deadline - time.monotonic(), 0)) is None:
            process.send(signal.SIGKILL)
            process.exit_code(None)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a temporary folder that only this user can read, and delete it after the block.

    Folders of killed processes are deleted first: they may contain gigabytes of checkpoints. They are recognized by
    a lock, which the kernel releases when a process ends. A PID is not enough: containers that share a temporary
    folder may use the same PIDs.
    """
    for orphan in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # it has no lock yet, is in use, or was deleted meanwhile
            if (orphan / _LOCK).lstat().st_uid == os.getuid():
                with (orphan / _LOCK).open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(orphan)
    folder, maker = Path(tempfile.mkdtemp(prefix=_SCRATCH)), os.getpid()
    with (folder / "new").open("x") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, folder / _LOCK)  # only now: another process would delete a folder whose lock is free
        try:
            yield folder
        finally:
            if os.getpid() == maker:  # otherwise this is a fork, which closes the inherited generator
                shutil.rmtree(folder, ignore_errors=True)


def _supervise() -> int:
    """Run the program of the command line until it or the starting process ends. Return its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # sent to the group; the program does not inherit this handler
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM may send it to all processes of a job; this is inherited
    # The program also ends if this process is killed, as Ray does with all processes that its processes have started.
    preexec = _end_with_parent if sys.platform == "linux" else None
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=preexec)
    while (code := program.poll()) is None:
        if select.select([0], [], [], _POLL_SECONDS)[0]:  # the pipe was closed: nothing is ever written to it
            os.killpg(0, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                program.wait(_GRACE_SECONDS)
            os.killpg(0, signal.SIGKILL)
    return _as_in_a_shell(code)


def _as_in_a_shell(code: int) -> int:
    """Return 128 + N instead of Python's -N after signal N."""
    return code if code >= 0 else 128 - code


def _end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


if __name__ == "__main__":  # a supervisor: `processes.py PROGRAM …`
    sys.exit(_supervise())
