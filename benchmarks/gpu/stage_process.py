"""The process that measures a stage and writes its rows. It ends with its parent, or after the time limit of a row."""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib.util
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Machine, Row, Status, append_row, read_rows
from benchmarks.gpu.stages import STAGES, Measurement
from benchmarks.processes import ROOT

TIME_IS_UP, MORE_LEFT = 4, 5
"""Exit codes: no time for another row; the remaining rows need another process."""
_IDLE_LIMIT_SECONDS = 300.0  # of all but rows: imports, the collection of tests
# Budgets first, which every max batch depends on; then what takes seconds; searches, which take minutes, at the end.
_TEST_ORDER = ("training/devices", "training/amp", "integrations/", "training", "experiments", "integration/", "")
_CUDA_ERRORS = ("CUDA error", "cuDNN error", "CUBLAS_STATUS", "CUDNN_STATUS", "device-side assert")


class Recorder:
    """Writes the rows of this process. No row starts after `until`, a time of `time.time()`."""

    def __init__(self, file: Path, machine: Machine, until: float) -> None:
        self._file, self._machine, self._until = file, machine, until
        self._stderr = os.fdopen(os.dup(2), "w")  # pytest captures sys.stderr
        rows, run = read_rows(file, machine.provenance), machine.provenance["run"]
        self.done = {row.key for row in rows if row.status is not Status.FAILED or row.provenance["run"] == run}
        faulthandler.dump_traceback_later(_IDLE_LIMIT_SECONDS, exit=True, file=self._stderr)

    def start(self, key: str, limit_seconds: float) -> None:
        """Start a row. It stays failed if this process does not finish it within its limit."""
        if time.time() > self._until:
            os._exit(TIME_IS_UP)
        reason = f"its process died, or took more than {limit_seconds:g} s"
        self._append(Row(key=key, status=Status.FAILED, reason=reason), limit_seconds)

    def finish(self, row: Row) -> None:
        self._append(dataclasses.replace(row, reason=" ".join(row.reason.split())[:1000]), _IDLE_LIMIT_SECONDS)
        print(f"{row.key}  {row.status} ({row.seconds:.1f} s) {row.reason[:160]}", file=self._stderr, flush=True)

    def _append(self, row: Row, limit_seconds: float) -> None:
        append_row(self._file, dataclasses.replace(row, provenance=self._machine.provenance))
        faulthandler.dump_traceback_later(limit_seconds, exit=True, file=self._stderr)  # even if C code holds the GIL


def _missing(needs: Sequence[str]) -> str:
    missing = (name for name in needs if not (importlib.util.find_spec(name) or shutil.which(name)))
    return next((f"{name} is not installed" for name in missing), "")


def measure(measurements: list[Measurement], machine: Machine, recorder: Recorder) -> bool:
    """Measure the rows that share a process with the first missing one. Return whether others remain."""
    possible = []
    for one in (one for one in measurements if one.key not in recorder.done):
        if reason := machine.unsupported.get(one.precision):
            recorder.finish(Row(key=one.key, status=Status.UNSUPPORTED, reason=reason))
        elif reason := _missing(one.needs):
            recorder.finish(Row(key=one.key, status=Status.MISSING, reason=reason))
        else:
            possible.append(one)
    together = [one for one in possible if one.process == possible[0].process]
    for one in together:
        recorder.start(one.key, one.limit_seconds)
        started = time.perf_counter()
        try:
            row = Row(key=one.key, status=Status.MEASURED, values=one.run(), n=one.n)
        except Exception as error:
            values = {"traceback": traceback.format_exc()[-3000:]}
            row = Row(key=one.key, status=Status.FAILED, values=values, reason=f"{type(error).__name__}: {error}")
        recorder.finish(dataclasses.replace(row, seconds=time.perf_counter() - started))
    return len(possible) > len(together)


def run_tests(recorder: Recorder) -> bool:
    """Run the tests that need a GPU, the most informative first. Return whether some remain."""
    if missing := _missing(["pytest", "mlflow", "optuna"]):
        recorder.finish(Row(key="tests", status=Status.MISSING, reason=missing))
        return False
    import pytest

    files = [file.as_posix() for file in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in file.read_text()]
    files.sort(key=lambda file: (next(i for i, part in enumerate(_TEST_ORDER) if f"tests/{part}" in file), file))
    code = pytest.main(
        ["-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib --strict-markers", "-q",
         "--continue-on-collection-errors", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), *files],
        plugins=[_RowsPlugin(recorder)],
    )  # fmt: skip
    return code == pytest.ExitCode.INTERNAL_ERROR


class _RowsPlugin:
    """Writes a row for each test as soon as it ends."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._row = Row(key="", status=Status.FAILED)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            text = str(report.longrepr)
            status = Status.MISSING if "ModuleNotFoundError" in text else Status.FAILED
            self._recorder.finish(Row(key=report.nodeid, status=status, reason=text[-1000:]))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._recorder.done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._recorder.start(nodeid, 180.0)
        self._row = Row(key=nodeid, status=Status.MEASURED, values={"outcome": "passed"})

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called after set-up, call and tear-down of a test: the first that does not pass decides."""
        changes: dict[str, Any] = {"seconds": self._row.seconds + report.duration}
        if self._row.status is Status.MEASURED and report.skipped:
            changes |= {"status": Status.UNSUPPORTED, "reason": report.longrepr[2], "values": {}}
        elif self._row.status is Status.MEASURED and report.failed:
            text = str(report.longrepr)
            reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", text)
            changes |= {"status": Status.FAILED, "reason": reason, "values": {"traceback": text[-3000:]}}
        self._row = dataclasses.replace(self._row, **changes)

    def pytest_runtest_logfinish(self) -> None:
        self._recorder.finish(self._row)
        if self._row.status is Status.FAILED and any(text in str(self._row.values) for text in _CUDA_ERRORS):
            os._exit(MORE_LEFT)  # the error stays with this process, and would fail all other tests


def _end_with_programme(stdin: int) -> None:
    """Wait until stdin is closed, which happens even if the parent is killed, and kill the process group."""
    while os.read(stdin, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    threading.Thread(target=_end_with_programme, args=(os.dup(0),), daemon=True).start()
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    stage, file, until, values = json.loads(sys.argv[1])
    machine = Machine(**values)
    if machine.kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    recorder = Recorder(Path(file), machine, until)
    is_left = run_tests(recorder) if stage == "tests" else measure(STAGES[stage](machine), machine, recorder)
    os._exit(MORE_LEFT if is_left else 0)  # skips the teardown of torch and of the fork server


if __name__ == "__main__":
    main()
