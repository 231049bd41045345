"""The private parts of MLflow that the runs need, in one place. Each function says what breaks when they change."""

from __future__ import annotations

import functools
import os
from pathlib import Path

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


@functools.cache
def empty_store() -> bytes:
    """Return an SQLite file with MLflow's tables and nothing in them; b"" where MLflow cannot make it this way.

    MLflow makes them in sixty steps, each of which SQLite writes to the disk: six seconds on a slow one. In memory it
    is one. Should `_initialize_tables` change, MLflow makes the tables itself, and that is all.
    """
    import sqlalchemy
    from mlflow.store.tracking import sqlalchemy_store  # noqa: F401  # needed soon, and takes half a second to import
    from sqlalchemy.pool import StaticPool

    engine = sqlalchemy.create_engine("sqlite://", poolclass=StaticPool)  # one connection, so one database in memory
    try:
        from mlflow.store.db.utils import _initialize_tables

        _initialize_tables(engine)  # type: ignore[no-untyped-call]
        connection = engine.raw_connection()
        try:
            content: bytes = connection.driver_connection.serialize()  # type: ignore[union-attr]
        finally:
            connection.close()
    except (ImportError, AttributeError, TypeError, sqlalchemy.exc.SQLAlchemyError):
        return b""
    finally:
        engine.dispose()
    return content


def make_store(file: Path) -> None:
    """Make an SQLite file with MLflow's tables, whole or not at all. A file that is there stays as it is."""
    if file.exists() or not (content := empty_store()):
        return
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        new.write_bytes(content)
        os.link(new, file)  # unlike a rename, it never replaces what another program has made meanwhile
    except OSError:  # no such links here, or a file is there now: MLflow makes the tables that are missing
        return
    finally:
        new.unlink(missing_ok=True)
