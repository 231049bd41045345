"""The file of a stage's rows: one JSON object a line, on the disk as soon as it is measured.

A row is one measurement. Whoever kills the programme loses the row in flight and no other: a torn last line is dropped,
and its row is measured again.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Status(StrEnum):
    """How a row ended."""

    MEASURED = "measured"
    IMPOSSIBLE = "not possible on this device"
    MISSING = "not installed"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """False for what the next run tries again."""
        return self is not Status.FAILED


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement with its key, and where and when it was made."""

    key: str
    status: Status
    values: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    """Why it was not measured: an error, a missing package, what the device lacks."""
    n: int = 1
    """How many measurements its values are the medians of."""
    seconds: float = 0.0
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Date, device, driver, cores, versions, `tiny`: what every number must carry."""

    def as_line(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False) + "\n"

    @staticmethod
    def from_line(line: str) -> Row:
        """Raises ValueError, TypeError or KeyError for what is no row."""
        found = json.loads(line)
        return Row(**{**found, "status": Status(found["status"])})

    def is_done(self, provenance: Mapping[str, Any]) -> bool:
        """True if nothing is to be measured again: it ended well on the same device, with the same versions."""
        return self.status.is_final and self.is_of(provenance)

    def is_of(self, provenance: Mapping[str, Any]) -> bool:
        """True if it was made on the same device with the same driver and versions."""
        return _same(self.provenance) == _same(provenance)


def _same(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be the same for a row to count; the day, the code and the kernel of the machine need not be."""
    return {name: provenance.get(name) for name in ("device", "driver", "versions", "tiny")}


class RowFile:
    """The rows of one stage on one device."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Row]:
        """Return the rows by key, the latest of each, in the order they were written. Other lines are left out."""
        found: dict[str, Row] = {}
        for line in self._whole_lines():
            try:
                row = Row.from_line(line)
            except (ValueError, TypeError, KeyError):
                continue
            found.pop(row.key, None)
            found[row.key] = row
        return found

    def append(self, row: Row) -> None:
        """Write a row, and return when it is on the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            _drop_torn_line(file)
            file.write(row.as_line().encode())
            file.flush()
            os.fsync(file.fileno())

    def _whole_lines(self) -> list[str]:
        if not self.path.exists():
            return []
        whole, _, _ = self.path.read_bytes().rpartition(b"\n")
        return whole.decode(errors="replace").splitlines()


def _drop_torn_line(file: Any) -> None:
    """Cut off what follows the last end of a line: a row that was half written when its process was killed."""
    file.seek(0)
    whole, newline, _ = file.read().rpartition(b"\n")
    file.truncate(len(whole) + len(newline))
    file.seek(0, os.SEEK_END)
