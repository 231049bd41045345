"""Find, identify and import the source files of a target. Imports no torch: some files must run before it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

_SUFFIXES = importlib.machinery.all_suffixes()
"""The suffixes of importable files: .py, .so, …"""
_ahead: dict[str, ModuleType | BaseException] = {}
"""What `import_ahead` has imported or caught, until `import_workload` asks for it."""


def import_ahead(reference: str) -> None:
    """Import a workload now; `import_workload` returns that module once, or raises that exception."""
    try:
        _ahead[reference] = import_workload(reference)
    except BaseException as error:  # SystemExit too
        _ahead[reference] = error


def import_workload(reference: str) -> ModuleType:
    """Return the module of `train.py` or `package.module:Class`. Raises whatever its code raises."""
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
    sys.path.insert(0, str(path.parent.resolve()))  # as `python path` does: helpers beside the file can be imported
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def workload_files(reference: str) -> list[Path]:
    """Return all files that a workload reference may name, with symbolic links resolved.

    A path names one file. `package.module:Class` may name several files, in the working folder and on `sys.path`: how
    the command was started decides which one its jobs import.
    """
    module, colon, _ = reference.partition(":")
    if not colon:
        return [Path(reference).resolve()]
    parts = module.split(".")
    names = [f"{stem}{suffix}" for stem in (parts[-1], f"{parts[-1]}/__init__") for suffix in _SUFFIXES]
    folders = [Path(folder).joinpath(*parts[:-1]) for folder in ("", *sys.path)]
    return list({file.resolve() for folder in folders for name in names if (file := folder / name).is_file()})


def digest(file: Path, imports: Iterable[str] = ()) -> str | None:
    """Return the first 12 hexadecimal digits of the SHA-256 of source files; None if one is not a source file.

    Args:
        file: the file of the workload.
        imports: the other files, relative to its folder.
    """
    try:  # a name comes from a store and may be any text
        files = sorted({file.resolve(), *((file.parent / name).resolve() for name in imports)})
        if not all(each.is_file() for each in files) or not all(name.endswith(tuple(_SUFFIXES)) for name in imports):
            return None
        return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:12]
    except (OSError, ValueError):
        return None
