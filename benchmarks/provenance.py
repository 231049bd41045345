"""The files of results, and the provenance of each: every number names its device, versions and date."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_track.config.inspection import Inspection

RESULTS = Path(__file__).parent / "results"


def write(name: str, result: dict[str, Any]) -> None:
    """Write benchmarks/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def read(name: str) -> dict[str, Any]:
    """Return the content of benchmarks/results/<name>.json."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def provenance(found: Inspection) -> dict[str, Any]:
    """Return the date, the device with its driver, the number of cores, and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": found.hardware.title,
        "driver": found.hardware.driver or None,
        "cores": os.cpu_count(),
        "versions": dict(found.versions) | versions("torchvision", "mlflow"),
    }


def of_device(workload: str, **settings: Any) -> dict[str, Any]:
    """Return the provenance of measurements on the device of a job of a workload."""
    from amp_track.config.job import Job  # here, because the bare script of startup imports this module
    from amp_track.runner.runner import JobRunner

    return provenance(JobRunner(workload).inspect(Job(workload=workload, **settings)))


def versions(*names: str) -> dict[str, str | None]:
    """Return the versions of packages; None for a package that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def sentence(result: dict[str, Any], *packages: str) -> str:
    """Format a provenance with some versions, or all: `AMD EPYC, 2 cores, torch 2.15.0, 2026-11-21`."""
    driver = [f"driver {result['driver']}"] if result.get("driver") else []
    cores = [f"{result['cores']} cores"] if "cores" in result else []
    named = [f"{name} {result['versions'][name]}" for name in packages or result["versions"]]
    return ", ".join([result["device"], *driver, *cores, *named, result["date"]])


def caption(result: dict[str, Any], *packages: str) -> str:
    """Format the line below a table: its provenance, and the number of repeats."""
    repeats = f"n={result['n']}" + (", medians" if result["n"] > 1 else "")
    return f"\n\n*{sentence(result, *packages)}, {repeats}*"
