"""The file of results: each row is stored immediately, so that a run can be continued; and its summary."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.faults.case import Fault
from benchmarks.processes import ROOT
from benchmarks.provenance import RESULTS, sentence

FILE = RESULTS / "faults.json"
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
        self.provenance = provenance
        self.rows: dict[str, dict[str, Any]] = {}
        if file.exists():
            known = json.loads(file.read_text())
            if all(known.get(name) == provenance[name] for name in _MUST_BE_THE_SAME):
                self.rows = {row["key"]: row for row in known["rows"]}

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Add a row and rewrite the file atomically."""
        self.rows[key] = {"key": key, **row}
        lines = ",\n".join(f"    {json.dumps(self.rows[name], ensure_ascii=False)}" for name in sorted(self.rows))
        head = json.dumps(self.provenance, indent=2, ensure_ascii=False).removesuffix("\n}")
        new = self._file.with_suffix(".new")
        new.write_text(f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n')
        os.replace(new, self._file)


_COUNTED = ("lost", "twice", "running", "processes", "files", "differs", "ends_badly")
_TIMES = ("end", "recovery", "undisturbed")


def table(faults: Sequence[Fault], result: dict[str, Any]) -> str:
    """Return the effect of each fault, how its tries went, and the seconds to end and to recover.

    Tries that came after the end of the command do not count.
    """
    rows = []
    for fault in faults:
        tries = [row for row in result["rows"] if row["fault"] == fault.name and row["has_struck"]]
        cells = [""] * 5
        if tries:
            wrong = sum(row[name] for row in tries for name in _COUNTED)
            end, recovery, undisturbed = ([row[f"{name}_seconds"] for row in tries] for name in _TIMES)
            worst = [f"{statistics.median(each):.1f}, {max(each):.1f}" for each in (end, recovery)]
            cells = [str(len(tries)), str(wrong), *worst, f"{statistics.median(undisturbed):.1f}"]
        rows.append([fault.name, fault.sentence, *cells])
    seconds = ["seconds to end: median, worst", "to recover: median, worst", "undisturbed"]
    shown = markdown.table(["fault", "what happens", "times", "went wrong", *seconds], rows)
    return f"{shown}\n\n*{sentence(result, 'torch', 'mlflow', 'optuna')}*"
