"""Fresh processes: the command that runs a function of this package, and the environment it starts in."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path


def command(module: str, call: str) -> list[str]:
    """Return the command of a process that makes one call, such as `main(5000)`, of a function of a module.

    The package is found even where it is not installed. What the working folder holds is not imported in the place of
    another module (`-P`).
    """
    package = str(Path(__file__).parents[2])
    name = call.partition("(")[0]
    return [
        sys.executable,
        "-P",
        "-c",
        f"import sys; sys.path.append({package!r}); from {module} import {name}; {call}",
    ]


@contextlib.contextmanager
def variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a program that is started within the block."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
