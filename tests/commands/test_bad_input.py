"""Bad input ends every command in one line on stderr and exit code 2, and nothing is written. See also tests/golden."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from support import DIGITS, ROOT, WORKLOADS, Done

from amp_track import __version__
from amp_track.config.commands import FLAGS
from amp_track.config.job import Job
from amp_track.runner.runner import JobRunner

Command = Callable[..., Done]

ARGUMENTS = [
    (["max-batch", DIGITS, "--experiment", "a\nb"], "--experiment: got '"),
    (["search", DIGITS, "--experiment", "x" * 501], "--experiment: got '"),
    (["plan", DIGITS, "--experiment", "mine"], "--experiment requires --track"),
    (["train", "--resume", "0" * 32, "--experiment", "mine"], "--experiment cannot be used with --resume"),
    (["train", DIGITS, "--memory-budget", ""], "--memory-budget: got '', expected a size of 1MiB or more"),
    (["train", ""], "WORKLOAD: got '', expected a name"),
    (["report", ""], "STUDY: got '', expected a name"),
    (["train", DIGITS, "--storage", "foo://me:hunter2@host/x"], "--storage: got foo://me:***@host/x"),
    (["train", DIGITS, "--tracking-uri", "sqlite://"], "--tracking-uri: got sqlite://, an in-memory database"),
    (["max-batch", DIGITS, "--storage", "sqlite:///:memory:"], "--storage: got sqlite:///:memory:, an in-memory"),
    (["max-batch", DIGITS, "--storage", "sqlite:////dev/null"], "is a pipe or a device"),
    (["train", DIGITS, "--job-timeout", "1e300"], "--job-timeout: got '1e300', expected a time above 0 with its unit"),
    (["train", DIGITS, "--batch-size", "9" * 23], "expected a whole number of 1 or more, or auto"),
    (["max-batch", DIGITS, "--precision", "fp32", "--precision", "bf16"], "--precision is given more than once."),
    (["train", DIGITS, "--epochs"], "requires an argument; see amp-track train --help"),
    (["train", DIGITS, "--headroom", "5%"], "--headroom requires --batch-size auto"),
    (["train", DIGITS, "--study", "mine"], "--study requires --batch-size auto"),
    (["train", "--resume", "0" * 32, "--study", "mine"], "--study cannot be used with --resume"),
    (["train", DIGITS, "--grad-accum", "2", "--effective-batch-size", "64"], "--grad-accum: got 2 together with"),
    (["search", DIGITS, "--synthetic"], "No such option: --synthetic"),
    (["compare", DIGITS, "--precision", "bf16"], "--precision: got bf16, expected fp32 among them"),
    (["compare", DIGITS, "--vary", "width=4", "--set", "width=8"], "width is given by both --vary and --set"),
    (["plan", DIGITS, "--vary", "width=4", "--set", "width=8"], "width is given by both --vary and --set"),
    (["max-batch", ":"], "WORKLOAD: got :, expected package.module:Class or a Python file"),
    (["plan", "train.py:Net"], "Use train.py, which must hold one Workload, or train:Net for a class or a function"),
    (["plan", "..:Digits"], "got ..:Digits, expected package.module:Class"),
    (["max-batch", "x" * 300], "file not found"),
    (["max-batch", "a\nb\x1b[31m"], r"a\nb\x1b[31m: file not found"),
    (["max-batch", "\udcff.py"], "expected a file name in UTF-8"),
    (["max-batch", "--", "--my_file.py"], "--my_file.py: file not found"),
    (["max-batch", DIGITS, "--study", "\udcff"], r"--study: got '\udcff', expected a name of at most 500 printable"),
    (["train", DIGITS, "--set", "width=\udcff"], r"--set: got 'width=\udcff', expected option=value"),
    *(
        ([command, "--", "python", "train.py", "--bs", "{batch_size}"], f"{command} needs a Workload; only")
        for command in ("search", "compare", "plan", "train", "dtypes", "explain")
    ),
    (["max-batch", "python", DIGITS, "--batch-size", "{batch_size}"], "A command comes after --: amp-track max-batch "),
    (["max-batch", "--", "train.py", "{batch_size}"], "train.py is no program. Write python train.py."),
    (
        ["max-batch", "--precision-words", "bf16=--bf16", "--", "python", DIGITS, "{batch_size}"],
        "--precision-words requires {precision} in the command",
    ),
    (["train", str(WORKLOADS / "empty.py")], "defines no subclass of Workload"),
    (["max-batch", DIGITS, "--effective-batch-size", "2147483648"], "expected a whole number from 1 to 2147483647"),
]
"""Found without a process that has torch."""
INSPECTED = [
    (["train", DIGITS, "--memory-budget", "900TiB"], "expected at most "),
    (["max-batch", DIGITS, "--memory-budget", "1MiB", "--headroom", "2MiB"], "expected less than 1 MiB"),
    (["train", DIGITS, "--effective-batch-size", "100"], "expected a multiple of the batch size 64"),
    (
        ["max-batch", DIGITS, "--effective-batch-size", "100", "--multiple-of", "8"],
        "--effective-batch-size: got 100, expected a multiple of --multiple-of 8.",
    ),
    (["train", DIGITS, "--device", "cuda:77"], "--device: got 'cuda:77', expected one of auto, cpu"),
    (["train", DIGITS, "--batch-size", "1438"], "--batch-size: got 1438, expected at most 1437, the number of"),
    (["train", DIGITS, "--set", "depth=3"], "--set depth: got '3', expected an option of"),
    (["train", str(WORKLOADS / "two.py")], "defines 2 subclasses of Workload (One, Two)"),
    (["compare", DIGITS, "--vary", "width=4,x"], "--vary width: got 'x', expected int"),
    (["compare", DIGITS, "--vary", "height=4,8"], "--vary height: got '4', expected an option of"),
    (["compare", DIGITS, "--batch-size", "5000"], "--batch-size: got 5000, expected at most 1437, the number of"),
    (["compare", DIGITS, "--precision", "fp32,tf32"], "--precision: got tf32, expected one of "),
    (
        ["compare", str(ROOT / "experiments/caltech256.py"), "--vary", "image_size=64", "--set", "data_dir=nowhere"],
        "--set data_dir: nowhere",
    ),
    (["dtypes", DIGITS, "--precision", "tf32", "--device", "cpu"], "expected one of fp32, amp, bf16: needs an NVIDIA"),
    (["train", DIGITS, "--synthetic", "--nproc", "9" * 9], "--nproc: got 999999999, expected at most"),
]
"""Found by a process that has torch."""


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS, ids=lambda value: "")
def test_bad_arguments_are_told_before_torch_is_imported(
    arguments: list[str], message: str, amp_track: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts_a_process(runner: JobRunner, job: Job) -> NoReturn:
        raise AssertionError("it asked a process that imports torch")

    monkeypatch.setattr(JobRunner, "inspect", starts_a_process)
    is_bad_input(amp_track(*arguments), message, tmp_path)


@pytest.mark.parametrize(("arguments", "message"), INSPECTED, ids=lambda value: "")
def test_what_device_and_workload_reject_is_told_before_anything_is_written(
    arguments: list[str], message: str, amp_track: Command, tmp_path: Path
) -> None:
    is_bad_input(amp_track(*arguments), message, tmp_path)


def is_bad_input(done: Done, message: str, tmp_path: Path) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("amp-track: ")
    assert message in line
    assert "hunter2" not in line
    assert list(tmp_path.iterdir()) == []


OWN = """import dataclasses
from amp_track import Metric, Workload

