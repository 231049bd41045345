"""Start fresh processes: the command line that calls a function of this package, its environment, a scratch folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_SCRATCH = "amp_track-"
"""Short, because the path of a Unix socket in such a folder is limited to about 100 characters."""
_LOCK = ".lock"


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
