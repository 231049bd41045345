"""The command line as a user meets it: exit codes, one line on stderr, nothing written on bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import DIGITS, FAULTS, OUR_FRAMES, WORKLOADS


def amp_track(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "amp_track", *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", DIGITS, "--precision", "fp8"], "--precision: got 'fp8', expected one of fp32, tf32, amp, bf16"),
        (["fit", DIGITS, "--precision", "fp32,fp8"], "--precision: got 'fp32,fp8', expected names from"),
        (
            ["train", DIGITS, "--batch-size", "0"],
            "--batch-size: got '0', expected a whole number of 1 or more, or auto",
        ),
        (["train", DIGITS, "--batch-size", "-4"], "--batch-size: got '-4'"),
        (["train", DIGITS, "--batch-size", "many"], "--batch-size: got 'many'"),
        (["train", DIGITS, "--memory-budget", "lots"], "--memory-budget: got 'lots', expected a size above 0"),
        (["train", "nowhere.py"], "nowhere.py: got no such file, expected a Python file with one Workload"),
        (["train", DIGITS, "--set", "width"], "--set: got 'width', expected option=value"),
        (["train", DIGITS, "--storage", "foo://me:hunter2@host/x"], "--storage: got foo://me:***@host/x"),
        (["train", DIGITS, "--tracking-uri", "sqlite:////no/folder/x.db"], "expected a file in a folder that exists"),
        (["train", DIGITS, "--epochs", "2", "--steps", "9"], "--epochs: got 2 together with --steps 9"),
        (["train", DIGITS, "--colour", "red"], "No such option: --colour"),
        (["train", DIGITS, "--epochs"], "requires an argument"),
        (["search", DIGITS, "--search-lr", "1,0.1"], "--search-lr: got '1,0.1', expected two numbers above 0"),
        (["search", DIGITS, "--synthetic"], "use fit --synthetic"),
        (["fit", DIGITS, "--headroom", "120%"], "--headroom: got '120%', expected a part of the budget, such as 5%"),
        (["train", DIGITS, "--headroom", "5%"], "--headroom: got 5%, expected it together with --batch-size auto"),
        (["train", DIGITS, "--accumulate", "2", "--effective-batch-size", "64"], "--accumulate: got 2 together with"),
        # What only a process with torch can tell:
        (["train", DIGITS, "--precision", "tf32", "--device", "cpu"], "got tf32, expected one this device has (fp32,"),
        (["train", DIGITS, "--memory-budget", "900TiB"], "expected at most the"),
        (["fit", DIGITS, "--memory-budget", "1MiB", "--headroom", "2MiB"], "expected less than the 1 MiB"),
        (["train", DIGITS, "--effective-batch-size", "100"], "expected a multiple of the batch size 64"),
        (["train", DIGITS, "--device", "cuda:77"], "--device: got cuda:77, expected one that is here"),
        (
            ["train", DIGITS, "--batch-size", "1438"],
            "--batch-size: got 1438, expected at most the 1437 training samples",
        ),
        (["train", DIGITS, "--set", "depth=3"], "--set: got depth=3, expected an option of"),
        (["train", str(WORKLOADS / "empty.py")], "got 0 Workload subclasses"),
        (["train", str(WORKLOADS / "two.py")], "got 2 Workload subclasses (One, Two)"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = amp_track(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("amp-track: ")
    assert message in line
    assert "hunter2" not in line
    assert list(tmp_path.iterdir()) == []


def test_a_workload_that_does_not_import_shows_its_own_traceback(tmp_path: Path) -> None:
    done = amp_track("train", str(WORKLOADS / "broken.py"))
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) <= 6
    assert "import no_such_package_anywhere" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_workload_whose_loss_raises_is_exit_code_1(tmp_path: Path) -> None:
    done = amp_track("train", FAULTS, "--set", "fault=raise", "--precision", "fp32")
    assert done.returncode == 1
    assert "ValueError: the labels are off by one" in done.stderr
    assert 'raise ValueError("the labels are off by one")' in done.stderr
    assert OUR_FRAMES not in done.stderr


def test_a_job_that_hangs_is_given_up() -> None:
    done = amp_track("train", FAULTS, "--set", "fault=hang", "--precision", "fp32", "--timeout", "0.5")
    assert done.returncode == 1
    assert "gave up after 0.5 s (--timeout) at fp32, batch 4" in done.stderr


def test_a_batch_that_does_not_fit_is_exit_code_3() -> None:
    done = amp_track("train", DIGITS, "--precision", "fp32", "--memory-budget", "1MiB", "--batch-size", "1", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["verdict"] == "oom"
    assert "does not fit the budget of 1 MiB; it needs" in done.stderr
    assert "bytes" in done.stderr.splitlines()[-1]


def test_json_is_one_object_on_stdout_whatever_the_workload_prints() -> None:
    done = amp_track("train", DIGITS, "--precision", "bf16", "--epochs", "1", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result) == [
        "run_id", "workload", "precision", "batch_size", "verdict", "quality", "wall_seconds", "samples_per_second",
        "max_memory_bytes", "steps", "skipped_steps", "scale", "device", "memory_budget_bytes",
        "waited_fraction", "non_finite_losses", "advice", "diagnosis",
    ]  # fmt: skip
    assert result["quality"]["name"] == "accuracy"
    assert (result["verdict"], result["steps"], result["scale"]) == ("fits", 23, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--seeds", "3", "--precision", "amp,bf16"],
            "--seeds: got 3 with --precision amp,bf16, expected fp32",
        ),
        (["--seeds", "0"], "--seeds: got '0', expected a whole number of 1 or more"),
        (["--seeds", "3", "--margin", "-1%"], "--margin: got '-1%', expected a part of the quality"),
        (["--diagnose", "0"], "--diagnose: got '0', expected a whole number of 1 or more"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: list[str], said: str) -> None:
    done = amp_track("search", FAULTS, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(Path.cwd().iterdir()) == []


def test_fit_prints_a_table_and_how_to_look() -> None:
    done = amp_track("fit", FAULTS, "--precision", "fp32,bf16", "--max-batch-size", "9", "--study", "small")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("│").split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    why = "".join(row[2].replace(" ", "") for row in rows)
    assert why.startswith(2 * "as far as --max-batch-size lets it look".replace(" ", ""))
    assert max(map(len, done.stdout.split("· ")[0].splitlines())) <= 100
    assert "tf32 left out: needs an NVIDIA GPU of compute capability 8.0" in done.stdout
    assert "mlflow ui --backend-store-uri sqlite:///mlflow.db" in done.stdout
    assert "optuna-dashboard sqlite:///optuna.db" in done.stdout


def test_auto_trains_at_the_largest_batch() -> None:
    done = amp_track("train", FAULTS, "--precision", "fp32", "--batch-size", "auto", "--max-batch-size", "9", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["batch_size"] == 9


@pytest.mark.parametrize("command", [[], ["train"], ["fit"], ["search"], ["compare"]])
def test_help_teaches(command: list[str]) -> None:
    done = amp_track(*command, "--help")
    assert done.returncode == 0
    assert "Usage: amp-track" in done.stdout
    if command:
        assert f"amp-track {command[0]} experiments/digits.py" in done.stdout
        assert "--memory-budget" in done.stdout