@dataclasses.dataclass(frozen=True)
class Own(Workload):
    {field}

    def model(self):
        raise AssertionError("it is not asked")

    eval_data = vars().get("eval_data", model)
    train_data = vars().get("train_data", model)
"""


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("batch_size: int = 0", "batch_size is 0. Set it to an integer of at least 1."),
        ('batch_size: int = "many"', "batch_size is 'many'. Set it to an integer of at least 1."),
        ("batch_size: int = 10**5000", "batch_size is of type int. Set it to an integer of at least 1."),
        ("learning_rate: float = 10**400", "Set it to a number above 0."),
        ("learning_rate: float = -1.0", "learning_rate is -1.0. Set it to a number above 0."),
        ('metric = Metric("accuracy (%)")', "metric is 'accuracy (%)'. Set it to a Metric whose name MLflow accepts"),
        ('metric = Metric("a//b")', "metric is 'a//b'. Set it to a Metric whose name MLflow accepts"),
        ('metric = Metric("../x")', "metric is '../x'. Set it to a Metric whose name MLflow accepts"),
        ('metric = Metric("a" * 300)', "at most 245 characters"),
        ('metric = Metric("loss")', "that is not loss"),
        ('metric = "accuracy"', "metric is 'accuracy'. Set it to a Metric"),
        ("metric = Metric(5)", "metric is 5. Set it to a Metric"),
        ('width: "Undefined" = 1', "the types of its fields raised NameError: name 'Undefined' is not defined"),
        ("train_data = eval_data = lambda self: 5", "train_data() returned an object of type int; it must return a"),
    ],
)
def test_a_workloads_own_fields_are_checked(
    field: str, message: str, amp_track: Command, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("workload") / "own.py"
    file.write_text(OWN.format(field=field))
    is_bad_input(amp_track("train", str(file)), message, tmp_path)


def test_a_batch_size_that_nobody_gave_is_called_the_workloads_own(
    amp_track: Command, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("workload") / "own.py"
    file.write_text((WORKLOADS / "tiny.py").read_text().replace("batch_size: int = 4", "batch_size: int = 64"))
    for arguments in (["train"], ["compare", "--precision", "fp32"]):
        done = amp_track(*arguments, str(file))
        is_bad_input(done, "batch size 64 exceeds its 8 training samples", tmp_path)
        assert "got 64" not in done.stderr
    is_bad_input(amp_track("train", str(file), "--batch-size", "32"), "--batch-size: got 32, expected at", tmp_path)


@pytest.mark.slow
def test_a_workload_that_does_not_import_shows_its_own_traceback(amp_track: Command, tmp_path: Path) -> None:
    done = amp_track("train", str(WORKLOADS / "broken.py"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) <= 6
    assert "import no_such_package_anywhere" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_pipe_is_no_workload_and_is_not_waited_for(command: str, amp_track: Command) -> None:
    os.mkfifo("pipe.py")
    done = amp_track(command, "pipe.py")
    assert done.returncode == 2
    assert "pipe.py: file not found" in done.stderr


@pytest.mark.nightly
def test_a_file_that_no_parser_takes_shows_why(amp_track: Command) -> None:
    Path("deep.py").write_text("-" * 20_000 + "1")
    done = amp_track("train", "deep.py")
    assert done.returncode == 2
    assert "its import raised" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("has_stores", [False, True])
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MLFLOW_RUN_ID", "0" * 32, "expected a run in sqlite:///"),
        ("MLFLOW_RUN_ID", "a b", "expected a run in sqlite:///"),
        ("MLFLOW_EXPERIMENT_ID", "77", "expected an experiment in sqlite:///"),
        ("MLFLOW_EXPERIMENT_ID", "9" * 20, "expected an experiment in sqlite:///"),
        ("MLFLOW_EXPERIMENT_NAME", "x" * 501, "expected at most 500 printable characters"),
    ],
)
@pytest.mark.parametrize("command", ["train", "max-batch"])
@pytest.mark.usefixtures("fresh_stores")
def test_an_environment_that_names_nothing_is_told_before_anything_is_written(
    command: str, variable: str, value: str, message: str, has_stores: bool,
    amp_track: Command, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not has_stores:
        for store in Path.cwd().glob("*.db"):
            store.unlink()
    monkeypatch.setenv(variable, value)
    before = {file: file.read_bytes() for file in Path.cwd().iterdir()}
    done = amp_track(command, str(WORKLOADS / "tiny.py"), "--precision", "fp32")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{variable}: got" in line
    assert message in line
    assert {file: file.read_bytes() for file in Path.cwd().iterdir()} == before


def test_version_is_that_of_the_package(amp_track: Command) -> None:
    done = amp_track("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"amp-track {__version__}\n", "")


EVERYDAY = ("--precision", "--batch-size", "--memory-budget", "--epochs", "--steps", "--lr ", "--json")
HELP = {
    "train": (
        *EVERYDAY,
        "--resume",
        "--help",
        "─ Max batch ─",
        "--headroom",
        "─ Training ─",
        "--grad-accum",
        "─ Stores ─",
    ),
    "search": ("--precision", "--set", "--study", "--json", "--help", "─ Search and comparison ─", "─ Max batch ─"),
    "compare": (*EVERYDAY, "─ Search and comparison ─", "--vary", "─ Training ─", "--grad-accum", "─ Stores ─"),
    "plan": ("--precision", "--batch-size", "--memory-budget", "--set", "--json", "─ Memory plan ─", "--gpu"),
}


@pytest.mark.parametrize("command", HELP)
def test_help_shows_everyday_flags_before_the_panels(command: str, amp_track: Command) -> None:
    shown = amp_track(command, "--help").stdout
    shown = shown[shown.index("─ Options ─") :]
    found = [shown.index(text) for text in HELP[command]]
    assert found == sorted(found)


@pytest.mark.parametrize("command", ["", *FLAGS])
@pytest.mark.parametrize("width", ["80", "120"])
def test_help_has_no_words_of_the_parser(
    command: str, width: str, amp_track: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    shown = amp_track(*filter(None, [command]), "--help").stdout
    parser = ("[[", "<bool>", "<str>", "<list[", "{FILE}", "{STUDY}", "{SNAPSHOT}", "default: (", "[dim]", "\\[")
    assert not [text for text in parser if text in shown]
    assert not re.search(rf"(?<![-\w])({'|'.join(FLAGS)}): ", " ".join(shown.replace("│", " ").split()))
    assert max(map(len, shown.splitlines())) <= int(width)


def test_no_arguments_print_the_help_and_no_error(amp_track: Command) -> None:
    done = amp_track()
    assert (done.returncode, done.stderr) == (2, "")
    assert "─ Commands ─" in done.stdout


def test_a_shell_completes_flags(amp_track: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_AMP_TRACK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "amp-track plan --pr")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert amp_track().stdout.split() == ["--precision"]
