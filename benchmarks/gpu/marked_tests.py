"""The tests that need a GPU, one row each, in an order in which the first failure tells most.

They run in one process until one of them breaks it: an error of CUDA stays with a process, and would fail every test
after it. The others then run in a new one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import source_digest
from benchmarks.gpu.part import one_line, tail
from benchmarks.gpu.parts import ROOT, Machine, Part, Planned, Reporter, Request
from benchmarks.gpu.rows import Row, Status

ORDER = (
    "tests/training/devices", "tests/sandbox", "tests/integration/test_fit.py", "tests/study", "tests/commands",
    "tests/training/amp", "tests/training", "tests/experiments", "tests",
)  # fmt: skip
"""Budgets first, on which every edge stands; then edges; then the step; then what is trained with all of them."""
_LIMIT_SECONDS = 180.0
_BREAKS_ITS_PROCESS = ("CUDA error", "cuDNN error", "CUBLAS_STATUS", "CUDNN_STATUS", "device-side assert")


def files() -> list[Path]:
    """Return the files with tests that need a GPU, in the order of their tests."""
    found = [file for file in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in file.read_text()]
    return sorted(found, key=lambda file: (place(str(file.relative_to(ROOT))), file))


def place(name: str) -> int:
    """Return the place of a test in the order: that of the first entry that its name begins with."""
    return next(index for index, entry in enumerate(ORDER) if name.startswith(entry))


def collected_key() -> str:
    """The row of what there is to run, which is another one when those files change, or the code that they test."""
    content = hashlib.sha256(b"".join(file.read_bytes() for file in files()) + source_digest().encode())
    return f"collected {content.hexdigest()[:8]}"


def parts(machine: Machine, kept: Mapping[str, Row]) -> list[Part]:
    collected = collected_key()
    keys = [collected, *(kept[collected].values.get("tests", ()) if collected in kept else ())]
    missing = next(filter(None, map(machine.lacks, ("pytest", "mlflow", "optuna"))), "")
    rows = [Planned(key=key, limit_seconds=_LIMIT_SECONDS, missing=missing) for key in keys]
    return [Part(name="tests", rows=rows, start_limit_seconds=_LIMIT_SECONDS)]


def measure(request: Request, report: Reporter) -> None:
    import pytest

    arguments = [
        "-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib --strict-markers", "-q",
        "--continue-on-collection-errors", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"),
        *map(str, files()),
    ]  # fmt: skip
    code = pytest.main(arguments, plugins=[RowsPlugin(request.keys, report)])
    if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        raise RuntimeError(f"pytest ended with code {code:d}: see its output above")


class RowsPlugin:
    """Leaves a row for each test as soon as it is over.

    Args:
        keys: the tests to run; all of them if the row of what is collected is among these.
        report: where rows are left.
    """

    def __init__(self, keys: tuple[str, ...], report: Reporter) -> None:
        self._keys = keys
        self._report = report
        self._session: Any = None
        self._rows: dict[str, Row] = {}

    def pytest_sessionstart(self, session: Any) -> None:
        self._session = session

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            text = str(report.longrepr)
            is_missing = "ModuleNotFoundError" in text
            last = next((line for line in reversed(text.splitlines()) if "Error" in line), text)
            status = Status.MISSING if is_missing else Status.FAILED
            self._send(Row(key=report.nodeid, status=status, reason=one_line(last), values={"traceback": tail(text)}))

    def pytest_collection_finish(self, session: Any) -> None:
        """After `-m` and other plugins have chosen: put the tests in order, and leave out those that are done."""
        items = sorted(session.items, key=lambda item: place(item.nodeid))
        collected = collected_key()
        if collected in self._keys:
            names = [item.nodeid for item in items]
            self._send(Row(key=collected, status=Status.MEASURED, values={"tests": names}))
        else:
            items = [item for item in items if item.nodeid in self._keys]
        session.items[:] = items

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        self._report.started(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called after set-up, call and tear-down of each test: the first that does not pass decides."""
        row = self._rows.setdefault(report.nodeid, row_of(report))
        if row.status is Status.MEASURED:
            self._rows[report.nodeid] = row_of(report, seconds=row.seconds + report.duration)

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        row = self._rows.pop(nodeid)
        self._send(row)
        if row.status is Status.FAILED and any(text in str(row.values) for text in _BREAKS_ITS_PROCESS):
            self._session.shouldstop = "an error of the device stays with its process"

    def _send(self, row: Row) -> None:
        self._report.send(row)


def row_of(report: Any, *, seconds: float = 0.0) -> Row:
    """The row of one phase of a test."""
    if report.passed:
        return Row(key=report.nodeid, status=Status.MEASURED, values={"outcome": "passed"}, seconds=seconds)
    if report.skipped:
        _, _, reason = report.longrepr
        return Row(key=report.nodeid, status=Status.IMPOSSIBLE, reason=one_line(reason.removeprefix("Skipped: ")))
    crash = getattr(report.longrepr, "reprcrash", None)
    reason = crash.message if crash is not None else str(report.longrepr)
    text = tail(str(report.longrepr))
    return Row(
        key=report.nodeid, status=Status.FAILED, reason=one_line(reason), values={"traceback": text}, seconds=seconds
    )
