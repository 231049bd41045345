"""Fixtures of all tests: a clean folder, stores, and a job runner whose fork server starts once."""

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

with contextlib.suppress(ImportError):  # a machine for GPU tests may lack hypothesis, which they do not need
    from hypothesis import settings

    # A few fixed examples, so that a failure comes from the change; `make test-nightly` draws new ones.
    settings.register_profile("quick", max_examples=30, derandomize=True, deadline=None)
    settings.register_profile("thorough", max_examples=100, deadline=None)
    settings.register_profile("fuzz", max_examples=1500, deadline=None)  # `make fuzz`
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    # Threads that wait for cores of another test process would double the time of every training.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // workers, 1)))


write_without_waiting_for_the_disk()
# Without empty parts, which mean the working folder.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


MOST_SLOW_SECONDS = 120.0
"""A `slow` test that takes longer fails, to keep `make test-all` within twelve minutes. Mark it `nightly` instead."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-services",
        action="store_true",
        help="fail a test that would skip because PostgreSQL, Chromium, SLURM, Ray or a right of root is missing",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Fail a slow test that is too slow. With --require-services, fail a skipped test unless it needs a GPU."""
    report: Any = yield
    if report.skipped and item.config.getoption("--require-services") and item.get_closest_marker("gpu") is None:
        report.outcome, report.longrepr = "failed", f"skipped, with --require-services: {report.longrepr[2]}"
    if report.passed and call.when == "call" and item.get_closest_marker("slow") and call.duration > MOST_SLOW_SECONDS:
        report.outcome = "failed"
        report.longrepr = f"took {call.duration:.0f} s; a slow test may take {MOST_SLOW_SECONDS:.0f} s"
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Start the fork server in each process that runs tests. It imports torch while pytest imports the tests."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        with contextlib.suppress(ChildProcessError):  # tests/tools/mutants.py forks from a process that has one
            JobRunner(DIGITS).start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark hypothesis tests: `make test-nightly` runs them again with more examples."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")


# Variables of a developer's shell or a CI that would change the output of commands.
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
    """Run each test in an empty folder, without settings of MLflow and of the terminal."""
    monkeypatch.chdir(tmp_path)
    for name in MLFLOW_SETTINGS + TERMINAL_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(masking, "_known_secrets", set())  # so that passwords of other tests are not masked
    return tmp_path


@pytest.fixture(scope="session")
def runner() -> JobRunner:
    return JobRunner(DIGITS)


@pytest.fixture(scope="session")
def inspected(runner: JobRunner) -> Callable[[Job], Inspection]:
    return runner.inspect


@pytest.fixture
def fault_job(runner: JobRunner) -> Callable[..., Job]:
    """Return a function that makes a resolved job of `faults.py`: `fault_job("raise", batch_size=4)`."""

    def make(fault: str, *, above: int = 0, **settings: Any) -> Job:
        harmless = Job(
            workload=FAULTS, options=(("fault", "none" if fault == "data" else fault), ("above", str(above)))
        )
        found = runner.inspect(harmless)
        return resolve(Job(**{"workload": FAULTS, "options": harmless.options, "precision": "fp32"} | settings), found)

    return make


@pytest.fixture
def cuda() -> Any:
    """Return the first CUDA device; skip without one."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU: torch.cuda.is_available() is False here")
    return torch.device("cuda:0")


@pytest.fixture(scope="session")
def store_templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both stores, empty but with their tables, which take seconds to create."""
    folder = tmp_path_factory.mktemp("stores")
    make_stores(folder)
    return folder


@pytest.fixture
def fresh_stores(store_templates: Path, clean_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy both stores into the folder of the test, under their default names.

    MLflow keeps stores open by address until the process ends, so the address is absolute.
    """
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{clean_folder}/mlflow.db")
    for name in ("mlflow.db", "optuna.db"):
        shutil.copy(store_templates / name, clean_folder / name)


@pytest.fixture(scope="session")
def small_study(store_templates: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MaxBatchResult]:
    """Return a folder with both stores and the finished study `mine`: fp32 and bf16, batch size at most 64."""
    folder = tmp_path_factory.mktemp("small")
    shutil.copytree(store_templates, folder, dirs_exist_ok=True)
    with contextlib.chdir(folder):
        return folder, max_batch(small_request(), runner=SimulatedRunner())


@pytest.fixture
def found(fresh_stores: None, small_study: tuple[Path, MaxBatchResult]) -> MaxBatchResult:
    """Copy both stores of `small_study` into the folder of the test and return the result. Its page is not copied."""
    folder, result = small_study
    for name in ("mlflow.db", "optuna.db"):
        shutil.copy(folder / name, name)
    return result


def _is_on_a_closed_stream(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and getattr(handler.stream, "closed", False)


@pytest.fixture
def amp_track(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Done]]:
    """Return a function that runs a command in this process, without seconds of imports: `amp_track("train", …)`."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    handlers = list(logging.getLogger("amp_track").handlers)
    # Alembic's configuration, which MLflow before 3.9 applies, leaves a handler on what an earlier test captured.
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [each for each in root.handlers if not _is_on_a_closed_stream(each)])
    # A command would permanently lower the priority of this process.
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
