"""Start fresh processes: the command line that calls a function of this package, its environment, a scratch folder."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

_SCRATCH = "amp_track-"
"""Short, because the path of a Unix socket in such a folder is limited to about 100 characters."""
_LOCK = ".lock"
_GRACE_SECONDS = 3
"""How long a program may take to end after SIGTERM, before it is killed."""
_PARENT_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG."""
_SIGNALLED = 128
"""A shell adds this to the number of the signal that ended a program."""


def command(module: str, call: str) -> list[str]:
    """Return the command line of a process that makes one call, such as `main(5000)`, of a function of a module.

    It finds the package even if it is not installed. Modules of the working folder do not shadow others (`-P`).
    """
    package = str(Path(__file__).parents[2])
    name = call.partition("(")[0]
    return [
        sys.executable,
        "-P",
        "-c",
        f"import sys; sys.path.append({package!r}); from {module} import {name}; {call}",
    ]


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
    are in a process group that Ctrl-C in the terminal does not reach.

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
        self.wait(0)
        code = self._process.returncode  # of the supervisor, which may be killed too
        return _as_of_a_shell(code) if code is not None else None

    def interrupt(self) -> None:
        """Send SIGTERM to the program."""
        if self.exit_code() is None:
            self._signal(signal.SIGTERM)  # the supervisor ignores it

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the program has ended, for at most `seconds`, and kill what it has left running."""
        if self._process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                self._signal(signal.SIGKILL)  # only now: later, the number may be that of another group

    def let_go(self) -> None:
        """Ask the supervisor to end the program, within its grace period; see `end`."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill all remaining processes of the group."""
        if self.exit_code() is None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS rejects it if only zombies are left
            os.killpg(self._process.pid, number)


def end(processes: Sequence[SupervisedProcess]) -> None:
    """Send SIGTERM to processes, and SIGKILL to those that have not ended within the grace period."""
    for process in processes:
        process.let_go()
    deadline = time.monotonic() + _GRACE_SECONDS + 2  # the supervisors kill them after the grace period
    for process in processes:
        process.wait(max(deadline - time.monotonic(), 0))
        process.kill()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a temporary folder that only this user can read, and delete it after the block.

    Folders of killed processes are deleted first: they may contain gigabytes of checkpoints. They are recognized by
    a lock, which the kernel releases when a process ends. A PID is not enough: containers that share a temporary
    folder may use the same PIDs.
    """
    _remove_abandoned()
    folder, lock = _locked_folder()
    maker = os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == maker:  # otherwise this is a fork, which closes the inherited generator
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked_folder() -> tuple[Path, int]:
    """Return a new folder and the file descriptor of its lock, which child processes do not inherit."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)  # another process has just deleted it as an orphan's


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # not locked yet, in use, or already deleted
            if folder.lstat().st_uid == os.getuid():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Delete a folder. Raises BlockingIOError if a process holds its lock, and OSError if there is no lock file."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)


def _supervise() -> int:
    """Run the program of the command line until it or the starting process ends. Return its exit code."""
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
    return _as_of_a_shell(code)


def _as_of_a_shell(code: int) -> int:
    """Return the exit code of a shell: 128 + N instead of Python's -N after signal N."""
    return code if code >= 0 else _SIGNALLED - code


def _end_when_let_go(let_go: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    let_go.set()
    os.killpg(0, signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


if __name__ == "__main__":  # a supervisor: `processes.py PROGRAM …`
    sys.exit(_supervise())
