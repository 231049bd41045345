import json
import time
from pathlib import Path
from typing import Any

import mlflow
import pytest
from support import DIGITS, request, stores

from amp_track.commands.train import train
from amp_track.config.job import Job
from amp_track.records.events import CheckpointWritten, StepsRecorded
from amp_track.records.result import JobResult, JobStatus, LayerGradients, ScaleReport
from amp_track.tracking import Run, Tracker
from amp_track.tracking.tags import PROCESS
from amp_track.workers.liveness import this_process

pytestmark = pytest.mark.usefixtures("fresh_stores")
GONE = {"pid": 2**22 + 1}
ELSEWHERE = {"host": "elsewhere", "boot_id": "another"} | GONE


def status(client: mlflow.MlflowClient, run: Run) -> str:
    return str(client.get_run(run.run_id).info.status)


def test_a_run_ends_as_its_block_does(client: mlflow.MlflowClient) -> None:
    tracker = Tracker(stores()["tracking_uri"])
    with tracker.run("good", tags={}) as good:
        assert status(client, good) == "RUNNING"
    with pytest.raises(ZeroDivisionError), tracker.run("bad", tags={}) as bad:
        _ = 1 / 0
    with pytest.raises(KeyboardInterrupt), tracker.run("stopped", tags={}) as stopped:
        raise KeyboardInterrupt
    assert [status(client, run) for run in (good, bad, stopped)] == ["FINISHED", "FAILED", "KILLED"]
    assert client.get_run(stopped.run_id).data.tags["amp_track.status"] == "interrupted"


@pytest.mark.parametrize(("ended", "then"), [("KILLED", "RUNNING"), ("FAILED", "RUNNING"), ("FINISHED", "FINISHED")])
def test_the_run_of_a_study_goes_on_while_one_of_its_workers_does(
    ended: str, then: str, client: mlflow.MlflowClient
) -> None:
    """Another worker that was interrupted has ended it; who begins the next trial says that it runs."""
    tracker = Tracker(stores()["tracking_uri"])
    with tracker.run("study", tags={}) as study:
        client.set_terminated(study.run_id, ended)
        client.set_tag(study.run_id, PROCESS, "of the other worker")
        with tracker.run("trial", tags={}, parent=study):
            assert status(client, study) == then
            is_ours = client.get_run(study.run_id).data.tags[PROCESS] != "of the other worker"
            assert is_ours == (ended != "FINISHED")
    assert status(client, study) == "FINISHED"


def test_the_run_of_a_study_is_interrupted_no_more_once_it_goes_on(client: mlflow.MlflowClient) -> None:
    """Also if another of its workers is interrupted during the last trial of this one."""

    tracker = Tracker(stores()["tracking_uri"])
    run_id = client.create_run("0").info.run_id

    def outcome() -> str | None:
        return client.get_run(run_id).data.tags.get("amp_track.status")

    def interrupt_a_worker() -> None:
        with pytest.raises(KeyboardInterrupt), tracker.run("study", tags={}, run_id=run_id):
            raise KeyboardInterrupt
        assert outcome() == "interrupted"

    interrupt_a_worker()
    with tracker.run("study", tags={}, run_id=run_id) as study:
        assert outcome() is None
        interrupt_a_worker()
        with tracker.run("trial", tags={}, parent=study):
            assert outcome() is None
        interrupt_a_worker()
    assert (status(client, study), outcome()) == ("FINISHED", None)


def test_more_metrics_than_one_batch_takes_are_all_kept(client: mlflow.MlflowClient) -> None:
    changes = tuple((step, float(step)) for step in range(1, 2501))
    with Tracker(stores()["tracking_uri"]).run("many", tags={}) as run:
        run.event(StepsRecorded(first_step=3, losses=(0.5,) * 1500, scale_changes=changes), "accuracy")
    assert [(m.step, m.value) for m in client.get_metric_history(run.run_id, "amp/scale")] == list(changes)
    assert [m.step for m in client.get_metric_history(run.run_id, "train/step_loss")] == list(range(3, 1503))


