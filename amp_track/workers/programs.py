"""Start fresh processes: the command line that calls a function of this package, and its environment."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path


def command(module: str, call: str) -> list[str]:
    """Return the command line of a process that makes one call, such as `main(5000)`, of a function of a module.

    It finds the package even if it is not installed. Modules of the working folder do not shadow others (`-P`).
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
    """Set environment variables within the block, for programs that it starts."""
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
