"""`work` joins a study by its name alone; the device is simulated, the studies and the runs are real."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from simulated import SimulatedRunner
from support import DIGITS, MEBIBYTE, Done, client, request, stores

from amp_track.commands.compare import compare
from amp_track.commands.max_batch import max_batch
from amp_track.commands.search import search
from amp_track.commands.worker import work
from amp_track.config.inspection import Inspection
from amp_track.config.job import Job, JobFolder
from amp_track.config.options import CompareOptions, Request
from amp_track.records.errors import BadInput
from amp_track.records.events import Event
from amp_track.records.hardware import Hardware
from amp_track.records.result import JobResult
from amp_track.results.compare import CompareResult
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.search import SearchResult
from amp_track.study import storage

pytestmark = pytest.mark.usefixtures("fresh_stores")
Command = Callable[..., Done]


class InterruptedAt(SimulatedRunner):
    """A device on which the job of this number is interrupted."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def run(self, job: Job, on_event: Callable[[Event], None], *, folder: JobFolder | None = None) -> JobResult:
        if len(self.jobs) == self._number:
            raise KeyboardInterrupt
        return super().run(job, on_event, folder=folder)


class Named(SimulatedRunner):
    """A CPU of another name."""

    def inspect(self, job: Job) -> Inspection:
        return dataclasses.replace(super().inspect(job), hardware=Hardware(kind="cpu", name="another device"))


def asked(study: str = "mine", **options: Any) -> Request:
    job = Job(workload=DIGITS, memory_budget_bytes=8 * MEBIBYTE, epochs=3)
    return request(job, precisions=("fp32", "bf16"), study=study, **options)


def named(study: str) -> Request:
    """Return what a worker is told: a name, where the stores are, and the workload, which is outside this folder."""
    return request(Job(workload=DIGITS), study=study, given=frozenset({"workload"}))


def trials(part: str) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=part, storage=stores()["storage"]).trials


@pytest.mark.parametrize(
    "interrupted_at", [pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.nightly)]
)
def test_a_worker_finishes_a_search_that_another_process_has_begun(interrupted_at: int) -> None:
    options: dict[str, Any] = {"trials": 4, "lr_range": (1e-3, 1e-2), "multiple_of": 8, "max_batch_size": 64}
    with pytest.raises(KeyboardInterrupt):
        search(asked(**options), runner=InterruptedAt(interrupted_at))
    result = work(named("mine"), runner=SimulatedRunner())
    whole = search(asked("whole", **options), runner=SimulatedRunner())
    assert isinstance(result, SearchResult)
    assert result.limits.max_batch == whole.limits.max_batch
    assert result.limits.job == whole.limits.job
    assert len(result.trials) == len(whole.trials) == 4
    assert all(1e-3 <= trial.learning_rate <= 1e-2 for trial in result.trials)


def test_a_worker_of_a_finished_study_repeats_and_changes_nothing(found: MaxBatchResult) -> None:
    def manifest() -> Any:
        study = optuna.load_study(study_name="mine/max-batch", storage=stores()["storage"])
        return study.user_attrs[storage.COMMAND]

    before, device = manifest(), SimulatedRunner(free_bytes=123 * MEBIBYTE)
    assert work(named("mine/max-batch"), runner=device) == found
    assert not device.jobs
    assert manifest() == before


@pytest.mark.slow
def test_a_worker_joins_a_comparison() -> None:
    vary = CompareOptions(vary=("width", ("8", "4")))
    with pytest.raises(KeyboardInterrupt):
        compare(asked(compare_options=vary, seeds=2), runner=InterruptedAt(3))
    result = work(named("mine"), runner=SimulatedRunner())
    assert isinstance(result, CompareResult)
    assert sum(len(cell.trainings) for cell in result.cells) == 8


def test_a_worker_on_another_device_is_rejected_and_both_are_named(found: MaxBatchResult) -> None:
    before = trials("mine/max-batch")
    with pytest.raises(BadInput, match=rf'^Study "mine/max-batch" .* {found.hardware.title}; .* has another device\.'):
        work(named("mine"), runner=Named())
    assert trials("mine/max-batch") == before


def test_a_worker_joins_a_study_in_a_journal() -> None:
    made = max_batch(asked(max_batch_size=64, storage="optuna.log"), runner=SimulatedRunner())
    joined = named("mine")
    joined = dataclasses.replace(joined, stores=dataclasses.replace(joined.stores, storage="./optuna.log"))
    device = SimulatedRunner()
    assert work(joined, runner=device) == made
    assert not device.jobs


