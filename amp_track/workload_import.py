"""Import the file or module of a workload. Imports no torch itself: some workloads must run before torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_ahead: dict[str, ModuleType | BaseException] = {}
"""Modules or exceptions from `import_ahead`, until `import_workload` takes them."""


def import_ahead(reference: str) -> None:
    """Import a workload now; the next `import_workload` returns its module or raises its exception."""
    try:
        _ahead[reference] = import_workload(reference)
    except BaseException as error:  # SystemExit too
        _ahead[reference] = error


def import_workload(reference: str) -> ModuleType:
    """Import the module of a reference such as `train.py` or `package.module:Class`. Its exceptions pass through."""
    match _ahead.pop(reference, None):
        case ModuleType() as module:
            return module
        case BaseException() as error:
            raise error
    module_name, colon, _ = reference.partition(":")
    return _import_module(module_name) if colon else _import_file(Path(reference))


def _import_file(path: Path) -> ModuleType:
    name = f"amp_track_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    sys.path.insert(0, str(path.parent.resolve()))  # as `python path` does, so that the file can import its neighbors
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)
