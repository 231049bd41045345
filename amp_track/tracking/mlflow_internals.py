"""Access private parts of MLflow, all in this module. Each function documents what breaks if they change."""

from __future__ import annotations

import functools
from pathlib import Path

import mlflow
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from amp_track.stores import sqlite_files


@functools.cache
def context_tags() -> dict[str, str]:
    """Return the tags of user and source that MLflow's own `start_run` sets.

    If the registry changes, the columns User and Source of the UI become empty, or no run can be created.
    """
    from mlflow.tracking.context import registry

    return dict(registry.resolve_tags())


def delete_artifact(client: mlflow.MlflowClient, run_id: str, file: str) -> None:
    """Delete one artifact of a run through its repository, because MlflowClient has no method for it.

    If `get_artifact_repository` moves, the import of this module fails.
    """
    uri = client.get_run(run_id).info.artifact_uri
    repository = get_artifact_repository(uri, tracking_uri=client.tracking_uri)
    repository.delete_artifacts(file)  # type: ignore[no-untyped-call]


def load_store() -> None:
    """Import and prepare MLflow's database store, which takes half a second.

    If the module moves, no command can start.
    """
    import sqlalchemy.orm
    from mlflow.store.tracking import sqlalchemy_store  # noqa: F401

    sqlalchemy.orm.configure_mappers()


@functools.cache
def empty_store() -> tuple[str, ...]:
    """Return the SQL statements that create MLflow's tables in SQLite; () if this does not work in memory.

    MLflow creates them in sixty steps with a disk write each: that takes six seconds on a slow disk, and a process that
    is killed between two steps leaves a store that can never be opened. If `_initialize_tables` changes, MLflow creates
    the tables itself.
    """
    import sqlalchemy
    from sqlalchemy.pool import StaticPool

    load_store()  # registers MLflow's tables
    engine = sqlalchemy.create_engine("sqlite://", poolclass=StaticPool)  # one connection: one database in memory
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
    """Create MLflow's tables in an SQLite file, all or none. Do not change a file that has tables."""
    if not sqlite_files.read(file).tables:
        sqlite_files.make_tables(file, empty_store())


def missing_tables(uri: str) -> set[str]:
    """Return the tables of the installed MLflow that are missing in a database that has some of them.

    MLflow would treat it as a new one and alter it unasked. If `Base` moves, this check fails.
    """
    from mlflow.store.db.base_sql_model import Base
    from mlflow.store.tracking.dbmodels import models  # noqa: F401  # registers the tables in Base

    missing = set(Base.metadata.tables) - _tables(uri)
    return missing if "experiments" not in missing else set()


def has_tables(uri: str) -> bool:
    """Return whether an existing database is an MLflow store. If its tables are renamed, none is."""
    return "experiments" in _tables(uri)


def _tables(uri: str) -> set[str]:
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri)
    try:
        return set(sqlalchemy.inspect(engine).get_table_names())
    finally:
        engine.dispose()