def test_params_that_mlflow_run_has_logged_are_kept_beside_ours(client: mlflow.MlflowClient) -> None:
    tracker = Tracker(stores()["tracking_uri"])
    made = client.create_run("0")
    client.log_param(made.info.run_id, "batch_size", "auto")
    client.log_param(made.info.run_id, "precision", "bf16")
    with tracker.run("again", tags={}, run_id=made.info.run_id) as run:
        run.params({"batch_size": "525", "precision": "bf16", "seed": "0"})
    assert client.get_run(run.run_id).data.params == {
        "batch_size": "auto", "batch_size.resolved": "525", "precision": "bf16", "seed": "0",
    }  # fmt: skip


@pytest.mark.slow
def test_train_logs_what_it_promises(client: mlflow.MlflowClient) -> None:
    result = train(request(Job(workload=DIGITS, precision="amp", epochs=2)))
    run_id, job, job_result, found = result.run_id, result.job, result.job_result, result.inspection
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == job.params()
    assert run.data.params["batch_size"] == "64"
    metrics = run.data.metrics
    for name in (
        "train/loss", "eval/loss", "eval/accuracy", "time/wall_s", "time/train_s", "throughput/samples_per_s",
        "throughput/eval_samples_per_s", "memory/max_allocated_mib", "memory/max_reserved_mib",
        "memory/eval_max_allocated_mib", "memory/max_resident_mib", "amp/skipped_steps", "amp/final_scale",
    ):  # fmt: skip
        assert name in metrics, name
    assert [m.step for m in client.get_metric_history(run_id, "eval/accuracy")] == [1, 2]
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "amp/scale")] == [(0, 65536), (46, 65536)]
    assert job_result.scale == ScaleReport(initial=65536, final=65536, history=((0, 65536), (46, 65536)))
    assert metrics["amp/skipped_steps"] == job_result.skipped_steps == 0
    tags = run.data.tags
    assert tags["amp_track.status"] == "fits"
    assert tags["amp_track.kind"] == "train"
    assert tags["amp_track.device"] == found.hardware.name
    assert tags["amp_track.version.torch"] == dict(found.versions)["torch"]
    assert tags["amp_track.fp32_precision.cudnn.conv"] == "ieee"
    assert len(tags["mlflow.source.git.commit"]) == 40
    inputs = {item.dataset.name: item.dataset for item in run.inputs.dataset_inputs}
    assert set(inputs) == {"Digits-train", "Digits-eval"}
    assert inputs["Digits-train"].profile == '{"num_rows": 1437}'


def test_a_table_is_read_back_as_mlflows_own(client: mlflow.MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", stores()["tracking_uri"])  # load_table asks the fluent API
    with Tracker(stores()["tracking_uri"]).run("tables", tags={}) as run:
        for _ in range(2):  # the second takes the first one's place
            run.table("a.json", [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}])
        run.table("b.json", [{"step": 3}])
    found = client.load_table(client.get_run(run.run_id).info.experiment_id, "a.json", run_ids=[run.run_id])
    assert found.to_dict("list") == {"step": [1, 2], "loss": [0.5, 0.25]}
    tables = json.loads(client.get_run(run.run_id).data.tags["mlflow.loggedArtifacts"])
    assert [table["path"] for table in tables] == ["a.json", "b.json"]


