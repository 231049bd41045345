"""The process of a part: it gets a request on stdin, measures row after row, and prints each as a line.

It leads a process group of its own, and ends with all of it when the programme that started it ends, however that dies.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu.parts import ROOT, Request
from benchmarks.gpu.rows import Row, Status

_LONGEST_REASON = 1000
_LONGEST_TRACEBACK = 3000


class PipeReporter:
    """Prints what happens as JSON lines: `{"started": key}` and `{"row": …}`."""

    def __init__(self, pipe: TextIO) -> None:
        self._pipe = pipe

    def started(self, key: str) -> None:
        self._print({"started": key})

    def row(self, key: str, measure: Callable[[], Mapping[str, Any]], *, n: int = 1) -> None:
        self.started(key)
        began = time.perf_counter()
        values: Mapping[str, Any] = {}
        status, reason = Status.MEASURED, ""
        try:
            values = measure()
        except Exception as error:
            status, reason = status_of(error), one_line(f"{type(error).__name__}: {error}")
            values = {"traceback": tail(traceback.format_exc())}
        self.send(Row(key=key, status=status, values=values, reason=reason, n=n, seconds=time.perf_counter() - began))

    def send(self, row: Row) -> None:
        self._print({"row": json.loads(row.as_line())})

    def _print(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._pipe, flush=True)


def status_of(error: BaseException) -> Status:
    """A package that is not there is no failure of this one; a module of this project that is not there is."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] not in ("", *_own_modules()):
        return Status.MISSING
    return Status.FAILED


def _own_modules() -> set[str]:
    return {path.stem for path in [*ROOT.iterdir(), *(ROOT / "experiments").iterdir()]}


def one_line(text: str) -> str:
    """Return the text in one line of a readable length, without the folder that the project happens to lie in."""
    line = " ".join(_without_folders(text).split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]} …"


def tail(text: str) -> str:
    """Return the end of a traceback."""
    return _without_folders(text)[-_LONGEST_TRACEBACK:]


def _without_folders(text: str) -> str:
    for folder in (ROOT, sys.prefix, sys.base_prefix):
        text = text.replace(f"{folder}{os.sep}", "")
    return text


def _end_with_the_programme(told: int) -> None:
    """Wait until the pipe is closed, which happens however the programme ends, and kill the group."""
    while os.read(told, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _read_request(told: int) -> Request:
    line = b""
    while not line.endswith(b"\n"):
        read = os.read(told, 1)  # no buffer of Python's: a loader's process, forked while its lock is held, would hang
        if not read:
            raise SystemExit("the programme ended before it asked for a row")
        line += read
    found = json.loads(line)
    return Request(**{**found, "keys": tuple(found["keys"])})


def main() -> None:
    told = os.dup(0)
    request = _read_request(told)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    if os.getpgrp() == os.getpid():
        threading.Thread(target=_end_with_the_programme, args=(told,), daemon=True).start()
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no row
    if request.kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    assert Path.cwd() != ROOT, "a part leaves files in its folder, and so has one of its own"
    importlib.import_module(request.module).measure(request, PipeReporter(pipe))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no time for taking torch apart, and no fork server that outlives the part


if __name__ == "__main__":
    main()
