from pathlib import Path

import mlflow
import pytest
from mlflow.store.artifact import artifact_repository_registry
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from support import stores

from amp_track.records.errors import BadInput
from amp_track.records.events import CheckpointWritten
from amp_track.tracking import Run, Tracker, checkpoints

pytestmark = pytest.mark.usefixtures("fresh_stores")


def write(step: int, *, is_last: bool = True, is_best: bool = False, name: str | None = None) -> CheckpointWritten:
    file = Path("scratch") / (name or f"step-{step}.pt")
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"state of step {step}")
    return CheckpointWritten(file=str(file), step=step, is_last=is_last, is_best=is_best)


def stored(client: mlflow.MlflowClient, run: Run) -> list[str]:
    return sorted(Path(file.path).name for file in client.list_artifacts(run.run_id, "checkpoints"))


def fetched(client: mlflow.MlflowClient, run: Run) -> str:
    file, _ = checkpoints.fetch(client, run.run_id, Path("scratch"))
    return file.read_text()


def test_the_last_and_the_best_are_kept_and_no_other(client: mlflow.MlflowClient) -> None:
    with Tracker(stores()["tracking_uri"]).run("run", tags={}) as run:
        for event in (
            write(10), write(20), write(20, is_last=False, is_best=True, name="step-20-best.pt"), write(30), write(40),
        ):  # fmt: skip
            run.event(event, "accuracy")
            assert not Path(event.file).exists(), "it has been moved"
        assert stored(client, run) == ["step-20-best.pt", "step-40.pt"]
        assert fetched(client, run) == "state of step 40"
        checkpoints.keep(client, run.run_id, write(50, is_best=True))
        assert stored(client, run) == ["step-50.pt"]


def test_a_best_one_that_is_newer_is_resumed_from(client: mlflow.MlflowClient) -> None:
    with Tracker(stores()["tracking_uri"]).run("run", tags={}) as run:
        checkpoints.keep(client, run.run_id, write(10))
        checkpoints.keep(client, run.run_id, write(16, is_last=False, is_best=True))
        assert fetched(client, run) == "state of step 16"


def test_one_that_was_killed_while_it_was_stored_does_not_count(client: mlflow.MlflowClient) -> None:
    with Tracker(stores()["tracking_uri"]).run("run", tags={}) as run:
        checkpoints.keep(client, run.run_id, write(10))
        client.log_artifact(run.run_id, write(20).file, "checkpoints")  # and no more: no tag names it
        assert fetched(client, run) == "state of step 10"
        checkpoints.keep(client, run.run_id, write(30))
        assert stored(client, run) == ["step-30.pt"]


def test_one_that_is_missing_or_has_changed_since_is_rejected(client: mlflow.MlflowClient) -> None:
    with Tracker(stores()["tracking_uri"]).run("run", tags={}) as run:
        with pytest.raises(BadInput, match="has no checkpoint"):
            fetched(client, run)
        checkpoints.keep(client, run.run_id, write(10))
        client.log_artifact(run.run_id, write(99, name="step-10.pt").file, "checkpoints")
        with pytest.raises(BadInput, match="has changed since it was stored"):
            fetched(client, run)


class Undeletable(LocalArtifactRepository):
    """A real artifact store that cannot delete, as MLflow's HTTP and FTP stores cannot."""

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        raise NotImplementedError("no delete here")


def test_a_store_that_cannot_delete_is_warned_of_once_and_ends_no_training(
    client: mlflow.MlflowClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = artifact_repository_registry._artifact_repository_registry
    monkeypatch.setitem(registry._registry, "undeletable", lambda uri, *_, **__: Undeletable(uri.partition(":")[2]))
    client.create_experiment("kept", artifact_location=f"undeletable:{Path.cwd()}/kept")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "kept")
    with Tracker(stores()["tracking_uri"]).run("run", tags={}) as run:
        for step in (10, 20, 30):
            checkpoints.keep(client, run.run_id, write(step))
        assert stored(client, run) == ["step-10.pt", "step-20.pt", "step-30.pt"]
        assert fetched(client, run) == "state of step 30"
    (warning,) = caplog.records
    assert (warning.name, warning.levelname) == ("amp_track.tracking", "WARNING")
    assert warning.getMessage() == "older checkpoints stay in checkpoints: NotImplementedError: no delete here"