def test_a_worker_needs_the_workload() -> None:
    copy = Path("digits.py")
    copy.write_text(Path(DIGITS).read_text())
    max_batch(
        request(Job(workload="digits.py"), precisions=("fp32",), study="mine", max_batch_size=8),
        runner=SimulatedRunner(),
    )
    copy.unlink()
    with pytest.raises(
        BadInput, match=r"^Study mine trains digits\.py, which does not exist here\. Run the command in "
    ):
        work(request(Job(), study="mine"))


@pytest.fixture(scope="module")
def begun(store_templates: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both stores, in which the study mine has been found on a CPU."""
    folder = tmp_path_factory.mktemp("begun")
    shutil.copytree(store_templates, folder, dirs_exist_ok=True)
    with contextlib.chdir(folder):
        max_batch(asked(max_batch_size=8, confirm_steps=0), runner=Named())
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["theirs"], "STUDY: got theirs, expected a study in sqlite:///optuna.db, such as mine"),
        (["mine", "--workers", "0"], "--workers: got '0', expected a whole number of 1 or more"),
        (["mine", "--workers", "2", "--device", "cpu"], "--device cannot be used with several workers"),
        (["mine", DIGITS, "--workers", "2", "--logs", "mlflow.db"], "--logs: got mlflow.db, which cannot be created"),
        (["mine", DIGITS, "--workers", "2", "--logs", "x" * 300], f"--logs: got {'x' * 300}, which cannot be created"),
        (["mine", "--logs", "here"], "--logs requires --workers 2 or more"),
        (["mine", "--launcher", "pigeon"], "--launcher: got 'pigeon', expected one of local, slurm, ray"),
        (["mine", "--sbatch", "time=8:00:00"], "--sbatch requires --launcher slurm"),
        (["mine", "--sbatch", "a b=1"], "--sbatch: got 'a b=1', expected an option of sbatch, such as partition=gpu"),
        (
            ["mine", "--launcher", "slurm"],
            "--storage: got sqlite:///optuna.db with --launcher slurm on other machines, expected a",
        ),
        (
            ["mine", "--launcher", "slurm", "--storage", "/shared/optuna.log"],
            "got sqlite:///mlflow.db with --launcher slurm on other machines, expected a server",
        ),
        (
            ["mine", "--launcher", "slurm", "--storage", "postgresql+psycopg://u:hunter2@nowhere/x"],
            "got sqlite:///mlflow.db with --launcher slurm on other machines, expected a server",
        ),
        (
            ["mine", "--launcher", "slurm", "--storage", "postgresql://127.0.0.1/x", "--tracking-uri", "http://h:1"],
            "--storage: got postgresql://127.0.0.1/x with --launcher slurm on other machines",
        ),
        (
            ["mine", "--launcher", "ray"],
            "--storage: got sqlite:///optuna.db with --launcher ray on other machines, expected a",
        ),
        (
            ["mine", "--launcher", "ray", "--storage", "postgresql://192.0.2.1/x", "--tracking-uri", "http://192.0.2.1"],
            "RAY_ADDRESS: got nowhere, expected host:port of a running Ray cluster that has this",
        ),
        (
            ["mine", "--launcher", "slurm", "--storage", "postgresql://192.0.2.1/x", "--tracking-uri", "http://192.0.2.1"],
            "--launcher slurm requires sbatch, srun, squeue, scancel.",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_told_in_one_line_and_nothing_is_started(
    arguments: list[str], message: str, amp_track: Command, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(begun, Path.cwd(), dirs_exist_ok=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    monkeypatch.setenv("PATH", "")  # a machine may have SLURM
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    before = sorted(Path.cwd().iterdir())
    done = amp_track("worker", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line
    assert sorted(Path.cwd().iterdir()) == before


@pytest.mark.usefixtures("found")
def test_the_address_of_the_study_may_come_from_the_environment(
    amp_track: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.rename("optuna.db", "elsewhere.db")
    assert amp_track("report", "mine").returncode == 2
    monkeypatch.setenv("AMP_TRACK_STORAGE", "sqlite:///elsewhere.db")
    assert amp_track("report", "mine").returncode == 0
    assert (
        "--storage: sqlite:///nowhere.db holds no studies"
        in amp_track("report", "mine", "--storage", "sqlite:///nowhere.db").stderr
    )


def test_a_study_and_its_workers_use_the_experiment_that_was_given() -> None:
    found = max_batch(asked(experiment="mine", max_batch_size=9), runner=SimulatedRunner())
    assert client().get_experiment(found.experiment_id).name == "mine"
    assert client().get_experiment_by_name("amp_track") is None

    client().delete_run(found.run_id)
    joined = work(named("mine"), runner=SimulatedRunner())
    assert isinstance(joined, MaxBatchResult)
    assert joined.run_id != found.run_id
    assert joined.experiment_id == found.experiment_id
    assert client().get_experiment_by_name("amp_track") is None
