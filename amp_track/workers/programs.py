"""Commands of fresh Python processes that run a function of this package, with no module of the working folder."""

from __future__ import annotations

import sys
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