def test_the_diagnosed_layers_of_a_training_that_is_interrupted_and_resumed_are_all_there_once(
    client: mlflow.MlflowClient, tmp_path: Path
) -> None:
    """Also those before a checkpoint, if the process is killed after it."""
    tracker = Tracker(stores()["tracking_uri"])

    def train_on(run: Run, *steps: int) -> None:
        for step in steps:
            looks = [
                LayerGradients(step=step, layer=layer, values=4, non_finite=0, underflowing=step % 4, zero=0)
                for layer in ("0", "1")
            ]
            run.event(StepsRecorded(first_step=step, losses=(), scale_changes=(), diagnosed=tuple(looks)), "accuracy")

    def stored() -> list[tuple[int, str, float]]:
        rows = tracker.diagnosed(run.run_id, tmp_path)
        return [(row["step"], row["layer"], row["underflowing"]) for row in rows]

    def expected(*steps: int) -> list[tuple[int, str, float]]:
        return [(step, layer, step % 4 / 4) for step in steps for layer in ("0", "1")]

    with pytest.raises(KeyboardInterrupt), tracker.run("run", tags={}) as run:  # noqa: PT012
        assert stored() == []
        train_on(run, 1, 2)
        (file := tmp_path / "step-2.pt").touch()
        run.event(CheckpointWritten(file=str(file), step=2, is_last=True, is_best=True), "accuracy")
        assert stored() == expected(1, 2)
        train_on(run, 3, 4)
        raise KeyboardInterrupt
    assert stored() == expected(1, 2, 3, 4)
    with tracker.run("run", tags={}, run_id=run.run_id) as resumed:
        resumed.resume({}, tracker.diagnosed(run.run_id, tmp_path))
        train_on(resumed, 3)
        resumed.job_result(JobResult(status=JobStatus.CRASHED))
        assert stored() == expected(1, 2, 3)
        train_on(resumed, 4, 5)
    assert stored() == expected(1, 2, 3, 4, 5)


def test_a_run_that_the_clock_overtakes_ends_when_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker(stores()["tracking_uri"])
    real = time.time
    with tracker.run("parent", tags={}) as parent, tracker.run("child", tags={}, parent=parent) as child:
        monkeypatch.setattr(time, "time", lambda: real() - 3600)
    for run_id in (parent.run_id, child.run_id):
        info = mlflow.MlflowClient(tracker.uri).get_run(run_id).info
        assert info.end_time == info.start_time


def made(client: mlflow.MlflowClient, process: dict[str, Any] | None, parent: str | None = None) -> str:
    """Make a RUNNING run of a process that differs from this one, or of none, and return its id."""
    tags = {"amp_track.process": json.dumps(this_process() | process)} if process is not None else {}
    tags |= {"mlflow.parentRunId": parent} if parent is not None else {}
    experiment = client.get_experiment_by_name("amp_track") or client.create_experiment("amp_track")
    run = client.create_run(getattr(experiment, "experiment_id", experiment), tags=tags)
    return str(run.info.run_id)


def test_what_the_next_command_ends(client: mlflow.MlflowClient) -> None:
    gone, elsewhere, users_own = made(client, GONE), made(client, ELSEWHERE), made(client, None)
    study, of_another_worker = made(client, GONE), made(client, GONE)
    at_work, killed = made(client, {}, study), made(client, GONE, study)
    also_killed = made(client, GONE, of_another_worker)
    with Tracker(stores()["tracking_uri"]).run("next", tags={}) as following:
        pass
    found = {run_id: client.get_run(run_id).info.status for run_id in (gone, elsewhere, users_own, study, at_work)}
    assert list(found.values()) == ["KILLED", "RUNNING", "RUNNING", "RUNNING", "RUNNING"]
    for run_id in (gone, killed, of_another_worker, also_killed):
        run = client.get_run(run_id)
        assert (run.info.status, run.data.tags["amp_track.status"]) == ("KILLED", "interrupted")
    assert client.get_run(following.run_id).info.status == "FINISHED"


def test_a_new_run_says_at_once_which_process_writes_it(client: mlflow.MlflowClient) -> None:
    with Tracker(stores()["tracking_uri"]).run("begins", tags={}) as run:
        tags = client.get_run(run.run_id).data.tags
    assert json.loads(tags["amp_track.process"]) == this_process()
