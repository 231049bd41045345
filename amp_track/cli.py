"""Define the command line: parse, call, print, exit. No logic, and no import of torch or mlflow."""

from __future__ import annotations

import inspect
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from amp_track._version import __version__
from amp_track.commands import printing
from amp_track.config import cli_params, torchrun
from amp_track.config.cli_params import EVERYDAY, Flag, Panel
from amp_track.config.commands import FLAGS, request_of
from amp_track.config.job import DEFAULT_WORKLOAD
from amp_track.config.options import Request
from amp_track.records import masking
from amp_track.records.errors import (
    INTERRUPTED_EXIT_CODE,
    STDOUT_LOST_EXIT_CODE,
    AmpTrackError,
    BadInput,
    StoreFailed,
    lack_of_space,
)
from amp_track.stores import addresses
from amp_track.workers import streams


class _PlainHelp:
    """Show no type beside a switch or an argument in `--help`, and a required argument without braces."""

    def get_params(self, context: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = lambda ctx: None
                if parameter.required:
                    parameter.get_usage_pieces = lambda ctx, shown=parameter.metavar: [shown]
        return parameters


class _Command(_PlainHelp, TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reject a flag that is given more than once: typer keeps the last value, without a word."""
        given = [] if ctx.resilient_parsing else self.make_parser(ctx).parse_args(args=list(args))[-1]
        for flag in given:
            if given.count(flag) > 1 and not (flag.multiple or getattr(flag, "is_flag", False)):
                raise BadInput(f"{flag.opts[0]} is given more than once. If it takes several values, use commas: a,b.")
        rest: list[str] = super().parse_args(ctx, args)
        return rest


class _Group(_PlainHelp, TyperGroup):
    pass


app = typer.Typer(
    name="amp-track",
    cls=_Group,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _not_empty(parameter: typer.CallbackParam, given: str | None) -> str | None:
    """Return the value of an argument. Raises BadInput if it is empty because a shell variable is not set."""
    if given == "":
        raise BadInput(f"{str(parameter.name).upper()}: got '', expected a name; is a shell variable not set?")
    return given


Workload = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help=f"Python file with one Workload, or package.module:Class. Default: {DEFAULT_WORKLOAD}.",
        show_default=False,
        callback=_not_empty,
    ),
]
Study = Annotated[
    str,
    typer.Argument(
        metavar="STUDY", help="Name of a study, as printed by max-batch, search and compare.", callback=_not_empty
    ),
]
_OWN_WORKLOAD = "Python file with one Workload, or package.module:Class. Default: the workload of the"
"""The help of a workload that may be read from a store."""
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]
_SWITCHES = ["--json", *{flag.name for of_command in FLAGS.values() for flag in of_command if flag.is_switch}]


def _parameter(flag: Flag) -> inspect.Parameter:
    """Return the parameter that typer reads: `Flag.value` parses its text."""
    setting, default = flag.setting, flag.shown_default
    option = typer.Option(
        flag.name,
        # typer's own text of a default that is not a value has parentheses; the backslash is for rich
        help=setting.help + (f" [dim]\\[default: {default}][/dim]" if default is not None else ""),
        metavar=flag.metavar or None,
        show_default=False,
        rich_help_panel=None if setting.panel is Panel.EVERYDAY else setting.panel,
    )
    kind: Any = bool if flag.is_switch else list[str] | None if setting.repeatable else str | None
    return inspect.Parameter(
        flag.parameter,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if flag.is_switch else None,
        annotation=Annotated[kind, option],
    )


def _command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command, with its flags in the signature that typer reads: the function gets them as keywords."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        json = [(_rank("--json", Panel.EVERYDAY), p) for p in own if p.kind is p.KEYWORD_ONLY]
        flags = [(_rank(flag.name, flag.setting.panel), _parameter(flag)) for flag in FLAGS[name]]
        arguments = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        order = [*arguments, *(p for _, p in sorted([*json, *flags], key=lambda ranked: ranked[0]))]
        command.__signature__ = inspect.Signature(order)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in order}
        return app.command(name, cls=_Command)(command)

    return decorate


def _rank(name: str, panel: Panel) -> tuple[int, int]:
    """Return the position of a flag in `--help`: everyday flags first, then panel by panel."""
    if name in EVERYDAY:
        return 0, EVERYDAY.index(name)
    return 1 + list(Panel).index(panel), 0


def _start_imports(request: Request) -> None:
    """Start to import torch for an inspection, while this process imports the modules of the command.

    A wrong name of a target is left to the command, which checks its other flags first.
    """
    from amp_track.runner import fork_server, leading_imports  # not needed for --help
    from amp_track.targets import source

    try:
        source.check_reference(request.job.workload)
    except BadInput:
        return
    if torchrun.launch() is None:  # its other ranks do not inspect
        imports = leading_imports.leading_imports(request.job.workload)
        huge_pages = fork_server.asks_for_huge_pages(request.job)
        fork_server.start(fork_server.Setup(imports, huge_pages), inspects=True)


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


@_command("init")
def init_command(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="New Python file, such as train.py.", callback=_not_empty)
    ],
    **given: Any,
) -> None:
    """Write a commented training that runs, to start from.

    amp-track init train.py

    amp-track init train.py --template lightning
    """
    request = request_of("init", file, given, owns_process=True)
    from amp_track.commands import init

    commands = init.init(request)
    print(f"Wrote {file}. Try it, then put your training in:")
    folder = os.path.dirname(file)
    for line in [f"cd {shlex.quote(folder)}"] * bool(folder) + commands:
        print(f"  {line}")


@_command("train")
def train_command(
    workload: Annotated[
        str | None,
        typer.Argument(
            metavar="WORKLOAD",
            help=f"{_OWN_WORKLOAD} run (with --resume), else {DEFAULT_WORKLOAD}.",
            show_default=False,
            callback=_not_empty,
        ),
    ] = None,
    *,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Train one job and track it in MLflow.

    The flags under Max batch need --batch-size auto, except --effective-batch-size.

    amp-track train experiments/digits.py --precision bf16 --batch-size 64

    amp-track train experiments/digits.py --checkpoint-every 50

    amp-track train --resume RUN_ID
    """
    request = request_of("train", workload, given, owns_process=True)
    if request.resumption.resume is None:  # else its run names the workload
        _start_imports(request)
    from amp_track.commands import train
    from amp_track.report.train import blocks

    see_with, ui = printing.mlflow_ui(request), request.stores.mlflow.ui
    printing.run(train.train, request, as_json, lambda result: blocks(result, see_with=see_with, ui=ui))


@_command("max-batch")
def max_batch_command(
    target: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET | -- COMMAND",
            help="Python file with one Workload, package.module:Class, package.module:function, or a command. "
            f"Default: {DEFAULT_WORKLOAD}.",
            show_default=False,
        ),
    ] = None,
    *,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Find the max batch at every precision: proven exact, and confirmed by a longer run.

    amp-track max-batch experiments/digits.py --device cpu --memory-budget 64MiB --headroom 5% --multiple-of 8

    amp-track max-batch -- python train.py --batch-size {batch_size} --precision {precision}

    To shorten it, set --time-limit, --max-batch-size or --confirm-steps. After Ctrl-C, the same command resumes.
    """
    words = target or [DEFAULT_WORKLOAD]
    if len(words) == 1:
        request = request_of("max-batch", words[0], given, owns_process=True)
    else:
        from amp_track.targets.source import script_of  # not needed for --help

        request = request_of("max-batch", script_of(words), given, words=words, owns_process=True)
    _start_imports(request)
    from amp_track.commands import max_batch

    printing.run_study(max_batch.max_batch, request, as_json)


@_command("search")
def search_command(workload: Workload = DEFAULT_WORKLOAD, *, as_json: Json = False, **given: Any) -> None:
    """Find the max batches, train inside them, and compare speed and metric.

    amp-track search experiments/digits.py --device cpu --memory-budget 64MiB --trials 12 --seeds 5
    """
    request = request_of("search", workload, given, owns_process=True)
    _start_imports(request)
    from amp_track.commands import search

    printing.run_study(search.search, request, as_json)


@_command("dtypes")
def dtypes_command(workload: Workload = DEFAULT_WORKLOAD, *, as_json: Json = False, **given: Any) -> None:
    """Show the dtype of every operation of every layer, in one forward and backward pass.

    amp-track dtypes experiments/digits.py --precision amp
    """
    request = request_of("dtypes", workload, given, owns_process=True)
    from amp_track.commands import dtypes
    from amp_track.report.dtypes import blocks

    printing.run(dtypes.dtypes, request, as_json, blocks)


@_command("plan")
def plan_command(
    target: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET",
            help="Python file with one Workload, package.module:Class, or a model: timm:NAME, torchvision:NAME, "
            f"transformers:CONFIG.json. Several are shown in one table. Default: {DEFAULT_WORKLOAD}.",
            show_default=False,
        ),
    ] = None,
    *,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Predict the max batch at each precision on other GPUs, and show what uses the memory.

    Simulates one training step on CUDA, without a device. Writes nothing without --track, --csv or --update.

    amp-track plan experiments/digits.py --memory-budget 6GiB --gpu "RTX 4090"

    amp-track plan experiments/digits.py --memory-budget 1GiB --effective-batch-size 8192 --vary width=8,16,32

    amp-track plan timm:resnet50 timm:vit_base_patch16_224 --gpu "RTX 4090" --gpu T4 --optimizer sgd --csv plans.csv

    amp-track plan experiments/digits.py --gpu "RTX 4090" --check memory.json
    """
    first, *others = target or [DEFAULT_WORKLOAD]
    request = request_of("plan", first, given, more_targets=others, owns_process=True)
    from amp_track.commands import plan
    from amp_track.report.plan import blocks

    check, see_with = request.plan_check_options, printing.mlflow_ui(request)
    printing.run(plan.plan, request, as_json, lambda result: blocks(result, check, see_with=see_with))


@_command("explain")
def explain_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SNAPSHOT",
            help="File that amp_track.watch or torch.cuda.memory._dump_snapshot wrote, or a workload to predict.",
            callback=_not_empty,
        ),
    ],
    *,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Explain an out-of-memory error: what held the memory, the max batch, and the ways out.

    Reads a memory snapshot of PyTorch's CUDA allocator, or predicts the error of a workload. Writes nothing.

    amp-track explain oom.pickle --batch-size 256

    amp-track explain experiments/digits.py --memory-budget 64MiB --batch-size 4096 --precision fp32
    """
    request = request_of("explain", source, given, owns_process=True)
    from amp_track.commands import explain
    from amp_track.report.explain import blocks

    printing.run(explain.explain, request, as_json, blocks)


@_command("compare")
def compare_command(workload: Workload = DEFAULT_WORKLOAD, *, as_json: Json = False, **given: Any) -> None:
    """Train the same job at every precision, also over values of an option: when is a lower precision faster?

    amp-track compare experiments/digits.py --precision fp32,bf16 --vary width=8,16,32 --epochs 2

    With more values or --seeds 3, the same command trains only what is missing.
    """
    request = request_of("compare", workload, given, owns_process=True)
    _start_imports(request)
    from amp_track.commands import compare

    printing.run_study(compare.compare, request, as_json)


@_command("report")
def report_command(study: Study, *, as_json: Json = False, **given: Any) -> None:
    """Write the report page of a study, finished or not, from the stores: recommendation, proof and all trials.

    amp-track report digits-cpu-64MiB-43995c --out report.html

    Without --out, the study's run gets the page as report.html and report.md.
    """
    request = request_of("report", DEFAULT_WORKLOAD, given, study=study, owns_process=True)
    from amp_track.commands import report

    printing.run_study(report.report, request, as_json)


@_command("ui")
def ui_command(
    study: Annotated[
        str | None,
        typer.Argument(metavar="STUDY", help="Name of a study. Default: the only one.", callback=_not_empty),
    ] = None,
    **given: Any,
) -> None:
    """Serve MLflow's UI and optuna-dashboard until Ctrl-C, and open the pages of a study.

    Prints the URLs of the study, and opens a browser if there is a display.

    amp-track ui digits-cpu-64MiB-43995c --no-browser

    amp-track ui --port 5000 --dashboard-port 8080

    ssh -L 5000:localhost:5000 -L 8080:localhost:8080 HOST (on another machine, to see the pages there)
    """
    request = request_of("ui", DEFAULT_WORKLOAD, given, study=study, owns_process=True)
    from amp_track.commands import ui

    # Flushed: the command goes on, and a reader of a pipe needs the URLs now.
    print(ui.ui(request, lambda lines: print(lines, flush=True)))


@_command("worker")
def work_command(
    study: Study,
    workload: Annotated[
        str | None,
        typer.Argument(metavar="WORKLOAD", help=f"{_OWN_WORKLOAD} study.", show_default=False, callback=_not_empty),
    ] = None,
    *,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Join a study with one or more search workers. Workload, options and settings are those of the study.

    amp-track worker digits-cpu-64MiB-43995c

    amp-track worker digits-cuda0-8GiB-1f0c2a --workers 8 (on a machine with eight GPUs)

    amp-track worker digits-cuda0-8GiB-1f0c2a --storage postgresql+psycopg://user@host/optuna --tracking-uri http://host:5000
    """
    request = request_of("worker", workload, given, study=study, owns_process=True)
    from amp_track.commands import worker

    printing.run_study(worker.work, request, as_json)


