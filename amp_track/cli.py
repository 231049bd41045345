"""The commands: parse, call, print, exit. No logic, and no import of torch or mlflow."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from amp_track._version import __version__
from amp_track.commands import printing
from amp_track.config import cli_params, torchrun
from amp_track.config.commands import FLAGS, request_of
from amp_track.config.job import DEFAULT_WORKLOAD
from amp_track.records import masking
from amp_track.records.causes import lack_of_space
from amp_track.records.errors import (
    INTERRUPTED_EXIT_CODE,
    STDOUT_LOST_EXIT_CODE,
    AmpTrackError,
    BadInput,
    StoreFailed,
)
from amp_track.workers import streams

app = typer.Typer(
    name="amp-track",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _not_empty(parameter: typer.CallbackParam, given: str | None) -> str | None:
    """Return what was given for an argument. Raises BadInput for empty text, as that of an unset shell variable."""
    if given == "":
        raise BadInput(f"{str(parameter.name).upper()}: got '', expected a name; is a shell variable not set?")
    return given


Workload = Annotated[
    str,
    typer.Argument(
        metavar="[WORKLOAD]",
        help="A Python file with one Workload, or package.module:Class.",
        callback=_not_empty,
    ),
]
Study = Annotated[
    str,
    typer.Argument(metavar="STUDY", help="Name of a study, as fit, search and compare say it.", callback=_not_empty),
]
_OWN_WORKLOAD = "A Python file with one Workload, or package.module:Class. By default that of the"
"""The help of a workload that a store may name instead."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; everything else goes to stderr.")]
_SWITCHES = ["--json", *{flag.name for of_command in FLAGS.values() for flag in of_command if flag.is_switch}]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"amp-track {__version__}")
        raise typer.Exit


@app.callback()
def amp_track_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Find the precision and the batch size to train with, measured on your model and your device."""


@app.command("train")
@cli_params.with_flags(FLAGS["train"])
def train_command(
    workload: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help=f"{_OWN_WORKLOAD} run with --resume, else {DEFAULT_WORKLOAD}.",
            show_default=False,
            callback=_not_empty,
        ),
    ] = None,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Train one job and track it in MLflow.

    amp-track train experiments/digits.py --precision bf16 --batch-size 64

    amp-track train experiments/digits.py --checkpoint-every 50; if it is killed: amp-track train --resume RUN_ID
    """
    request = request_of("train", workload, given, owns_process=True)
    from amp_track.commands import train
    from amp_track.report import terminal
    from amp_track.report import train as train_report

    result = printing.print_or_return(train.train, request, as_json)
    if result is None:
        return
    for block in train_report.blocks(result, see_with=printing.mlflow_ui(request), ui=printing.ui_address(request)):
        if isinstance(block, str):
            print(block)
        else:
            terminal.print_table(block)


@app.command("max-batch")
@cli_params.with_flags(FLAGS["max-batch"])
def max_batch_command(workload: Workload = DEFAULT_WORKLOAD, as_json: Json = False, **given: Any) -> None:
    """Find the largest batch that fits, at every precision: exact, and confirmed by a longer training.

    amp-track max-batch experiments/digits.py --memory-budget 64MiB --headroom 5% --multiple-of 8
    """
    request = request_of("max-batch", workload, given, owns_process=True)
    from amp_track.commands import max_batch

    printing.print_study(printing.print_or_return(max_batch.max_batch, request, as_json), request)


@app.command("search")
@cli_params.with_flags(FLAGS["search"])
def search_command(workload: Workload = DEFAULT_WORKLOAD, as_json: Json = False, **given: Any) -> None:
    """Find the largest batches, then train inside them, and compare speed and quality.

    amp-track search experiments/digits.py --memory-budget 64MiB --trials 12 --seeds 5
    """
    request = request_of("search", workload, given, owns_process=True)
    from amp_track.commands import search

    printing.print_study(printing.print_or_return(search.search, request, as_json), request)


