"""The options of a workload to which `--vary` gives several values."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from amp_track.config.options import Request
from amp_track.records.errors import BadInput, BadOption


def check(request: Request, names: Collection[str]) -> None:
    """Raise BadInput if an option that `--vary` gives values is given one by `--set` too."""
    for name in names:
        if name in dict(request.job.options):
            raise BadInput(f"--vary: got {name}, which --set gives a value too, expected one of the two; leave out one")


@contextmanager
def named(names: Collection[str]) -> Iterator[None]:
    """Name the flag that gave a value which the workload does not take: --vary, not --set."""
    try:
        yield
    except BadOption as error:
        if error.option not in names:
            raise
        raise BadOption(error.option, error.problem, "--vary") from None
