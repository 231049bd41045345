"""The provenance of a result: every number names its device, versions and date."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
from typing import Any

from amp_track.config.inspection import Inspection


def provenance(found: Inspection) -> dict[str, Any]:
    """Return the date, the device with its driver, the number of cores, and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": found.hardware.title,
        "driver": found.hardware.driver or None,
        "cores": os.cpu_count(),
        "versions": dict(found.versions) | versions("torchvision", "mlflow"),
    }


def versions(*names: str) -> dict[str, str | None]:
    """Return the versions of packages; None for a package that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def sentence(result: dict[str, Any]) -> str:
    """Format a provenance: `AMD EPYC, 2 cores, torch 2.15.0, 2026-11-21`."""
    driver = [f"driver {result['driver']}"] if result["driver"] else []
    versions = result["versions"]
    parts = [result["device"], *driver, f"{result['cores']} cores", f"torch {versions['torch']}"]
    return ", ".join([*parts, f"torchvision {versions['torchvision']}", result["date"]])
