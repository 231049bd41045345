"""Print the result of a command: one JSON object, or tables, notes, links and the recommendation."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_track.config import torchrun
from amp_track.config.options import Request
from amp_track.records.errors import AmpTrackError
from amp_track.stores import addresses

if TYPE_CHECKING:
    from amp_track.report.table import Table

_MOST_NOTES = 5
"""Notes of a study on the terminal; the page has all."""


def run(
    command: Callable[[Request], Any], request: Request, as_json: bool, blocks: Callable[[Any], Iterable[str | Table]]
) -> None:
    """Run a command and print the lines and tables of its result, or its `--json`, which some errors have too.

    With `--json`, output of libraries goes to stderr: MLflow prints the name of every run that ends on a server.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            result = _result(command, request)
    except AmpTrackError as error:
        if as_json and error.result is not None:
            print(json.dumps(_finite(error.result), allow_nan=False))
        raise
    if result is None:
        return
    if as_json:
        print(json.dumps(_finite(result.as_json() | _links(result, request)), allow_nan=False))
        return
    from amp_track.report.table import print_table

    for block in blocks(result):
        print(block) if isinstance(block, str) else print_table(block)


def run_study(command: Callable[[Request], Any], request: Request, as_json: bool) -> None:
    """Run a command whose result is that of a study, and print it."""
    run(command, request, as_json, lambda result: _study_blocks(result, request))


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


def _study_blocks(result: Any, request: Request) -> Iterator[str | Table]:
    """Yield the tables of a study, the first notes, where the rest is, and last the recommendation."""
    from amp_track.report import summary
    from amp_track.report.wording import bullets, counted

    stores, said, study = request.stores, summary.answer(result), result.study
    yield from summary.tables(result)
    yield from bullets(said.caveats[:_MOST_NOTES])
    page = os.path.relpath(result.report) if Path(result.report).is_relative_to(Path.cwd()) else result.report
    if (more := len(said.caveats) - _MOST_NOTES) > 0:
        yield f"… and {counted(more, 'more note')} in the report"
    yield f"Report of study {study}: {page}"
    yield "Open it with:"
    yield f"  {stores.command(_program('amp-track'), 'ui', shlex.quote(study))}"
    yield ""
    command = said.command
    if command is not None and command.startswith("amp-track "):  # not of the user's own function or script
        experiment = [f"--experiment {shlex.quote(stores.experiment)}"] if stores.experiment is not None else []
        command = " ".join([torchrun.program(), command.removeprefix("amp-track "), *experiment, *stores.tracking_flag])
    yield from summary.answer_lines(said, command)


def mlflow_ui(request: Request) -> str:
    store = request.stores.mlflow
    if store.has_ui:
        return store.ui
    program = f"{_program('mlflow')} ui --backend-store-uri {shlex.quote(str(store))}"
    return f"{program} --host {addresses.UI_HOST} --port {addresses.UI_PORT}"


def _program(name: str) -> str:
    """Return the command that starts a program of this environment from the current folder."""
    beside = Path(sys.executable).parent / name
    if shutil.which(name) == str(beside):
        return name
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)
