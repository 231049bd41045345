"""Start a command in a new folder, watch its phases, and collect its output and processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks import processes
from benchmarks.faults import workload

LONGEST_SECONDS = 180.0
"""A command that takes longer counts as hung and is killed."""
_POLL_SECONDS = 0.005
_EXIT_SECONDS = 15.0
"""Time limit for the exit of processes after the command has ended."""


@dataclass(frozen=True)
class Place:
    """The folders of one case, which are inspected afterwards."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the commands; a fault may add some."""

    @property
    def stores(self) -> Path:
        """The working folder of the commands, with both stores."""
        return self.folder / "stores"

    @property
    def temporary(self) -> Path:
        """The TMPDIR of the commands."""
        return self.folder / "tmp"

    @property
    def marks(self) -> Path:
        """The folder in which the workload records its phases."""
        return self.folder / "marks"

    def make(self) -> Place:
        """Create the folders."""
        for folder in (self.stores, self.temporary, self.marks):
            folder.mkdir(parents=True, exist_ok=True)
        return self

    def environment(self) -> dict[str, str]:
        """Return the environment of the commands."""
        own = {"TMPDIR": str(self.temporary), workload.FOLDER: str(self.marks), "OMP_NUM_THREADS": "1"}
        return dict(os.environ) | processes.ENVIRONMENT | own | self.variables


def _hear_signals() -> None:
    """Reset SIGINT and SIGHUP, which are ignored in background jobs of a shell and under `nohup`."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Command:
    """A command that runs in a new session, as in a new terminal. Use it in a `with` block.

    Args:
        place: its folders.
        arguments: the arguments of `amp-track`.
    """

    def __init__(self, place: Place, arguments: Sequence[str]) -> None:
        self.place = place
        self.lines: list[str] = []
        """The lines on its stderr."""
        self.started = time.monotonic()
        self.ended: float | None = None
        """The time at which its stderr was closed, on the clock of `started`; None before, or if nobody reads it."""
        with (place.folder / "stdout").open("wb") as stdout:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "amp_track", *arguments], cwd=place.stores, env=place.environment(),
                stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, start_new_session=True,
                preexec_fn=_hear_signals,
            )  # fmt: skip
        self._hangs_up = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *error: object) -> None:
        for process in [self._process.pid, *self.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()

    @property
    def pid(self) -> int:
        """The process id of the command."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def stdout(self) -> str:
        """The text on its stdout."""
        return (self.place.folder / "stdout").read_text(errors="replace")

    def reaches(self, moment: Callable[[Command], bool]) -> bool:
        """Wait for a moment. Return whether the command reached it before it ended."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < deadline and self.exit_code is None:
            if moment(self):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def send(self, number: signal.Signals, *, to_all: bool = False) -> None:
        """Send a signal to the command; `to_all` of its processes, as a terminal sends Ctrl-C."""
        with contextlib.suppress(ProcessLookupError):
            if to_all:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def stop_reading(self) -> None:
        """Close the reading end of stderr, as `head` does after enough lines."""
        self._hangs_up.set()
        self._reader.join()

    def wait(self) -> int | None:
        """Return the exit code; None if the command hangs."""
        try:
            code = self._process.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(_EXIT_SECONDS)  # remaining processes may hold the pipe
        return code

    def processes(self) -> list[int]:
        """Return the other processes of its session."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                is_ours = process.pid != self.pid and os.getsid(process.pid) == self.pid
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def kill_helper(self, module: str, *, its_children: bool = False) -> None:
        """Kill a helper process of multiprocessing, named by its module, or only the children of that process."""
        with contextlib.suppress(psutil.NoSuchProcess):  # the command is ending
            for child in psutil.Process(self.pid).children():
                if f"multiprocessing.{module}" in " ".join(child.cmdline()):
                    for process in child.children() if its_children else [child]:
                        process.kill()

    def processes_left(self) -> int:
        """Return the number of its processes that still run after the command has ended."""
        deadline = time.monotonic() + _EXIT_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return len(left)

    def _read(self) -> None:
        assert self._process.stderr is not None
        stream = self._process.stderr.fileno()
        os.set_blocking(stream, False)
        rest = b""
        while not self._hangs_up.is_set():
            try:
                content = os.read(stream, 65536)
            except BlockingIOError:
                time.sleep(_POLL_SECONDS)
                continue
            if not content:
                self.ended = time.monotonic()
                break
            *whole, rest = (rest + content).split(b"\n")
            self.lines += [line.decode(errors="replace") for line in whole]
        self._process.stderr.close()
