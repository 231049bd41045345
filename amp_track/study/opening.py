"""Open a storage of studies, a database or a journal file: to write (its tables are made) or to read."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optuna
from sqlalchemy.pool import StaticPool

from amp_track.records.errors import BadInput
from amp_track.stores import databases, sqlite_files
from amp_track.stores.addresses import StoreAddress
from amp_track.study import database, optuna_internals
from amp_track.study.database import SharedStorage
from amp_track.study.journal import SharedJournal

Storage = SharedStorage | SharedJournal
"""A storage that several search workers share."""

# Constraints and heartbeats are experimental in Optuna 5, and there is no other interface.
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
optuna.logging.set_verbosity(optuna.logging.ERROR)  # amp_track reports failures itself
logging.getLogger("alembic").setLevel(logging.WARNING)


def warm_up(url: str) -> None:
    """Import and prepare everything that opening the database at `url` needs, which takes a while. Write nothing."""
    address = StoreAddress.parse(url)
    if address.kind != "journal" and (address.file is None or not sqlite_files.read(address.file).tables):
        _statements()


def open_storage(url: str) -> Storage:
    """Open the storage at `url`, already checked, and create its tables: all of them or none.

    Raises:
        BadInput: another version of Optuna created the storage, or it is damaged. Nothing is written then.
    """
    address, times = StoreAddress.parse(url), database.TIMES
    if address.kind == "journal" and address.file is not None:
        return SharedJournal(address.file)
    with database.worker_lock(url, "tables"):
        if address.file is not None:
            sqlite_files.make_tables(address.file, _statements)
        return _open_database(
            address,
            heartbeat_interval=times.heartbeat,
            grace_period=times.grace,
            skip_table_creation=address.file is not None,  # else Optuna alters another version's tables
        )


@contextmanager
def reading(url: str) -> Iterator[Storage]:
    """Open the storage at `url`, already checked, for reading in a block. Raise BadInput if there is none yet."""
    storage = open_existing_storage(url)
    try:
        yield storage
    finally:
        storage.close()


def open_existing_storage(url: str) -> Storage:
    """Open the storage at `url`, already checked, for reading. Write nothing.

    Raises:
        BadInput: there is no storage yet, another version of Optuna created it, or it is damaged.
    """
    address = StoreAddress.parse(url)
    if address.kind == "journal" and address.file is not None:
        if address.file.exists() and address.file.stat().st_size:  # opening it would create it
            return SharedJournal(address.file)
    elif optuna_internals.TABLES & databases.tables(address):
        return _open_database(address, skip_table_creation=True)
    raise BadInput(
        f"--storage: {address} holds no studies yet. Use another storage, or create a study with amp-track max-batch."
    )


def _open_database(address: StoreAddress, **arguments: Any) -> SharedStorage:
    if arguments["skip_table_creation"] and (missing := optuna_internals.TABLES - databases.tables(address)):
        raise BadInput(
            f"--storage: {address} has no table {min(missing)}, which Optuna needs. Restore a backup, or use another "
            "storage."
        )
    try:
        return SharedStorage(address.url, engine_kwargs=databases.engine_arguments(address.url), **arguments)
    except RuntimeError as error:
        raise BadInput(f"--storage: {address} was created by another version of Optuna. {error}") from None


@functools.cache
def _statements() -> tuple[str, ...]:
    """Return the SQL statements that create Optuna's tables in SQLite, to run them in one transaction."""
    storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs={"poolclass": StaticPool})  # in memory
    return sqlite_files.script_of(storage.engine)


def study_names(storage: Storage) -> list[str]:
    return optuna.get_all_study_names(storage)


def load_study(name: str, storage: Storage) -> optuna.Study | None:
    """Return the study of this name, or None."""
    try:
        return optuna.load_study(study_name=name, storage=storage.cached)
    except KeyError:
        return None
