"""Start search workers that stand still where a test wants them to, and read what they have left in both stores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from simulated import SimulatedRunner
from support import DIGITS, ROOT, request

from amp_track.commands.max_batch import max_batch
from amp_track.config.job import Job

WORKER = str(ROOT / "tests" / "integration" / "held_worker.py")
_LONGEST_SECONDS = 240


class HeldWorker:
    """A process that runs a command, on a simulated device, and stands still within some of its jobs."""

    def __init__(
        self, name: str, *arguments: str, holds: tuple[int, ...] = (), seconds: float = 0.0, times: str = "",
        prefix: tuple[str, ...] = (), folder: Path = Path(),
    ) -> None:  # fmt: skip
        self.name, self._folder = name, folder
        command = [*prefix, sys.executable, WORKER, name, ",".join(map(str, holds)), str(seconds), times, *arguments]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        self._stderr = folder / f"{name}.stderr"
        with self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=folder,
                env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip

    def __enter__(self) -> HeldWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait_until_it_holds(self, number: int) -> None:
        file = self._folder / f"{self.name}.holds.{number}"
        wait_for(lambda: file.exists() or self.process.poll() is not None)
        assert file.exists(), self.stderr

    def wait_until_it_says(self, text: str) -> None:
        wait_for(lambda: text in self.stderr or self.process.poll() is not None)
        assert text in self.stderr

    def let_go(self, number: int) -> None:
        (self._folder / f"{self.name}.goes.{number}").touch()

    def result(self) -> Any:
        """Wait until the command has ended well, and return what it printed."""
        output, _ = self.process.communicate(timeout=_LONGEST_SECONDS)
        assert self.process.returncode == 0, self.stderr
        assert "Traceback" not in self.stderr
        return json.loads(output)


def machine(name: str) -> tuple[str, ...]:
    """Return what makes a command believe that it runs on another machine, whose processes nobody sees from here."""
    return (
        "unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc",
        "sh", "-c", f'hostname {name}; exec "$@"', "sh",
    )  # fmt: skip


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def trials(study: str, url: str = "") -> list[FrozenTrial]:
    """Return the trials of a study, by default in the storage that commands take by default."""
    url = url or os.environ.get("AMP_TRACK_STORAGE", "sqlite:///optuna.db")
    if url.endswith(".log"):
        journal = optuna.storages.JournalStorage(JournalFileBackend(url))
        return optuna.load_study(study_name=study, storage=journal).trials
    storage = optuna.storages.RDBStorage(url)
    try:
        return optuna.load_study(study_name=study, storage=storage).trials
    finally:
        storage.engine.dispose()


def in_state(state: TrialState, study: str, url: str = "") -> list[FrozenTrial]:
    return [trial for trial in trials(study, url) if trial.state is state]


def client() -> mlflow.MlflowClient:
    """Return a client of the tracking store that commands take by default."""
    return mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])


def runs() -> list[mlflow.entities.Run]:
    experiments = [experiment.experiment_id for experiment in client().search_experiments()]
    return list(client().search_runs(experiments, max_results=1000))


def undisturbed(study: str = "alone", **stores: str) -> dict[str, int]:
    """Return the max batches that one search worker finds alone."""
    asked = request(Job(workload=DIGITS), precisions=("fp32", "bf16"), study=study, **stores)
    return max_batches(max_batch(asked, runner=SimulatedRunner()).as_json())


def max_batches(result: Any) -> dict[str, int]:
    """Return the largest batch at each precision, of what `fit --json` prints."""
    return {name: of["max_batch"] for name, of in result["precisions"].items() if "max_batch" in of}
