"""Print the result of a command: one JSON object, or tables, notes, links and the recommendation."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amp_track.config import torchrun
from amp_track.config.options import Request
from amp_track.records import masking
from amp_track.records.errors import NothingFits, PlanMoved
from amp_track.stores import addresses

_MOST_NOTES = 5
"""Notes of a study on the terminal; the page has all."""


def print_or_return(command: Callable[[Request], Any], request: Request, as_json: bool) -> Any:
    """Return the command's result, or print it with `--json` and return None. Some errors have a result to print too.

    With `--json`, output of libraries goes to stderr: MLflow prints the name of every run that ends on a server.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            result = _result(command, request)
    except (NothingFits, PlanMoved) as error:
        if as_json and error.result is not None:
            print(json.dumps(_finite(error.result), allow_nan=False))
        raise
    if not as_json or result is None:
        return result
    print(json.dumps(_finite(result.as_json() | _links(result, request)), allow_nan=False))
    return None


def _links(result: Any, request: Request) -> dict[str, Any]:
    """Return the pages of a study in MLflow's UI, by title; nothing for other results."""
    from amp_track.report import links, summary

    return {"links": links.pages(result, request.stores.mlflow.ui)} if isinstance(result, summary.Result) else {}


def _result(command: Callable[[Request], Any], request: Request) -> Any:
    """Return the command's result; None on the ranks of torchrun that only run jobs of rank 0."""
    launch = torchrun.launch()
    if launch is None:
        return command(request)
    from amp_track.runner import distributed  # imported late, for a fast `--help`

    if not launch.is_first:
        distributed.follow(launch, request.job.workload)
        return None
    result = command(request)
    distributed.dismiss()
    return result


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_notes(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"· {line}")


def print_study(result: Any, request: Request) -> None:
    """Print the tables of a study, the first notes, where the rest is, and last the recommendation.

    Print nothing if `--json` has printed the result.
    """
    if result is None:
        return
    from amp_track.report import summary
    from amp_track.report.table import print_table
    from amp_track.report.wording import counted

    stores, said, study = request.stores, summary.answer(result), result.study
    tracking_uri = [f"--tracking-uri {shlex.quote(masking.masked(stores.tracking_uri))}"] if stores.tracking_uri else []
    storage = [f"--storage {shlex.quote(masking.masked(stores.storage))}"]
    if stores.storage in (addresses.DEFAULT_STORAGE, os.environ.get(addresses.STORAGE_VARIABLE)):
        storage = []
    for table in summary.tables(result):
        print_table(table)
    print_notes(said.caveats[:_MOST_NOTES])
    page = os.path.relpath(result.report) if Path(result.report).is_relative_to(Path.cwd()) else result.report
    if (more := len(said.caveats) - _MOST_NOTES) > 0:
        print(f"… and {counted(more, 'more note')} in the report")
    print(f"Report of study {study}: {page}")
    print("Open it with:")
    print(f"  {' '.join([_program('amp-track'), 'ui', shlex.quote(study), *storage, *tracking_uri])}")
    print()
    for line in (said.headline, *said.more):
        print(line)
    if said.command is not None:
        experiment = [f"--experiment {shlex.quote(stores.experiment)}"] if stores.experiment is not None else []
        command = said.command.removeprefix("amp-track ")
        print(f"{said.to_train}:")
        if command == said.command:  # of the user's own function or script
            print(f"  {command}")
        else:
            print(f"  {' '.join([torchrun.program(), command, *experiment, *tracking_uri])}")
    if said.in_tools:
        print(f"{summary.IN_TOOLS}:")
    for line in said.in_tools:
        print(f"  {line}")


def mlflow_ui(request: Request) -> str:
    store = request.stores.mlflow
    if store.kind == "http":
        return str(store)
    program = f"{_program('mlflow')} ui --backend-store-uri {shlex.quote(str(store))}"
    return f"{program} --host {addresses.UI_HOST} --port {addresses.UI_PORT}"


def _program(name: str) -> str:
    """Return the command that starts a program of this environment from the current folder."""
    beside = Path(sys.executable).parent / name
    if shutil.which(name) == str(beside):
        return name
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)
