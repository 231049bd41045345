"""Golden files of the command line: output, exit codes, MLflow runs and report pages.

The device is simulated; the stores are real. `pytest tests/golden --snapshot-update` rewrites the files.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from goldens import PageText, TextFile, stored_runs, transcript
from simulated import SimulatedRunner
from support import WORKLOADS, Done
from syrupy.assertion import SnapshotAssertion

from amp_track.config.job import Job, JobFolder
from amp_track.memory_plan import gpus
from amp_track.records.events import Event
from amp_track.records.result import JobResult, JobStatus
from amp_track.session import session

pytestmark = pytest.mark.usefixtures("fresh_stores")
Check = Callable[[str, str], None]
Command = Callable[[str], str]
Simulate = Callable[..., None]
IN_BUDGET = "tiny.py --memory-budget 8MiB"
BAD_INPUTS = (
    "trian",
    "train missing.py",
    "train tiny.py --batch 4",
    "train tiny.py --batch-size 0",
    "train tiny.py --precision fp64",
    "train tiny.py --precision tf32",
    "train tiny.py --memory-budget 8MB/s",
    "train tiny.py --epochs 2 --steps 3",
    "train --resume 0123456789abcdef0123456789abcdef",
    "train tiny.py --tracking-uri sqlite:////missing/mlflow.db",
    "max-batch tiny.py --precision fp32,",
    "max-batch tiny.py --headroom 100%",
    "max-batch tiny.py --storage nothing://here",
    "search tiny.py --trials 0",
    "search tiny.py --precision bf16 --seeds 3",
    "compare tiny.py --vary width",
    "plan tiny.py --effective-batch-size 1024",
    "plan tiny.py --gpu Abacus",
    "report nothing",
    "report nothing --out page.pdf",
    "worker nothing",
    "worker nothing --sbatch time=60",
    "ui nothing",
)


@pytest.fixture
def check(snapshot: SnapshotAssertion, subtests: pytest.Subtests) -> Check:
    """Compare a text with the golden file `name`. The test continues after a difference."""

    def compare(name: str, text: str) -> None:
        with subtests.test(name):
            assert text == snapshot(name=name, extension_class=TextFile)

    return compare


@pytest.fixture
def run(amp_track: Callable[..., Done]) -> Command:
    """Run a command line in a folder with a small workload, and return its transcript."""
    shutil.copy(WORKLOADS / "tiny.py", "tiny.py")
    return lambda line: transcript(line, amp_track(*line.split()))


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """Replace the runner of the next commands by a simulated device."""

    def replace(kind: type[SimulatedRunner] = SimulatedRunner, **settings: Any) -> None:
        monkeypatch.setattr(session, "JobRunner", lambda workload, **flags: kind(**settings))

    return replace


class Interrupted(SimulatedRunner):
    """A simulated device that gets Ctrl-C during the third job."""

    def run(self, job: Job, on_event: Callable[[Event], None], *, folder: JobFolder | None = None) -> JobResult:
        if len(self.jobs) == 2:
            raise KeyboardInterrupt
        return super().run(job, on_event, folder=folder)


def page() -> str:
    """Return the visible text of the only report page in the artifact store."""
    (file,) = Path.cwd().glob("mlruns/*/*/artifacts/report.html")
    return PageText(file.read_text(encoding="utf-8")).text


def test_train(run: Command, check: Check, simulate: Simulate) -> None:
    simulate(streams=True)
    check("text", run(f"train {IN_BUDGET} --precision bf16"))
    check("runs", stored_runs())
    simulate()
    check("json", run(f"train {IN_BUDGET} --precision amp --batch-size 32 --json"))


def test_fit(run: Command, check: Check, simulate: Simulate) -> None:
    simulate(planned_bytes_per_sample={"fp32": 40_000, "amp": 21_000}, longer_bytes=400_000)
    line = f"max-batch {IN_BUDGET} --precision fp32,amp"
    check("text", run(line))
    check("runs", stored_runs())
    check("page", page())
    check("json", run(f"{line} --json"))


def test_search(run: Command, check: Check, simulate: Simulate) -> None:
    simulate(planned_bytes_per_sample={"fp32": 40_000, "bf16": 20_000})
    line = f"search {IN_BUDGET} --precision fp32,bf16 --trials 4 --seeds 2 --study mine"
    check("text", run(line))
    check("runs", stored_runs())
    check("page", page())
    check("json", run(f"{line} --json"))


def test_compare(run: Command, check: Check, simulate: Simulate) -> None:
    simulate()
    line = "compare tiny.py --precision fp32,bf16 --vary width=8,16 --seeds 2 --study widths"
    check("text", run(line))
    check("runs", stored_runs())
    check("page", page())
    check("json", run(f"{line} --json"))


def test_dtypes(run: Command, check: Check) -> None:
    check("text", run("dtypes tiny.py --device cpu --precision bf16"))
    check("json", run("dtypes tiny.py --device cpu --precision bf16 --json"))


def test_plan(run: Command, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = dataclasses.replace(gpus.USUAL_KERNELS, blas_lt_workspace_bytes=0)  # depends on the release of torch
    monkeypatch.setattr(gpus, "USUAL_KERNELS", kernels)
    monkeypatch.setattr(gpus, "_blas_lt_workspace_bytes", lambda: 0)
    check("text", run("plan tiny.py --memory-budget 64MiB --gpu T4 --precision fp32,bf16"))
    check("json", run("plan tiny.py --memory-budget 64MiB --precision fp32 --track --json"))
    check("runs", stored_runs())


def test_bad_input(run: Command, check: Check, simulate: Simulate, clean_folder: Path) -> None:
    simulate()
    check("text", "\n".join(map(run, BAD_INPUTS)))
    assert sorted(file.name for file in clean_folder.iterdir()) == ["mlflow.db", "optuna.db", "tiny.py"]


def test_nothing_fits(run: Command, check: Check, simulate: Simulate) -> None:
    simulate()
    check("max-batch", run("max-batch tiny.py --memory-budget 1MiB --precision fp32,bf16"))
    check("train", run(f"train {IN_BUDGET} --precision fp32 --batch-size 1000 --json"))


def test_a_workload_that_fails(run: Command, check: Check, simulate: Simulate) -> None:
    crash = JobResult(
        status=JobStatus.CRASHED, message="ValueError: the labels are off by one", traceback="Traceback …"
    )
    simulate(fails=lambda job: crash)
    check("max-batch", run(f"max-batch {IN_BUDGET} --precision fp32"))
    check("train", run(f"train {IN_BUDGET} --precision fp32 --json"))


def test_interrupt_report_and_work(run: Command, check: Check, simulate: Simulate) -> None:
    simulate(Interrupted)
    check("max-batch", run(f"max-batch {IN_BUDGET} --precision fp32 --study stopped"))
    check("runs", stored_runs())
    check("report", run("report stopped --out page.html"))
    simulate()
    check("worker", run("worker stopped tiny.py"))