def main() -> NoReturn:
    """Run a command and exit with a code of `amp_track.records.errors`."""
    streams.open_closed_streams()
    with streams.lossy() as stdout:
        exit_code = _run()
        stdout.flush()
        if stdout.error is not None:
            exit_code = exit_code or STDOUT_LOST_EXIT_CODE
            reason = stdout.error.strerror
            print(f"amp-track: stdout cannot be written ({reason}). Everything else is done.", file=sys.stderr)
    sys.exit(exit_code)


def _run() -> int:
    """Run the command, print its error, and return the exit code."""
    logging.getLogger("amp_track").handlers = [_Lines()]
    for argument in sys.argv:  # a message may repeat an argument, which may contain a password
        masking.remember(argument)
    # amp_track.tracking retries; MLflow's own seven attempts take minutes.
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ.setdefault(*addresses.REQUEST_TIMEOUT)
    try:
        arguments = cli_params.normalized(sys.argv[1:], _SWITCHES)
        _check_takes_scripts(arguments)
        if app(args=arguments, prog_name="amp-track", standalone_mode=False) == INTERRUPTED_EXIT_CODE:
            raise KeyboardInterrupt  # typer turns it into a return value
    except AmpTrackError as error:
        return _say(error.exit_code, str(error), error.detail)
    except KeyboardInterrupt:
        return _say(INTERRUPTED_EXIT_CODE, "interrupted")
    except _usage_error() as error:
        message = _usage_message(error)
        return _say(BadInput.exit_code, message) if message else BadInput.exit_code
    except OSError as error:
        lack = lack_of_space(error)
        if lack is None:
            raise
        where = lack.filename2 or lack.filename or f"{Path.cwd()} or {tempfile.gettempdir()}"
        return _say(StoreFailed.exit_code, f"{where}: {lack.strerror}. Free some space.")
    return 0


