"""One module per command: from a request to a result. They share `session`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from amp_track.config.options import Request
from amp_track.stores import errors
from amp_track.workers import interrupts

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def interrupted_safely(
    command: Callable[Concatenate[Request, Arguments], Result],
) -> Callable[Concatenate[Request, Arguments], Result]:
    """Make a command raise KeyboardInterrupt only while it waits, so that no run, trial or table is half written.

    It raises StoreFailed if a database or a disk fails.
    """

    @functools.wraps(command)
    def run(request: Request, /, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        with (
            interrupts.deferred(owns_process=request.owns_process),
            errors.in_one_line(request.stores.mlflow, request.stores.optuna),
        ):
            return command(request, *arguments, **keywords)

    return run