@app.command("dtypes")
@cli_params.with_flags(FLAGS["dtypes"])
def dtypes_command(workload: Workload = DEFAULT_WORKLOAD, as_json: Json = False, **given: Any) -> None:
    """Show which operation of every layer runs in which dtype: one batch forward and backward. Writes nothing.

    amp-track dtypes experiments/digits.py --precision amp
    """
    request = request_of("dtypes", workload, given, owns_process=True)
    from amp_track.commands import dtypes
    from amp_track.report import dtypes as dtypes_report
    from amp_track.report import terminal

    report = printing.print_or_return(dtypes.dtypes, request, as_json)
    if report is None:
        return
    terminal.print_table(dtypes_report.dtypes_table(report))
    print(dtypes_report.sentence(report))


@app.command("plan")
@cli_params.with_flags(FLAGS["plan"])
def plan_command(workload: Workload = DEFAULT_WORKLOAD, as_json: Json = False, **given: Any) -> None:
    """Predict the largest batch at each precision on cards that are not here, and where the memory goes.

    Runs one training step on tensors without values, as on CUDA: no device, no data if example() needs none, and
    nothing is written unless --track keeps it.

    amp-track plan experiments/digits.py --memory-budget 6GiB --gpu "RTX 4090"

    amp-track plan experiments/digits.py --memory-budget 1GiB --effective-batch-size 8192 --vary width=8,16,32
    """
    request = request_of("plan", workload, given, owns_process=True)
    from amp_track.commands import plan
    from amp_track.report import plan as plan_report
    from amp_track.report import terminal

    result = printing.print_or_return(plan.plan, request, as_json)
    if result is None:
        return
    for table in plan_report.plan_tables(result):
        terminal.print_table(table)
    printing.print_notes(plan_report.plan_notes(result))
    if result.run_id is not None:
        print(f"run {result.run_id}; look at it with:")
        print(f"  {printing.mlflow_ui(request)}")


@app.command("compare")
@cli_params.with_flags(FLAGS["compare"])
def compare_command(workload: Workload = DEFAULT_WORKLOAD, as_json: Json = False, **given: Any) -> None:
    """Train the same job at every precision, all else equal: from where on does it pay?

    amp-track compare experiments/digits.py --precision fp32,bf16 --vary width=8,16,32 --epochs 2

    amp-track compare experiments/digits.py --precision fp32,bf16 --vary width=8,16,32,64 --epochs 2 --seeds 3 trains
    only what the study does not know yet.
    """
    request = request_of("compare", workload, given, owns_process=True)
    from amp_track.commands import compare

    printing.print_study(printing.print_or_return(compare.compare, request, as_json), request)


