"""Start a command in a folder of its own, watch how far it has come, and see what it leaves behind."""

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
"""A command that takes longer is taken for hung, and ended."""
_POLL_SECONDS = 0.005
_EXIT_SECONDS = 15.0
"""How long processes may take to end once the command is over."""


@dataclass(frozen=True)
class Place:
    """Where one case happens: a folder for each thing whose content is looked at afterwards."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    """Of the commands' environment; a fault may add some."""

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
        """Where the workload notes how far it has come."""
        return self.folder / "marks"

    def make(self) -> Place:
        """Make the folders."""
        for folder in (self.stores, self.temporary, self.marks):
            folder.mkdir(parents=True, exist_ok=True)
        return self

    def environment(self) -> dict[str, str]:
        """Return the environment of the commands."""
        own = {"TMPDIR": str(self.temporary), workload.FOLDER: str(self.marks), "OMP_NUM_THREADS": "1"}
        return dict(os.environ) | processes.ENVIRONMENT | own | self.variables


def _hear_signals() -> None:
    """Hear Ctrl-C and a closed terminal, which are ignored where this runs in a shell's background or under `nohup`."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Command:
    """A command that runs in a session of its own, as in a terminal of its own. Use it in a `with` block.

    Args:
        place: where it runs.
        arguments: those of `amp-track`.
    """

    def __init__(self, place: Place, arguments: Sequence[str]) -> None:
        self.place = place
        self.lines: list[str] = []
        """What it has printed on stderr."""
        self.started = time.monotonic()
        self.ended: float | None = None
        """When its stderr was closed, in seconds as `started`; None before, and where nobody reads it."""
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
        """Of the command itself."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def stdout(self) -> str:
        """What it has printed on stdout."""
        return (self.place.folder / "stdout").read_text(errors="replace")

    def reaches(self, moment: Callable[[Command], bool], longest_seconds: float = LONGEST_SECONDS) -> bool:
        """Wait for a moment. Return whether it came before the command ended."""
        deadline = time.monotonic() + longest_seconds
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
        """Close the end of stderr that is read, as `head` does when it has seen enough."""
        self._hangs_up.set()
        self._reader.join()

    def wait(self, longest_seconds: float = LONGEST_SECONDS) -> int | None:
        """Return the exit code; None if it takes so long that it hangs."""
        try:
            code = self._process.wait(longest_seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(_EXIT_SECONDS)  # processes that are left may hold the pipe
        return code

    def processes(self) -> list[int]:
        """Return the processes of its session besides itself."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                is_ours = process.pid != self.pid and os.getsid(process.pid) == self.pid
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def kill_helper(self, module: str, *, its_children: bool = False) -> None:
        """Kill the process that multiprocessing has started for one of its modules, or only that process's children."""
        with contextlib.suppress(psutil.NoSuchProcess):  # the command ends just now
            for child in psutil.Process(self.pid).children():
                if f"multiprocessing.{module}" in " ".join(child.cmdline()):
                    for process in child.children() if its_children else [child]:
                        process.kill()

    def processes_left(self) -> int:
        """Return how many of its processes do not end once it has ended itself."""
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
