"""The files of a workload's source code and their digest. Imports none of them."""

from __future__ import annotations

import hashlib
import importlib.machinery
import sys
from collections.abc import Iterable
from pathlib import Path

_SUFFIXES = importlib.machinery.all_suffixes()
"""The endings of the files that Python imports: .py, .so, …"""


def workload_files(reference: str) -> list[Path]:
    """Return every file that a workload reference may mean, with symbolic links resolved.

    For a path, that is one file. For `package.module:Class`, it is each file of that name in the working folder and on
    Python's path: the way in which a command was started decides which of them its jobs import.
    """
    module, colon, _ = reference.partition(":")
    if not colon:
        return [Path(reference).resolve()]
    parts = module.split(".")
    names = [f"{stem}{suffix}" for stem in (parts[-1], f"{parts[-1]}/__init__") for suffix in _SUFFIXES]
    folders = [Path(folder).joinpath(*parts[:-1]) for folder in ("", *sys.path)]
    return list({file.resolve() for folder in folders for name in names if (file := folder / name).is_file()})


def digest(file: Path, imports: Iterable[str] = ()) -> str | None:
    """Return twelve hexadecimal digits of the SHA-256 over source files; None if one of them is none.

    Args:
        file: the workload's file.
        imports: the other files, relative to its folder.
    """
    try:  # a name may be any text that somebody has written to a store
        files = sorted({file.resolve(), *((file.parent / name).resolve() for name in imports)})
        if not all(each.is_file() for each in files) or not all(name.endswith(tuple(_SUFFIXES)) for name in imports):
            return None
        return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:12]
    except (OSError, ValueError):
        return None