@app.command("report")
@cli_params.with_flags(FLAGS["report"])
def report_command(
    study: Study,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Make the page of a study again, finished or not, from what is stored: the answer, its proof, every trial.

    amp-track report digits-cpu-64MiB-43995c --out report.html

    Without --out the page is kept with the study's run, as report.html and report.md.
    """
    request = request_of("report", DEFAULT_WORKLOAD, given, owns_process=True)
    request = dataclasses.replace(request, stores=dataclasses.replace(request.stores, study=study))
    from amp_track.commands import report

    printing.print_study(printing.print_or_return(report.report, request, as_json), request)


@app.command("ui")
@cli_params.with_flags(FLAGS["ui"])
def ui_command(
    study: Annotated[
        str | None,
        typer.Argument(metavar="STUDY", help="Name of a study; by default the only one.", callback=_not_empty),
    ] = None,
    **given: Any,
) -> None:
    """Open MLflow's UI and optuna-dashboard on a study, until Ctrl-C. Writes nothing.

    Prints where the study is in both, once both answer, and opens a browser if there is a display.

    amp-track ui digits-cpu-64MiB-43995c --no-browser

    amp-track ui --port 5000 --dashboard-port 8080; from another machine: ssh -L 5000:localhost:5000 -L
    8080:localhost:8080 HOST
    """
    request = request_of("ui", DEFAULT_WORKLOAD, given, owns_process=True)
    from amp_track.commands import ui
    from amp_track.report import pages

    # At once: the command goes on, and whoever reads a pipe waits for nothing else.
    print(ui.ui(request, study, lambda shown: print("\n".join(pages.lines(shown)), flush=True)))


@app.command("worker")
@cli_params.with_flags(FLAGS["worker"])
def work_command(
    study: Study,
    workload: Annotated[
        str | None,
        typer.Argument(metavar="[WORKLOAD]", help=f"{_OWN_WORKLOAD} study.", show_default=False, callback=_not_empty),
    ] = None,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Join a study with one more search worker, or several: workload, options and settings are the study's own.

    amp-track worker digits-cpu-64MiB-43995c

    amp-track worker digits-cuda0-8GiB-1f0c2a --workers 8, on a machine with eight GPUs

    amp-track worker digits-cuda0-8GiB-1f0c2a --storage postgresql+psycopg://user@host/optuna --tracking-uri http://host:5000
    """
    request = request_of("worker", workload, given, owns_process=True)
    request = dataclasses.replace(request, stores=dataclasses.replace(request.stores, study=study))
    from amp_track.commands import worker

    printing.print_study(printing.print_or_return(worker.work, request, as_json), request)


def main() -> NoReturn:
    """Run a command, and end with the exit codes that `amp_track.records.errors` lists."""
    streams.open_closed_streams()
    with streams.lossy() as stdout:
        exit_code = _run()
        stdout.flush()
        if stdout.error is not None:
            kept = "what was printed there is lost, the runs and studies are kept"
            exit_code = exit_code or STDOUT_LOST_EXIT_CODE
            print(f"amp-track: stdout: got {stdout.error.strerror!r}, expected a reader; {kept}", file=sys.stderr)
    sys.exit(exit_code)


def _run() -> int:
    """Run the command, print what went wrong, and return the exit code."""
    logging.getLogger("amp_track").handlers = [_Lines()]
    for argument in sys.argv:  # a message repeats what was given, which may be an address in the wrong place
        masking.remember(argument)
    # A server that does not answer is asked again by amp_track.tracking: MLflow's own seven attempts take minutes.
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    try:
        arguments = cli_params.normalized(sys.argv[1:], _SWITCHES)
        if app(args=arguments, prog_name="amp-track", standalone_mode=False) == INTERRUPTED_EXIT_CODE:
            raise KeyboardInterrupt  # typer has turned it into a return value
    except AmpTrackError as error:
        return _say(error.exit_code, str(error), getattr(error, "detail", ""))
    except KeyboardInterrupt:
        return _say(INTERRUPTED_EXIT_CODE, "interrupted")
    except _usage_error() as error:
        return _say(BadInput.exit_code, _usage_message(error))
    except OSError as error:
        lack = lack_of_space(error)
        if lack is None:
            raise
        where = lack.filename2 or lack.filename or f"{Path.cwd()} or {tempfile.gettempdir()}"
        return _say(StoreFailed.exit_code, f"{where}: got {lack.strerror!r}, expected room for it; free some")
    return 0


class _Lines(logging.Handler):
    """Show what the package logs as plain lines among the progress."""

    def emit(self, record: logging.LogRecord) -> None:
        from amp_track.report import progress

        progress.say(record.getMessage())


def _usage_error() -> type[Exception]:
    """Return typer's base class of errors in the arguments, which it does not export: the parent of BadParameter.

    Should that change, such an error shows as a traceback instead of one line.
    """
    return typer.BadParameter.__mro__[1]


def _usage_message(error: Exception) -> str:
    message = str(getattr(error, "message", error)).strip()
    command = getattr(getattr(error, "ctx", None), "command_path", "amp-track")
    return f"{message.rstrip('.')}; see {command} --help"


def _say(exit_code: int, message: str, detail: str = "") -> int:
    """Print what went wrong, and return the exit code."""
    if not torchrun.says_errors():
        return exit_code
    if detail:
        print(masking.masked_within(detail.rstrip()), file=sys.stderr)
    print(f"amp-track: {_in_one_line(masking.masked_within(message))}", file=sys.stderr)
    return exit_code


def _in_one_line(text: str) -> str:
    """Return the text with what breaks lines, or steers a terminal, as its escape: messages repeat what was given."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
