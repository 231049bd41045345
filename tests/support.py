"""Shared helpers of tests: paths, sizes, and requests with stores in the current folder."""

from __future__ import annotations

import dataclasses
import os
import pty
import shutil
import sqlite3
import subprocess
import sys
import termios
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.mark import ParameterSet
from sqlalchemy import event
from sqlalchemy.engine import Engine

from amp_track.config.job import Job
from amp_track.config.options import MaxBatchOptions, Request, SearchOptions, Stores

if TYPE_CHECKING:
    from mlflow import MlflowClient

ROOT = Path(__file__).parent.parent
PHONE = {"width": 375, "height": 812}
DIGITS = str(ROOT / "experiments" / "digits.py")
WORKLOADS = Path(__file__).parent / "workloads"
FAULTS = str(WORKLOADS / "faults.py")
MEBIBYTE = 2**20
OUR_FRAMES = str(ROOT / "amp_track")
"""Occurs in a traceback that shows frames of the package, which a user should not see."""


@dataclass(frozen=True)
class Done:
    """The output and exit code of a command."""

    returncode: int
    stdout: str
    stderr: str


def stores() -> dict[str, str]:
    """Return the absolute addresses of both stores in the current folder. MLflow keeps stores open by address."""
    return {"storage": f"sqlite:///{Path.cwd()}/optuna.db", "tracking_uri": f"sqlite:///{Path.cwd()}/mlflow.db"}


def client() -> MlflowClient:
    """Return MLflow's client of the store in the current folder."""
    from mlflow import MlflowClient  # takes seconds that many tests do not need

    return MlflowClient(stores()["tracking_uri"])


def request(job: Job, **settings: Any) -> Request:
    """Return a request with stores in the current folder. `settings` are fields of its options, by name."""

    def taken(options: type) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(options) if field.name in settings]
        return {name: settings.pop(name) for name in names}

    return Request(
        job=job,
        stores=Stores(**stores() | taken(Stores)),
        max_batch_options=MaxBatchOptions(**taken(MaxBatchOptions)),
        search_options=SearchOptions(**taken(SearchOptions)),
        **settings,
    )  # fmt: skip


def tokens(page: Path) -> Iterator[Any]:
    """Yield all tokens of a page in Markdown, including those within paragraphs."""
    from markdown_it import MarkdownIt

    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        yield token
        yield from token.children or ()


def written_on_a_terminal(program: str, columns: int, **variables: str) -> str:
    """Return what a Python program writes to a terminal of that width."""
    here, there = pty.openpty()
    termios.tcsetwinsize(there, (24, columns))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm-256color"} | variables
    written = b""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=there, stdout=there, stderr=there, env=environment) as process:
        os.close(there)
        try:
            while part := os.read(here, 10_000):
                written += part
        except OSError:  # Linux says so when the other end is closed
            pass
    os.close(here)
    assert process.returncode == 0
    return written.decode()


def some_nightly(values: Iterable[str], *, quick: Collection[str]) -> list[ParameterSet]:
    """Return the values as parameters of a test. All but the quick ones are for `make test-nightly`."""
    return [pytest.param(value, marks=[] if value in quick else [pytest.mark.nightly]) for value in values]


def small_request(**options: Any) -> Request:
    """Return the request of which the fixture `found` holds the result."""
    job = Job(workload=DIGITS, memory_budget_bytes=8 * MEBIBYTE)
    return request(job, precisions=("fp32", "bf16"), study="mine", max_batch_size=64, **options)


def make_stores(folder: Path) -> None:
    """Create both stores in a folder, empty but with their tables, which takes seconds."""
    from amp_track.study.opening import open_storage
    from amp_track.tracking import Tracker

    Tracker(f"sqlite:///{folder}/mlflow.db")
    open_storage(f"sqlite:///{folder}/optuna.db").close()


def skip_without_namespaces(unshare: Sequence[str]) -> None:
    """Skip the test if a command of `unshare` cannot run a program in new namespaces."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, of util-linux")
    tried = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"needs new namespaces, which only root may create: {tried.stderr.strip()}")


def write_without_waiting_for_the_disk() -> None:
    """Open SQLite databases in this process without waiting for the disk, which would take half of the test time.

    Surviving a power cut is for SQLite to test. Surviving a killed process does not depend on this.
    """

    @event.listens_for(Engine, "connect")
    def set_up(connection: Any, record: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.executescript("PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY;")
