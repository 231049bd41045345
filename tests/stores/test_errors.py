"""One-line messages about errors of databases."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from simulated import SimulatedRunner
from sqlalchemy import event
from sqlalchemy.engine import Engine
from support import DIGITS, request, stores

from amp_track.commands.max_batch import max_batch
from amp_track.commands.train import train
from amp_track.config.job import Job, JobFolder
from amp_track.records.errors import StoreFailed, TargetFailed
from amp_track.records.events import CheckpointWritten, Event
from amp_track.records.result import JobResult, JobStatus
from amp_track.stores.addresses import DEFAULT_STORAGE, DEFAULT_TRACKING_URI, StoreAddress
from amp_track.stores.errors import in_one_line
from amp_track.study import opening


@pytest.mark.usefixtures("fresh_stores")
def test_a_message_of_a_damaged_database_that_is_no_text_is_told() -> None:
    """SQLite names the damaged object, which may not be UTF-8: Python's sqlite3 then raises this error."""

    def read(connection: sqlite3.Connection, record: object) -> None:
        b"malformed database schema (\x96uns)".decode()

    mlflow, optuna = map(StoreAddress.parse, (DEFAULT_TRACKING_URI, DEFAULT_STORAGE))
    event.listen(Engine, "connect", read)
    try:
        with pytest.raises(StoreFailed, match=f"^{optuna}: cannot read its contents"), in_one_line(mlflow, optuna):
            opening.open_existing_storage(optuna.url)
    finally:
        event.remove(Engine, "connect", read)


@pytest.fixture
def rollback_journal() -> Iterator[None]:
    """Open SQLite databases with their default journal: without one, as in other tests, no deletion is noticed."""

    def set_up(connection: sqlite3.Connection, record: object) -> None:
        connection.execute("PRAGMA journal_mode = DELETE")

    event.listen(Engine, "connect", set_up)
    yield
    event.remove(Engine, "connect", set_up)


@pytest.mark.usefixtures("fresh_stores", "rollback_journal")
@pytest.mark.parametrize("file", ["mlflow.db", "optuna.db", pytest.param("optuna.log", marks=pytest.mark.nightly)])
def test_a_store_that_is_gone_is_not_said_to_keep_what_was_measured(file: str) -> None:
    def lose_the_store(job: Job) -> None:
        Path(file).unlink()

    asked = request(Job(workload=DIGITS), precisions=("fp32",), max_batch_size=8)
    storage = "optuna.log" if file == "optuna.log" else stores()["storage"]
    asked = dataclasses.replace(asked, stores=dataclasses.replace(asked.stores, storage=storage))
    with pytest.raises(StoreFailed, match=rf"{file}:? .*([Pp]ut it back|[Rr]estore)") as raised:
        max_batch(asked, runner=SimulatedRunner(fails=lose_the_store))
    assert "kept" not in str(raised.value)
    assert "resume" not in str(raised.value)


class LosesTheStore(SimulatedRunner):
    """A runner that writes a checkpoint; then its job fails, after the store of its run was deleted or not, or ends."""

    deletes: bool = True
    ends: JobStatus | None = None

    def run(self, job: Job, on_event: Callable[[Event], None], *, folder: JobFolder | None = None) -> JobResult:
        assert folder is not None
        (checkpoint := Path(folder.path, "step-1.pt")).write_bytes(b"weights")
        on_event(CheckpointWritten(file=str(checkpoint), step=1, is_last=True, is_best=False))
        if self.deletes:
            Path("mlflow.db").unlink()
        if self.ends is not None:
            return JobResult(status=self.ends, message="it ended", wall_seconds=1.0)
        raise sqlite3.OperationalError("of another store")


@pytest.mark.usefixtures("fresh_stores")
@pytest.mark.parametrize("deletes", [False, True])
def test_a_run_is_offered_for_resumption_unless_its_store_is_gone(
    deletes: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = LosesTheStore()
    runner.deletes = deletes
    with pytest.raises(StoreFailed):
        train(request(Job(workload=DIGITS, precision="fp32")), runner=runner)
    assert ("resume with: " in capfd.readouterr().err) == (not deletes)


@pytest.mark.usefixtures("fresh_stores")
@pytest.mark.parametrize("status", [JobStatus.TIMED_OUT, JobStatus.CRASHED])
def test_a_training_that_ended_early_is_offered_for_resumption_in_its_stores(
    status: JobStatus, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = LosesTheStore()
    runner.deletes, runner.ends = False, status
    with pytest.raises(TargetFailed):
        train(request(Job(workload=DIGITS, precision="fp32"), tracking_uri="sqlite:///./mlflow.db"), runner=runner)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("resume with: ")]
    assert line.endswith(" --tracking-uri sqlite:///./mlflow.db")
