"""The file of results: each row is stored immediately, so that a run can be continued; and its summary."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.case import Fault
from benchmarks.processes import ROOT

FILE = ROOT / "benchmarks" / "results" / "faults.json"
_MUST_BE_THE_SAME = ("device", "driver", "versions", "code")
"""Rows that differ in one of these are measured again."""


def code_digest() -> str:
    """Return a digest of the package and of these faults: rows of other code are not valid for this one."""
    folders = [ROOT / "amp_track", ROOT / "benchmarks" / "faults"]
    files = sorted(file for folder in folders for kind in ("*.py", "*.c") for file in folder.rglob(kind))
    files += [ROOT / "benchmarks" / name for name in ("processes.py", "servers.py")]
    content = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(content).hexdigest()[:16]


class Results:
    """The rows in a file, by fault and number of the try.

    Args:
        file: where they are kept.
        provenance: device, versions, date and code of the rows that are added.
    """

    def __init__(self, file: Path, provenance: dict[str, Any]) -> None:
        self._file = file
        self._provenance = provenance
        self.rows: dict[str, dict[str, Any]] = {}
        if file.exists():
            known = json.loads(file.read_text())
            if all(known.get(name) == provenance[name] for name in _MUST_BE_THE_SAME):
                self.rows = {row["key"]: row for row in known["rows"]}

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Add a row and rewrite the file atomically."""
        self.rows[key] = {"key": key, **row}
        lines = ",\n".join(f"    {json.dumps(self.rows[name], ensure_ascii=False)}" for name in sorted(self.rows))
        head = json.dumps(self._provenance, indent=2, ensure_ascii=False).removesuffix("\n}")
        new = self._file.with_suffix(".new")
        new.write_text(f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n')
        os.replace(new, self._file)


HEADINGS = (
    "fault", "times", "lost", "counted twice", "left RUNNING", "processes left", "files left", "other answer",
    "bad end", "seconds to end: median", "worst", "seconds to recover: median", "worst", "seconds undisturbed",
)  # fmt: skip


_COUNTED = ("lost", "twice", "running", "processes", "files", "differs", "ends_badly")


def summary(faults: Sequence[Fault], rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return one table row per fault. Tries that came after the end of the command do not count."""
    lines = []
    for fault in faults:
        of_fault = [row for row in rows if row["fault"] == fault.name and row["has_struck"]]
        if not of_fault:
            continue
        sums = [sum(row[name] for row in of_fault) for name in _COUNTED]
        times = []
        for name in ("end_seconds", "recovery_seconds"):
            seconds = [row[name] for row in of_fault]
            times += [f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"]
        times.append(f"{statistics.median(row['undisturbed_seconds'] for row in of_fault):.1f}")
        lines.append([fault.name, *map(str, (len(of_fault), *sums)), *times])
    return lines
