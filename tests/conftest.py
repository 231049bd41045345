"""Shared by all tests: a clean folder, the workloads, and a sandbox whose fork server starts once."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from simulated import SimulatedRunner
from support import DIGITS, FAULTS, ROOT, Done, make_stores, small_request, write_without_waiting_for_the_disk

from amp_track import cli
from amp_track.commands.max_batch import max_batch
from amp_track.config.inspection import Inspection, resolve
from amp_track.config.job import Job
from amp_track.records import masking
from amp_track.results.max_batch import MaxBatchResult
from amp_track.runner import job_processes
from amp_track.runner.runner import JobRunner

with contextlib.suppress(ImportError):  # no test that needs a GPU needs hypothesis, and such a machine may lack it
    from hypothesis import settings

    # The same few examples each time, so that a failure is the change's; `make test-nightly` draws new ones.
    settings.register_profile("quick", max_examples=30, derandomize=True, deadline=None)
    settings.register_profile("thorough", max_examples=100, deadline=None)
    settings.register_profile("fuzz", max_examples=1500, deadline=None)  # `make fuzz`
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    # Threads that wait for a core which another worker's threads hold would double the time of every training.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // workers, 1)))


write_without_waiting_for_the_disk()
# An empty part of it would mean the working folder.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


MOST_SLOW_SECONDS = 45.0
"""A test marked `slow` that takes longer fails: `make test-all` is for twelve minutes. The rest is `nightly`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-services",
        action="store_true",
        help="fail a test that would skip because PostgreSQL, Chromium, SLURM, Ray or a right of root is missing",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Fail a slow test that is too slow, and with --require-services one that skips for anything but a GPU."""
    report: Any = yield
    if report.skipped and item.config.getoption("--require-services") and item.get_closest_marker("gpu") is None:
        report.outcome, report.longrepr = "failed", f"skipped, with --require-services: {report.longrepr[2]}"
    if report.passed and call.when == "call" and item.get_closest_marker("slow") and call.duration > MOST_SLOW_SECONDS:
        report.outcome = "failed"
        report.longrepr = f"took {call.duration:.0f} s, expected {MOST_SLOW_SECONDS:.0f} s at most of a slow test"
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Start the fork server, which imports torch while pytest imports the tests: in each process that runs tests."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        with contextlib.suppress(ChildProcessError):  # tests/tools/mutants.py forks from a process that has one
            JobRunner(DIGITS).start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the properties that hypothesis tests: `make test-nightly` runs them again with more examples."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")


# What a developer's shell or a CI may have set, and what would change the output of the commands.
MLFLOW_SETTINGS = ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME")
TERMINAL_SETTINGS = (
    "NO_COLOR",
    "FORCE_COLOR",
    "PY_COLORS",
    "GITHUB_ACTIONS",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    "COLUMNS",
)


@pytest.fixture(autouse=True)
def clean_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test works in an empty folder, outside of any `mlflow run`, and for a terminal of no special kind."""
    monkeypatch.chdir(tmp_path)
    for name in MLFLOW_SETTINGS + TERMINAL_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(masking, "_known_secrets", set())  # else one test's password is masked in another's messages
    return tmp_path


@pytest.fixture(scope="session")
def runner() -> JobRunner:
    return JobRunner(DIGITS)


@pytest.fixture(scope="session")
def inspected(runner: JobRunner) -> Callable[[Job], Inspection]:
    return runner.inspect


@pytest.fixture
def fault_job(runner: JobRunner) -> Callable[..., Job]:
    """A resolved job of `faults.py`: `fault_job("raise", batch_size=4)`."""

    def make(fault: str, *, above: int = 0, **settings: Any) -> Job:
        harmless = Job(
            workload=FAULTS, options=(("fault", "none" if fault == "data" else fault), ("above", str(above)))
        )
        found = runner.inspect(harmless)
        return resolve(Job(**{"workload": FAULTS, "options": harmless.options, "precision": "fp32"} | settings), found)

    return make


@pytest.fixture
def cuda() -> Any:
    """The first CUDA device; skips where there is none."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU: torch.cuda.is_available() is False here")
    return torch.device("cuda:0")


@pytest.fixture(scope="session")
def store_templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both stores, empty and with their tables, which take seconds to make."""
    folder = tmp_path_factory.mktemp("stores")
    make_stores(folder)
    return folder


@pytest.fixture
def fresh_stores(store_templates: Path, clean_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stores in the test's folder, under their default names.

    MLflow keeps a store open by its address as long as the process lives: it is told the absolute one.
    """
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{clean_folder}/mlflow.db")
    for name in ("mlflow.db", "optuna.db"):
        shutil.copy(store_templates / name, clean_folder / name)


@pytest.fixture(scope="session")
def small_study(store_templates: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MaxBatchResult]:
    """A folder with both stores, in which the study mine is finished: fp32 and bf16, at most batch 64."""
    folder = tmp_path_factory.mktemp("small")
    shutil.copytree(store_templates, folder, dirs_exist_ok=True)
    with contextlib.chdir(folder):
        return folder, max_batch(small_request(), runner=SimulatedRunner())


@pytest.fixture
def found(fresh_stores: None, small_study: tuple[Path, MaxBatchResult]) -> MaxBatchResult:
    """Copy both stores of `small_study` into the test's folder and return the result, whose page is not copied."""
    folder, result = small_study
    for name in ("mlflow.db", "optuna.db"):
        shutil.copy(folder / name, name)
    return result


@pytest.fixture
def amp_track(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Done]]:
    """`amp_track("train", …)` runs the command in this process: as a user meets it, without seconds of imports."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    handlers = list(logging.getLogger("amp_track").handlers)
    # A command lowers its process's priority for good; this one has more tests to run.
    monkeypatch.setattr(job_processes, "_TRACKING_NICENESS", -20)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["amp-track", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Done(ended.value.code or 0, *capfd.readouterr())  # type: ignore[arg-type]

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)
    logging.getLogger("amp_track").handlers = handlers
