"""A stage of `benchmarks.gpu` whose rows end in every way a row can end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from benchmarks.gpu.parts import Machine, Part, Planned, Reporter, Request
from benchmarks.gpu.rows import Row

KEYS = ("good", "raises", "dies", "needs a package", "hangs", "last")


def parts(machine: Machine, kept: Mapping[str, Row]) -> list[Part]:
    rows = [Planned(key=key, limit_seconds=1.0 if key == "hangs" else 60.0) for key in KEYS]
    elsewhere = [
        Planned(key="tf32", impossible=machine.precisions["tf32"]),
        Planned(key="a peer", missing=machine.lacks("lightning")),
    ]
    return [Part(name="rows", rows=rows), Part(name="without a process", rows=elsewhere)]


def measure(request: Request, report: Reporter) -> None:
    for key in request.keys:
        report.row(key, lambda key=key: _values(key))


def _values(key: str) -> dict[str, object]:
    print("what libraries print is no row")
    if key == "raises":
        raise ValueError("what it met\nin two lines")
    if key == "dies":
        os._exit(7)
    if key == "needs a package":
        import no_such_package  # type: ignore[import-not-found] # noqa: F401
    if key == "hangs":
        time.sleep(60)
    return {"pid": os.getpid()}
