"""The commands: parse, call, print. No logic, and no import of torch or mlflow."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from amp_track.commands import flags
from amp_track.commands.request import CompareOptions, Example, FitOptions, Request, Resumption, SearchOptions, Stores
from amp_track.records import addresses
from amp_track.records.errors import INTERRUPTED_EXIT_CODE, AmpTrackError, BadInput, NothingFits
from amp_track.records.job import DEFAULT_WORKLOAD, Job

app = typer.Typer(
    name="amp-track",
    help="Which precision and which batch size to train with: found out on your model and your device.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

Workload = Annotated[
    str,
    typer.Argument(metavar="[WORKLOAD]", help="A Python file with one Workload, or package.module:Class."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; everything else goes to stderr.")]

# A search chooses precision and batch size itself, and one timeout or seed holds for all of its jobs.
_JOB_FLAGS = flags.flags_of(Job, without=("precision", "batch_size", "checkpoint_every"))
_TRAIN_FLAGS = (
    flags.flags_of(Job)
    + flags.flags_of(Resumption)
    + flags.flags_of(FitOptions, without=("precisions",))
    + flags.flags_of(Stores)
)
_FIT_FLAGS = flags.flags_of(FitOptions) + _JOB_FLAGS + flags.flags_of(Stores)
_SEARCH_FLAGS = (
    flags.flags_of(FitOptions, without=("multiple_of", "effective_batch_size"))
    + flags.flags_of(SearchOptions)
    + _JOB_FLAGS
    + flags.flags_of(Stores)
)
_DTYPES_FLAGS = [
    flags.flag_named(flags.flags_of(Job), name)
    for name in ("--precision", "--device", "--channels-last", "--seed", "--synthetic", "--set")
] + flags.flags_of(Example)
_COMPARE_FLAGS = (
    flags.flags_of(CompareOptions)
    + [flag for flag in flags.flags_of(FitOptions) if flag.name == "--precision"]
    + flags.flags_of(SearchOptions, without=("trials", "learning_rates"))
    + flags.flags_of(Job, without=("precision", "checkpoint_every"))
    + flags.flags_of(Stores)
)
_SWITCHES = ["--json", *(flag.name for flag in _TRAIN_FLAGS if flag.is_switch)]


@app.command("train")
@flags.with_flags(_TRAIN_FLAGS)
def train_command(workload: Workload = DEFAULT_WORKLOAD, as_json: Json = False, **given: Any) -> None:
    """Train one job and track it in MLflow.

    amp-track train experiments/digits.py --precision bf16 --batch-size 64

    amp-track train experiments/digits.py --checkpoint-every 50; if it is killed: amp-track train --resume RUN_ID
    """
    batch_size = flags.flag_named(_TRAIN_FLAGS, "--batch-size")
    find_batch_size = given[batch_size.parameter] == "auto"
    if find_batch_size:
        given[batch_size.parameter] = None
    request = _request(_TRAIN_FLAGS, given, workload, find_batch_size=find_batch_size)
    from amp_track.commands import fit as commands
    from amp_track.report import train as train_report

    result = _print_or_return(commands.train, request, as_json)
    if result is None:
        return
    for block in train_report.blocks(result, see_with=_mlflow_ui(request)):
        if isinstance(block, str):
            print(block)
        else:
            _print_table(block)


@app.command("fit")
@flags.with_flags(_FIT_FLAGS)
def fit_command(workload: Workload = DEFAULT_WORKLOAD, as_json: Json = False, **given: Any) -> None:
    """Find the largest batch that fits, at every precision: exact, and confirmed by a longer training.

    amp-track fit experiments/digits.py --memory-budget 64MiB --headroom 5% --multiple-of 8
    """
    request = _request(_FIT_FLAGS, given, workload)
    from amp_track.commands import fit as commands
    from amp_track.report import fit as fit_report

    result = _print_or_return(commands.fit, request, as_json)
    if result is None:
        return
    _print_table(fit_report.fit_table(result))
    for line in fit_report.fit_notes(result):
        print(f"· {line}")
    _print_how_to_look(request, result.study)


@app.command("search")
@flags.with_flags(_SEARCH_FLAGS)
def search_command(workload: Workload = DEFAULT_WORKLOAD, as_json: Json = False, **given: Any) -> None:
    """Find the largest batches, then train inside them, and compare speed and quality.

    amp-track search experiments/digits.py --memory-budget 64MiB --trials 12 --seeds 5
    """
    request = _request(_SEARCH_FLAGS, given, workload)
    from amp_track.commands import fit as commands
    from amp_track.report import search as report

    result = _print_or_return(commands.search, request, as_json)
    if result is None:
        return
    for table in report.search_tables(result):
        _print_table(table)
    for line in report.notes(result):
        print(f"· {line}")
    _print_how_to_look(request, result.fit.study)


@app.command("dtypes")
@flags.with_flags(_DTYPES_FLAGS)
def dtypes_command(workload: Workload = DEFAULT_WORKLOAD, as_json: Json = False, **given: Any) -> None:
    """Show which operation of every layer runs in which dtype: one batch forward and backward. Writes nothing.

    amp-track dtypes experiments/digits.py --precision amp
    """
    example = flags.build(Example, _DTYPES_FLAGS, given)
    job = flags.build(Job, _DTYPES_FLAGS, given, workload=workload, batch_size=example.batch_size)
    from amp_track.commands import fit as commands
    from amp_track.report import dtypes as dtypes_table

    report = _print_or_return(commands.dtypes, Request(job=job), as_json)
    if report is None:
        return
    _print_table(dtypes_table.dtypes_table(report))
    print(dtypes_table.sentence(report))


@app.command("compare")
@flags.with_flags(_COMPARE_FLAGS)
def compare_command(workload: Workload = DEFAULT_WORKLOAD, as_json: Json = False, **given: Any) -> None:
    """Train the same job at every precision, all else equal: from where on does it pay?

    amp-track compare experiments/digits.py --precision fp32,bf16 --over width=8,16,32 --epochs 2

    amp-track compare experiments/digits.py --precision fp32,bf16 --over width=8,16,32,64 --epochs 2 --seeds 3 trains
    only what the study does not know yet.
    """
    if given[flags.flag_named(_COMPARE_FLAGS, "--batch-size").parameter] == "auto":
        raise BadInput(
            "--batch-size: got auto, expected a whole number of 1 or more: all of a comparison have the same; find "
            "one with amp-track fit"
        )
    request = _request(
        _COMPARE_FLAGS, given, workload, compare_options=flags.build(CompareOptions, _COMPARE_FLAGS, given)
    )
    from amp_track.commands import compare as comparing
    from amp_track.report import compare as compare_report

    result = _print_or_return(comparing.compare, request, as_json)
    if result is None:
        return
    for table in compare_report.tables(result):
        _print_table(table)
    for line in (*result.answers, *compare_report.notes(result)):
        print(f"· {line}")
    _print_how_to_look(request, result.study)


def _request(command_flags: list[flags.Flag], given: dict[str, Any], workload: str, **fixed: Any) -> Request:
    """What a command was asked for; the parts it has no flags for stay at their defaults."""
    return Request(
        job=flags.build(Job, command_flags, given, workload=workload),
        stores=flags.build(Stores, command_flags, given),
        fit_options=flags.build(FitOptions, command_flags, given),
        search_options=flags.build(SearchOptions, command_flags, given),
        resumption=flags.build(Resumption, command_flags, given),
        given=flags.given_fields(Job, command_flags, given),
        **fixed,
    )


def main() -> NoReturn:
    """The console script. Ends with the exit codes that `errors` lists."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        arguments = flags.normalized(sys.argv[1:], _SWITCHES)
        if app(args=arguments, prog_name="amp-track", standalone_mode=False) == INTERRUPTED_EXIT_CODE:
            raise KeyboardInterrupt  # typer has turned it into a return value
    except AmpTrackError as error:
        _leave(error.exit_code, str(error), getattr(error, "detail", ""))
    except KeyboardInterrupt:
        _leave(INTERRUPTED_EXIT_CODE, "interrupted")
    except _usage_error() as error:
        _leave(BadInput.exit_code, _usage_message(error))
    sys.exit()


