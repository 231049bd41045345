"""How a command with any input has to end, whatever that is."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from simulated import SimulatedRunner
from support import Done

from amp_track import cli
from amp_track.runner.runner import JobRunner
from amp_track.session import session

ENDS = {0, 1, 2, 3, 130}
_OF_OURS = re.compile(r'File "[^"]*/(amp_track|mlflow|optuna|sqlalchemy|alembic)/')
"""A frame of a traceback that tells users nothing about their own code."""

Attempt = Callable[..., Done]
# The same cases each time, so that a failure is the change's; `make fuzz` draws new ones.
each_case = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    print_blob=True,
    derandomize=os.environ.get("HYPOTHESIS_PROFILE") != "fuzz",
)
"""One fixture serves all examples of a test, each with a folder of its own; a command that succeeds takes a while."""


@pytest.fixture
def attempt(amp_track: Callable[..., Done], clean_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """Run a command in a new folder, which `prepare` has filled, and check how it ends.

    Its jobs run on a simulated device. `may_write`: a library changes the folder even if the command is rejected.
    """
    monkeypatch.setattr(session, "JobRunner", simulated_runner())
    count = 0

    def run(
        *arguments: str,
        environment: Mapping[str, str] = {},
        prepare: Callable[[Path], object] = lambda folder: None,
        may_write: bool = False,
    ) -> Done:
        nonlocal count
        count += 1
        folder = clean_folder / str(count)  # a new one each time: MLflow keeps a store open by its address
        folder.mkdir()
        monkeypatch.chdir(folder)
        prepare(folder)
        before = contents(folder)
        with monkeypatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
            for name, value in environment.items():
                patch.setenv(name, value)
            done = amp_track(*arguments)
        gc.unfreeze()  # a command keeps what it has imported for good, and this process runs hundreds
        check(done, as_json=_asks_for_json(arguments))
        if done.returncode == 2 and not may_write:
            assert contents(folder) == before, "bad input writes nothing"
        monkeypatch.chdir(clean_folder)
        shutil.rmtree(folder)
        return done

    return run


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Return whether `--json` is a flag there, and not the value of one."""
    before = ("", *arguments)
    return any(
        word == "--json" and (not last.startswith("--") or last in cli._SWITCHES or "=" in last)
        for last, word in zip(before, arguments, strict=False)
    )


def check(done: Done, *, as_json: bool) -> None:
    """Assert that a command ended as a user may expect, whatever it was given."""
    assert done.returncode in ENDS, done
    assert not _OF_OURS.search(done.stderr), done.stderr
    assert "Error in sys.excepthook" not in done.stderr
    if done.returncode == 0:
        assert done.stdout
    if done.stdout and as_json and "Usage: amp-track" not in done.stdout:  # --help wins
        json.loads(done.stdout, parse_constant=_reject)
    if done.returncode == 2:
        *before, last = done.stderr.splitlines()
        assert last.startswith("amp-track: "), done.stderr
        assert not before or before[0] == "Traceback (most recent call last):", done.stderr
        assert not done.stdout


def _reject(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def contents(folder: Path) -> dict[str, bytes]:
    """Return what each file of a folder holds; of a link, where it leads; of anything else, what it is."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                content = os.fsencode(os.readlink(path))
            else:
                content = path.read_bytes() if stat.S_ISREG(mode) else str(stat.S_IFMT(mode)).encode()
            found[str(path.relative_to(folder))] = content
    return found


def simulated_runner() -> type[JobRunner]:
    """Return a sandbox whose jobs a simulated device runs; a fresh process inspects device and workload, and ends."""
    simulated = SimulatedRunner(samples=8)

    class Inspecting(JobRunner):
        """Runs nothing but the inspection."""

        run, measure, forecast = simulated.run, simulated.measure, simulated.forecast

    return Inspecting
