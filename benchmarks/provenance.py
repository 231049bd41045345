"""Where and when a result was measured: what every number must carry."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
from typing import Any

from amp_track.config.inspection import Inspection


def provenance(found: Inspection) -> dict[str, Any]:
    """Date, device, its driver, cores, and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": found.hardware.title,
        "driver": found.hardware.driver or None,
        "cores": os.cpu_count(),
        "versions": dict(found.versions) | versions("torchvision", "mlflow"),
    }


def versions(*names: str) -> dict[str, str | None]:
    """Return the versions of installed packages; None for what is not installed, which must not cost the results."""
    found: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def sentence(result: dict[str, Any]) -> str:
    """The same for people: `AMD EPYC, 2 cores, torch 2.15.0, 2026-11-21`."""
    driver = [f"driver {result['driver']}"] if result["driver"] else []
    versions = result["versions"]
    parts = [result["device"], *driver, f"{result['cores']} cores", f"torch {versions['torch']}"]
    return ", ".join([*parts, f"torchvision {versions['torchvision']}", result["date"]])
