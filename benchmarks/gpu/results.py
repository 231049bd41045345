"""The measured machine, and the rows of a stage: JSON lines, written as soon as they are measured."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from amp_track.config.job import Job
from amp_track.runner.runner import JobRunner
from benchmarks.processes import ROOT
from benchmarks.provenance import provenance, versions


@dataclass(frozen=True)
class Machine:
    """The device as named by the user, its kind and model, unsupported precisions with reasons, and the provenance."""

    device: str
    kind: str
    name: str
    unsupported: Mapping[str, str]
    provenance: Mapping[str, Any]
    smoke: bool


def describe(device: str, *, smoke: bool) -> Machine:
    """Inspect a device in a job process: this one must not start CUDA. Raises BadInput or TargetFailed."""
    workload = "benchmarks.models:Mlp"
    job = Job(workload=workload, device=device, precision="fp32", synthetic=True, job_timeout_seconds=300.0)
    found = JobRunner(workload).inspect(job)
    files = sorted(file for folder in ("amp_track", "tests") for file in (ROOT / folder).rglob("*.py"))
    source = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    measured_on = provenance(found)
    measured_on["versions"] |= versions("optuna", "lightning", "accelerate", "pytest")
    measured_on["platform"] = measured_on["versions"].pop("platform")  # a row of another kernel still counts
    # A bare tree has no commit.
    measured_on |= {"source": source.hexdigest()[:8], "run": datetime.datetime.now().isoformat(), "smoke": smoke}
    unsupported = {name: support.reason for name, support in found.precisions if not support.supported}
    return Machine(device, found.hardware.kind, found.hardware.name, unsupported, measured_on, smoke)


class Status(StrEnum):
    """How a measurement ended. The next run repeats those that failed."""

    MEASURED = "measured"
    UNSUPPORTED = "not supported by this device"
    MISSING = "not installed"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement: medians of `n` repeats, or the reason why there are none."""

    key: str
    status: Status
    values: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    n: int = 1
    seconds: float = 0.0
    provenance: Mapping[str, Any] = field(default_factory=dict)


def read_rows(file: Path, current: Mapping[str, Any] | None = None) -> list[Row]:
    """Return the latest row of each key, oldest first; given a provenance, those of its device, driver and versions."""
    # Changed code repeats the tests. A benchmark is repeated when its file is deleted.
    same = ("device", "driver", "versions", "smoke", *(["source"] if file.stem == "tests" else []))
    found: dict[str, Row] = {}
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        try:
            values = json.loads(line)
            row = Row(**{**values, "status": Status(values["status"])})
        except (ValueError, TypeError, KeyError):
            continue  # a line that was only partly written
        found.pop(row.key, None)
        if current is None or all(row.provenance.get(name) == current.get(name) for name in same):
            found[row.key] = row
    return list(found.values())


def append_row(file: Path, row: Row) -> None:
    """Write a row without local folders, and flush it to the disk."""
    line = json.dumps(dataclasses.asdict(row), ensure_ascii=False)
    for folder in (ROOT, sys.prefix, sys.base_prefix):
        line = line.replace(f"{folder}{os.sep}", "")
    with file.open("a+b") as opened:
        opened.seek(max(file.stat().st_size - 1, 0))
        opened.write(b"\n" * (opened.read() not in (b"", b"\n")) + line.encode() + b"\n")
        opened.flush()
        os.fsync(opened.fileno())
