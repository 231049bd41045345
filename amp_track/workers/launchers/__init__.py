"""Launchers of search workers. Each is a module with the name of the launcher: the class `Launcher` is its launcher."""

from __future__ import annotations

import importlib
from typing import cast

from amp_track.workers.launchers.base import Launcher


def named(name: str) -> type[Launcher]:
    """Return the class of a launcher in `amp_track.config.values.LAUNCHERS`."""
    return cast("type[Launcher]", importlib.import_module(f"{__name__}.{name}").Launcher)
