"""Writes wait on disk, are merged, and may be sent twice."""

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import get_args

import mlflow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import stores

from amp_track.tracking import writes
from amp_track.tracking.writes import (
    WRITES,
    CreateRun,
    EndRun,
    GoOn,
    LogBatch,
    LogCheckpoint,
    LogDatasets,
    LogFile,
    LogTable,
    LogText,
    ResumeRun,
    TagExperiment,
    Write,
)  # fmt: skip

names = st.text("abc/_", min_size=1, max_size=5)
texts = st.dictionaries(names, st.text(max_size=5), max_size=70)
rows = st.tuples(names, st.floats(), st.integers(0, 2**53), st.integers(0, 2**31))
batches = st.builds(LogBatch, metrics=st.lists(rows, max_size=5), params=texts, tags=texts)


def read_again(write: Write) -> Write:
    return WRITES.validate_python(json.loads(json.dumps(dataclasses.asdict(write))))


@given(batches)
def test_a_batch_is_read_as_it_was_written(batch: LogBatch) -> None:
    assert repr(read_again(batch)) == repr(batch), "by their text, since NaN differs from NaN"


@pytest.mark.usefixtures("fresh_stores")
def test_what_is_read_again_and_sent_twice_is_there_once(tmp_path: Path) -> None:
    client = mlflow.MlflowClient(stores()["tracking_uri"])
    run_id = client.create_run("0").info.run_id
    (file := tmp_path / "a.bin").write_bytes(b"x")
    sent: list[Write] = [
        ResumeRun(),
        GoOn(tags={"a": "b"}),
        TagExperiment(experiment_id="0", name="a", value="b"),
        LogBatch(
            metrics=[("loss", 0.5, 1000, 1), ("loss", math.nan, 1000, 2), ("loss", 0.5, 2000, 1)],
            params={"seed": "0"}, tags={"a": "b"},
        ),
        LogBatch(metrics=[("loss", 0.25, 3000, 3)]),
        LogDatasets(workload="a", workload_digest="b", digest="c", samples={"train": 3}),
        LogText(path="a.txt", text="b\u2603"),
        LogTable(path="a.json", text="{}"),
        LogFile(file=str(file), folder="files"),
        LogCheckpoint(file=str(file), step=3, is_last=True, is_best=True),
        EndRun(status="KILLED", end_time_ms=7_000),
    ]  # fmt: skip
    for write in map(read_again, sent):
        assert not isinstance(write, CreateRun)
        write.send(client, run_id)
        write.send(client, run_id)
    assert {type(write) for write in sent} == {*get_args(Write)} - {CreateRun}
    run = client.get_run(run_id)
    assert [(m.step, m.timestamp) for m in client.get_metric_history(run_id, "loss")] == [
        (1, 1000), (2, 1000), (1, 2000), (3, 3000),
    ]  # fmt: skip
    assert run.data.params == {"seed": "0"}
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "a.json", "type": "table"}]
    assert client.get_experiment("0").tags["a"] == "b"
    assert (run.info.status, run.info.end_time) == ("KILLED", 7_000)
    assert len(run.inputs.dataset_inputs) == 1
    assert [item.path for item in client.list_artifacts(run_id, "checkpoints")] == ["checkpoints/a.bin"]
    assert [item.path for item in client.list_artifacts(run_id, "files")] == ["files/a.bin"]


def test_a_run_is_not_killed_before_it_has_started() -> None:
    """The clock may have been set back before the command that ends it."""
    started = int(time.time() * 1000) + 3_600_000
    assert writes.killed(started)[1].end_time_ms == started
