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
from amp_track.study.database import SharedStorage
from amp_track.study.journal import SharedJournal
from amp_track.study.study_lock import alone

Storage = SharedStorage | SharedJournal
"""What several search workers share, and each of them opens."""

# Constraints and heartbeats are experimental, stable enough, and have no other interface in Optuna 5.
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
optuna.logging.set_verbosity(optuna.logging.ERROR)  # failures are ours to report
logging.getLogger("alembic").setLevel(logging.WARNING)


def warm_up(url: str) -> None:
    """Do what takes a while before the database at `url` can be opened, by making one in memory. Writes nothing."""
    if addresses.journal_file(url) is None:
        _statements()


def open_storage(url: str) -> Storage:
    """Return the storage at `url`, which the command has checked, with its tables made: all of them or none.

    Raises:
        BadInput: another version of Optuna has made the storage, or it is damaged. Nothing is written then.
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
                skip_table_creation=file is not None,  # else it would mend another version's before it complains
            )
        except RuntimeError as error:
            raise _of_another_version(url, error) from None
    if file is not None and (missing := optuna_internals.tables() - sqlite_files.read(file).tables):
        storage.close()
        raise _lacking(url, missing)
    return storage


def _of_another_version(url: str, error: RuntimeError) -> BadInput:
    return BadInput(f"--storage: got {masking.masked(url)}, expected one of this version; {error}")


def _empty(url: str) -> BadInput:
    return BadInput(
        f"--storage: got {masking.masked(url)}, expected a storage that holds studies, and there is none yet; "
        "name another, or make a study with amp-track max-batch"
    )


def _lacking(url: str, missing: set[str]) -> BadInput:
    return BadInput(
        f"--storage: got {masking.masked(url)}, which lacks the table {min(missing)}, expected all that Optuna "
        "makes; restore a copy of it, or name another"
    )


def open_existing_storage(url: str) -> Storage:
    """Return the storage at `url`, which the command has checked, to read what it holds. Writes nothing.

    Raises:
        BadInput: there is none yet, another version of Optuna has made it, or it is damaged.
    """
    if (journal_file := addresses.journal_file(url)) is not None:
        if not journal_file.exists() or not journal_file.stat().st_size:  # to open it would make it
            raise _empty(url)
        return SharedJournal(journal_file)
    file = addresses.sqlite_file(url)
    if file is not None:  # to connect to a file would make it
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
    """Return the statements that make Optuna's tables in SQLite, where one is killed between two of its own steps."""
    storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs={"poolclass": StaticPool})  # in memory
    connection = storage.engine.raw_connection()
    try:
        return sqlite_files.script_of(connection.driver_connection)  # type: ignore[arg-type]
    finally:
        connection.close()
        storage.engine.dispose()


@contextmanager
def reading(url: str) -> Iterator[Storage]:
    """Open the storage at `url`, which the command has checked, for the block. Raises BadInput if there is none yet."""
    storage = open_existing_storage(url)
    try:
        yield storage
    finally:
        storage.close()


def study_names(storage: Storage) -> list[str]:
    """Return the names of all studies of a storage."""
    return optuna.get_all_study_names(storage)


def load_study(name: str, storage: Storage) -> optuna.Study | None:
    """Return a study; None if there is none of that name."""
    try:
        return optuna.load_study(study_name=name, storage=storage.cached)
    except KeyError:
        return None
