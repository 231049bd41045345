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
from amp_track.records.errors import NothingFits
from amp_track.stores import addresses


def print_or_return(command: Callable[[Request], Any], request: Request, as_json: bool) -> Any:
    """Return the command's result, or print it with `--json` and return None. NothingFits has a result to print too.

    With `--json`, output of libraries goes to stderr: MLflow prints the name of every run that ends on a server.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            result = _result(command, request)
    except NothingFits as error:
        if as_json and error.result is not None:
            print(json.dumps(_finite(error.result), allow_nan=False))
        raise
    if not as_json or result is None:
        return result
    print(json.dumps(_finite(result.as_json()), allow_nan=False))
    return None


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
    """Print the tables of a study, caveats, links, and last the recommendation.

    Prints nothing if the result is None: `--json` has printed it.
    """
    if result is None:
        return
    from amp_track.report import links, summary
    from amp_track.report.table import print_table

    said = summary.answer(result)
    for table in summary.tables(result):
        print_table(table)
    print_notes(said.caveats)
    study = summary.name(result)
    print(f"Report of study {study}: {_from_here(result.report)}")
    _print_how_to_look(request, study, links.pages(result, ui_address(request)))
    print()
    for line in (said.headline, *said.more):
        print(line)
    if said.command is not None:
        experiment, uri = request.stores.experiment, request.stores.tracking_uri
        given = [f" --experiment {shlex.quote(experiment)}"] if experiment is not None else []
        given += [f" --tracking-uri {shlex.quote(masking.masked(uri))}"] if uri is not None else []
        print(f"{said.to_train}:")
        print(f"  {torchrun.program()} {said.command.removeprefix('amp-track ')}{''.join(given)}")


def _print_how_to_look(request: Request, study: str, pages: Sequence[str]) -> None:
    stores = [f"{name} {shlex.quote(masking.masked(url))}" for name, url in _given_stores(request).items()]
    print("Open it with:")
    print(f"  {' '.join([_program('amp-track'), 'ui', shlex.quote(study), *stores])}")
    print("or with:")
    print(f"  {mlflow_ui(request)}")
    for page in pages:
        print(f"    {page}")
    dashboard = _program("optuna-dashboard")
    print(f"  {dashboard} {shlex.quote(str(request.stores.optuna))} --host 127.0.0.1 --port 8080")


def _from_here(path: str) -> str:
    """Return a path relative to the current folder if it is inside."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path


def _given_stores(request: Request) -> dict[str, str]:
    """Return the store flags that another command needs: neither the default nor set in the environment."""
    storage, uri = request.stores.storage, request.stores.tracking_uri
    is_known = storage in (addresses.DEFAULT_STORAGE, os.environ.get(addresses.STORAGE_VARIABLE))
    given = {"--storage": storage if not is_known else None, "--tracking-uri": uri}
    return {name: url for name, url in given.items() if url is not None}


def ui_address(request: Request) -> str:
    return request.stores.mlflow.ui


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
