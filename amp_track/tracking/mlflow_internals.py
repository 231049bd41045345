"""The private parts of MLflow that the runs need, in one place. Each function says what breaks when they change."""

from __future__ import annotations

import functools
from pathlib import Path

import mlflow
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from amp_track.stores import sqlite_files


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


def load_store() -> None:
    """Import and prepare what opens a database of MLflow's, which takes half a second.

    Should the module move, no command can start.
    """
    import sqlalchemy.orm
    from mlflow.store.tracking import sqlalchemy_store  # noqa: F401

    sqlalchemy.orm.configure_mappers()


@functools.cache
def empty_store() -> tuple[str, ...]:
    """Return the statements that make MLflow's tables in SQLite; () where MLflow cannot make them in memory.

    MLflow makes them in sixty steps, each of which SQLite writes to the disk: six seconds on a slow one, and a process
    killed between two of them leaves a store that can never be opened. Should `_initialize_tables` change, MLflow makes
    the tables itself, and that is all.
    """
    import sqlalchemy
    from sqlalchemy.pool import StaticPool

    load_store()  # by which MLflow knows its tables
    engine = sqlalchemy.create_engine("sqlite://", poolclass=StaticPool)  # one connection, so one database in memory
    try:
        from mlflow.store.db.utils import _initialize_tables

        _initialize_tables(engine)  # type: ignore[no-untyped-call]
        connection = engine.raw_connection()
        try:
            return sqlite_files.script_of(connection.driver_connection)  # type: ignore[arg-type]
        finally:
            connection.close()
    except (ImportError, AttributeError, TypeError, sqlalchemy.exc.SQLAlchemyError):
        return ()
    finally:
        engine.dispose()


def make_store(file: Path) -> None:
    """Make MLflow's tables in an SQLite file, all or none. A file that has tables stays as it is."""
    if not sqlite_files.read(file).tables:
        sqlite_files.make_tables(file, empty_store())


def missing_tables(uri: str) -> set[str]:
    """Return the tables of the installed MLflow that a database lacks which has some of them.

    MLflow would take it for a new one, and upgrade or mend it without being asked. Should `Base` move, it does so.
    """
    from mlflow.store.db.base_sql_model import Base
    from mlflow.store.tracking.dbmodels import models  # noqa: F401  # by which Base knows the tables

    missing = set(Base.metadata.tables) - _tables(uri)
    return missing if "experiments" not in missing else set()


def has_tables(uri: str) -> bool:
    """Return whether a database, which is there, is a store of MLflow. Should its tables be renamed, none is."""
    return "experiments" in _tables(uri)


def _tables(uri: str) -> set[str]:
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri)
    try:
        return set(sqlalchemy.inspect(engine).get_table_names())
    finally:
        engine.dispose()
