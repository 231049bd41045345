"""Open a storage of studies, a database or a journal file: to write (its tables are made) or to read."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
import sqlalchemy
from sqlalchemy.pool import StaticPool

from amp_track.records import masking
from amp_track.records.errors import BadInput
from amp_track.stores import addresses, sqlite_files
from amp_track.study import database, optuna_internals
from amp_track.study.database import SharedStorage, alone
from amp_track.study.journal import SharedJournal

Storage = SharedStorage | SharedJournal
"""A storage that several search workers share."""

# Constraints and heartbeats are experimental in Optuna 5, and there is no other interface.
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
optuna.logging.set_verbosity(optuna.logging.ERROR)  # amp_track reports failures itself
logging.getLogger("alembic").setLevel(logging.WARNING)


def warm_up(url: str) -> None:
    """Import and prepare everything that opening the database at `url` needs, which takes a while. Write nothing."""
    if addresses.journal_file(url) is None:
        _statements()


def open_storage(url: str) -> Storage:
    """Open the storage at `url`, already checked, and create its tables: all of them or none.

    Raises:
        BadInput: another version of Optuna created the storage, or it is damaged. Nothing is written then.
    """
    if (journal_file := addresses.journal_file(url)) is not None:
        return SharedJournal(journal_file)
    times = database.TIMES
    file = addresses.sqlite_file(url)
    with alone(url, "tables"):
        if file is not None and not sqlite_files.read(file).tables:
            sqlite_files.make_tables(file, _statements())
        try:
            storage = SharedStorage(
                url,
                engine_kwargs=database.engine_arguments(url),
                heartbeat_interval=times.heartbeat,
                grace_period=times.grace,
                skip_table_creation=file is not None,  # else Optuna alters another version's tables
            )
        except RuntimeError as error:
            raise _of_another_version(url, error) from None
    if file is not None and (missing := optuna_internals.tables() - sqlite_files.read(file).tables):
        storage.close()
        raise _lacking(url, missing)
    return storage


def _of_another_version(url: str, error: RuntimeError) -> BadInput:
    return BadInput(f"--storage: {masking.masked(url)} was created by another version of Optuna. {error}")


def _empty(url: str) -> BadInput:
    return BadInput(
        f"--storage: {masking.masked(url)} holds no studies yet. Use another storage, or create a study with "
        "amp-track max-batch."
    )


def _lacking(url: str, missing: set[str]) -> BadInput:
    return BadInput(
        f"--storage: {masking.masked(url)} has no table {min(missing)}, which Optuna needs. Restore a backup, or use "
        "another storage."
    )


def open_existing_storage(url: str) -> Storage:
    """Open the storage at `url`, already checked, for reading. Write nothing.

    Raises:
        BadInput: there is no storage yet, another version of Optuna created it, or it is damaged.
    """
    if (journal_file := addresses.journal_file(url)) is not None:
        if not journal_file.exists() or not journal_file.stat().st_size:  # opening it would create it
            raise _empty(url)
        return SharedJournal(journal_file)
    file = addresses.sqlite_file(url)
    if file is not None:  # connecting to a file would create it
        tables = set(sqlite_files.read(file).tables)
    else:
        engine = sqlalchemy.create_engine(url, **database.engine_arguments(url))
        tables = set(sqlalchemy.inspect(engine).get_table_names())
        engine.dispose()
    if not tables & optuna_internals.tables():
        raise _empty(url)
    if missing := optuna_internals.tables() - tables:
        raise _lacking(url, missing)
    try:
        return SharedStorage(url, engine_kwargs=database.engine_arguments(url), skip_table_creation=True)
    except RuntimeError as error:
        raise _of_another_version(url, error) from None


@functools.cache
def _statements() -> tuple[str, ...]:
    """Return the SQL statements that create Optuna's tables in SQLite, to run them in one transaction."""
    storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs={"poolclass": StaticPool})  # in memory
    connection = storage.engine.raw_connection()
    try:
        return sqlite_files.script_of(connection.driver_connection)  # type: ignore[arg-type]
    finally:
        connection.close()
        storage.engine.dispose()


@contextmanager
def reading(url: str) -> Iterator[Storage]:
    """Open the storage at `url`, already checked, for reading in a block. Raise BadInput if there is none yet."""
    storage = open_existing_storage(url)
    try:
        yield storage
    finally:
        storage.close()


def study_names(storage: Storage) -> list[str]:
    return optuna.get_all_study_names(storage)


def load_study(name: str, storage: Storage) -> optuna.Study | None:
    """Return the study of this name, or None."""
    try:
        return optuna.load_study(study_name=name, storage=storage.cached)
    except KeyError:
        return None
