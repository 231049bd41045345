"""The private parts of MLflow that the runs need, in one place. Each function says what breaks when they change."""

from __future__ import annotations

import functools

import mlflow
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository


@functools.cache
def context_tags() -> dict[str, str]:
    """Return the tags of user and source as MLflow's own `start_run` records them.

    Should the registry change, the columns User and Source of the UI become empty, or no run can be made.
    """
    from mlflow.tracking.context import registry

    return dict(registry.resolve_tags())


def delete_artifact(client: mlflow.MlflowClient, run_id: str, file: str) -> None:
    """Delete one artifact of a run, which MlflowClient cannot, but the repository behind it can.

    Should `get_artifact_repository` move, the import of this module fails.
    """
    uri = client.get_run(run_id).info.artifact_uri
    repository = get_artifact_repository(uri, tracking_uri=client.tracking_uri)
    repository.delete_artifacts(file)  # type: ignore[no-untyped-call]