def _usage_error() -> type[Exception]:
    """typer's base class of errors in the arguments, which it does not export: the parent of BadParameter. Should that
    change, such an error shows as a traceback instead of one line."""
    return typer.BadParameter.__mro__[1]


def _usage_message(error: Exception) -> str:
    message = str(getattr(error, "message", error)).strip()
    command = getattr(getattr(error, "ctx", None), "command_path", "amp-track")
    return f"{message.rstrip('.')}; see {command} --help"


def _interrupt(signal_number: int, frame: object) -> NoReturn:
    """SIGTERM ends runs as Ctrl-C does; the default would leave them RUNNING for ever."""
    raise KeyboardInterrupt


def _leave(exit_code: int, message: str, detail: str = "") -> NoReturn:
    if detail:
        print(detail.rstrip(), file=sys.stderr)
    print(f"amp-track: {message}", file=sys.stderr)
    sys.exit(exit_code)


def _print_or_return(command: Callable[[Request], Any], request: Request, as_json: bool) -> Any:
    """The command's result, to be shown; or None once `--json` has printed it, as it does when memory ran out too."""
    try:
        result = command(request)
    except NothingFits as error:
        if as_json and error.result is not None:
            print(json.dumps(_finite(error.result), allow_nan=False))
        raise
    if not as_json:
        return result
    print(json.dumps(_finite(result.as_json()), allow_nan=False))
    return None


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_table(table: Any) -> None:
    from amp_track.report import terminal

    terminal.print_table(table)


def _print_how_to_look(request: Request, study: str) -> None:
    print(f"study {study}; look at it with:")
    print(f"  {_mlflow_ui(request)}")
    dashboard = _program("optuna-dashboard")
    print(f"  {dashboard} {shlex.quote(addresses.masked(request.stores.storage))} --host 127.0.0.1 --port 8080")


def _mlflow_ui(request: Request) -> str:
    uri = addresses.tracking_uri(request.stores.tracking_uri)
    if uri.startswith("http"):
        return addresses.masked(uri)
    return (
        f"{_program('mlflow')} ui --backend-store-uri {shlex.quote(addresses.masked(uri))} --host 127.0.0.1 --port 5000"
    )


def _program(name: str) -> str:
    """How to call a program of this environment from here."""
    beside = Path(sys.executable).parent / name
    if shutil.which(name) == str(beside):
        return name
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)