def _check_takes_scripts(arguments: Sequence[str]) -> None:
    """Raise BadInput if max-batch is given the words of a script without `--` before them, or another command any."""
    has_script = any("{batch_size}" in word for word in arguments) or "-- python" in " ".join(arguments)
    if has_script and arguments[0] in ("train", "search", "compare", "plan", "dtypes", "explain"):
        raise BadInput(
            f"{arguments[0]} needs a Workload; only max-batch takes a script. Use it, "
            "or write a Workload to start from: amp-track init mine.py."
        )
    if has_script and arguments[0] == "max-batch" and "--" not in arguments:
        raise BadInput(
            "A command comes after --: amp-track max-batch --memory-budget 20GiB -- python train.py --batch-size "
            "{batch_size}"
        )


class _Lines(logging.Handler):
    """Print the package's log messages as progress lines."""

    def emit(self, record: logging.LogRecord) -> None:
        from amp_track.report import progress

        progress.say(record.getMessage())


def _usage_error() -> type[Exception]:
    """Return typer's base class of usage errors, the parent of BadParameter; typer does not export it.

    If typer changes this, usage errors print a traceback instead of one line.
    """
    return typer.BadParameter.__mro__[1]


def _usage_message(error: Exception) -> str:
    """Return the message of a usage error; "" if typer has printed the help, as it does without arguments."""
    message = str(getattr(error, "message", error)).strip()
    if not message:  # that of a missing argument is made late
        message = str(getattr(error, "format_message", str)()).strip()
    if not message:
        return ""
    given = " ".join(["amp-track", *[word for word in sys.argv[1:2] if word in FLAGS]])  # some errors have no context
    command = getattr(getattr(error, "ctx", None), "command_path", given)
    return f"{message.rstrip('.')}; see {command} --help"


def _say(exit_code: int, message: str, detail: str = "") -> int:
    """Print an error and return the exit code."""
    if not torchrun.says_errors():
        return exit_code
    if detail:
        print(masking.masked_within(detail.rstrip()), file=sys.stderr)
    print(f"amp-track: {_in_one_line(masking.masked_within(message))}", file=sys.stderr)
    return exit_code


def _in_one_line(text: str) -> str:
    """Escape line breaks and control characters: messages repeat arguments."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
