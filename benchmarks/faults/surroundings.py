"""Faults in the environment of a command: disk, clock, tracking server."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults import moments, works
from benchmarks.faults.case import Case, Fault, Observation, each
from benchmarks.faults.command import Command
from benchmarks.servers import Server, running_server

_DISK_MEBIBYTES = 16
_AWAY_SECONDS = 2.0
"""The delay before a server is restarted; it needs some more seconds until it answers."""
_CLOCK_SECONDS = 0.5
"""The interval of clock jumps: shorter than the remaining time of the fastest command."""


# ------------------------------------------------------------------------------------------------------- the disk


def _cannot_mount() -> str:
    return "" if os.name == "posix" and os.geteuid() == 0 else "needs root, to mount a small disk"


def _on_a_small_disk(case: Case) -> None:
    folder = str(case.place.stores)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MEBIBYTES}m", "tmpfs", folder], check=True)
    case.stack.callback(subprocess.run, ["umount", "--lazy", folder], check=True)


def _disk_full(case: Case) -> Observation:
    filler = case.place.stores / "filler"

    def strike(command: Command) -> None:
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(65536))
            except OSError:  # no space left, as intended
                return

    seen = case.disturb(strike)
    filler.unlink(missing_ok=True)
    return seen


def _read_only(case: Case) -> Observation:
    folder = str(case.place.stores)
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    seen = case.disturb(lambda command: None)
    subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
    return dataclasses.replace(seen, has_struck=True)


DISKS = (
    Fault(
        "a full disk",
        "The command ends. Running it again with free space ends the trials and runs that it could not end.",
        _disk_full, each(moments.STORES, moments.JOB, moments.EVALUATION, moments.RESULT),
        exit_codes=(0, 1, 2), set_up=_on_a_small_disk, impossible=_cannot_mount,
    ),
    Fault(
        "a folder that is read-only", "The command ends with exit code 2 and one line; nothing is written.",
        _read_only, each(moments.START), exit_codes=(2,), set_up=_on_a_small_disk, impossible=_cannot_mount,
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the clock


def _cannot_compile() -> str:
    return "" if sys.platform == "linux" and shutil.which("cc") else "needs Linux and a C compiler, cc"


def _with_clock(case: Case) -> None:
    """Give the commands a clock that can be set, without changing the clock of the machine."""
    library = case.place.folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    _offset_file(case).touch()
    _set_clock(case, hours=0)
    case.place.variables.update(LD_PRELOAD=str(library), CLOCK_OFFSET=str(_offset_file(case)))


def _offset_file(case: Case) -> Path:
    return case.place.folder / "offset"


def _set_clock(case: Case, *, hours: int) -> None:
    with _offset_file(case).open("r+b") as file:  # in place: the commands have mapped the file
        file.write(struct.pack("q", hours * 3600))


def _clock_jumps(case: Case) -> Observation:
    def strike(command: Command) -> bool:
        _set_clock(case, hours=-1)
        time.sleep(_CLOCK_SECONDS)
        still_runs = command.exit_code is None
        _set_clock(case, hours=1)
        return still_runs

    return case.disturb(strike)


def _killed_with_a_clock_set_back(case: Case) -> Observation:
    def strike(command: Command) -> None:
        command.send(signal.SIGKILL)
        _set_clock(case, hours=-1)

    return case.disturb(strike)


CLOCKS = (
    Fault(
        "the clock jumps an hour back, then two ahead",
        "The command continues; it measures times by a clock that does not jump.",
        _clock_jumps, each(moments.STORES, moments.JOB), set_up=_with_clock, ends_itself=True,
        impossible=_cannot_compile,
    ),
    Fault(
        "SIGKILL of the command, and the clock is set back an hour",
        "The next command ends the stale runs, none with an end before its start.",
        _killed_with_a_clock_set_back, each(moments.STORES, moments.JOB, moments.EVALUATION), set_up=_with_clock,
        exit_codes=(0, -signal.SIGKILL), impossible=_cannot_compile,
    ),
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- the tracking server


def _on_a_server(happen: Callable[[Case, Server], Observation]) -> Callable[[Case], Observation]:
    """Return a function that injects a fault into a command with its own tracking server."""

    def run(case: Case) -> Observation:
        database = f"sqlite:///{case.place.stores}/mlflow.db"  # shared with the other commands
        server = case.stack.enter_context(running_server(case.place.folder / "server", database=database))
        case.place.variables["MLFLOW_TRACKING_URI"] = server.address
        return happen(case, server)

    return run


def _told_once(seen: Observation, *texts: str) -> Observation:
    """Return the observation, with a wrong exit code if the warning was not printed exactly once."""
    said = sum(any(text in line for text in texts) for line in seen.lines)
    return seen if said == 1 or not seen.has_struck else dataclasses.replace(seen, exit_code=None)


def _away(case: Case, server: Server) -> Observation:
    def strike(command: Command) -> bool:
        server.kill()
        time.sleep(_AWAY_SECONDS)
        still_runs = command.exit_code is None
        server.start()
        return still_runs

    return _told_once(case.disturb(strike), "accepts no records now")


def _away_to_the_end(case: Case, server: Server) -> Observation:
    seen = case.disturb(lambda command: server.kill())
    server.start()
    return _told_once(seen, "wait in", "waits in")


def _both_killed(case: Case, server: Server) -> Observation:
    def strike(command: Command) -> None:
        server.kill()
        command.send(signal.SIGKILL)

    seen = case.disturb(strike)
    server.start()
    return seen


SERVERS = (
    Fault(
        "SIGKILL of the tracking server, which is started again",
        "The command warns once and continues. Undelivered records stay in the outbox on disk until the server "
        "answers, or until the next command.",
        _on_a_server(_away), each(moments.JOB, moments.BETWEEN, moments.EVALUATION, of=works.STUDIES),
    ),
    Fault(
        "a tracking server that is away until the command has ended",
        "The command continues and prints the path of its outbox; the next command delivers the records.",
        _on_a_server(_away_to_the_end), each(moments.JOB, moments.BETWEEN, moments.EVALUATION, of=works.STUDIES),
    ),
    Fault(
        "SIGKILL of the command and of its tracking server",
        "The next command delivers the outbox of the killed one, and ends its runs.",
        _on_a_server(_both_killed), each(moments.JOB, moments.STEP, moments.EVALUATION),
        exit_codes=(0, -signal.SIGKILL),
    ),
)  # fmt: skip

ALL = (*DISKS, *CLOCKS, *SERVERS)
