"""Checks of the two databases' addresses. Each function raises BadInput and writes nothing."""

from __future__ import annotations

import os
from pathlib import Path

from amp_track.records.addresses import identity, in_memory, masked, sqlite_file
from amp_track.records.errors import BadInput


def check_tracking(flag: str, url: str) -> None:
    """Raise BadInput when MLflow's store, a database or a server, cannot be opened."""
    if url.startswith(("http://", "https://")):
        _check_server(flag, url)
    else:
        check(flag, url)


def check_apart(tracking_uri: str, storage: str) -> None:
    """Raise BadInput when both stores are one database: the two keep their schema's version under the same name."""
    if identity(tracking_uri) == identity(storage):
        raise BadInput(
            f"--storage: got {masked(storage)}, which is MLflow's database too, expected one of its own; name another"
        )


def check(flag: str, url: str) -> None:
    """Raise BadInput, before anything is written, when the database at `url` cannot be opened."""
    expected = "expected a database address such as sqlite:///optuna.db or postgresql+psycopg://user:password@host/name"
    try:
        file = sqlite_file(url)
    except ValueError:
        raise BadInput(f"{flag}: got {masked(url)!r}, {expected}") from None
    if in_memory(url):
        raise BadInput(
            f"{flag}: got {url}, a database that ends with the command, expected one that stays; name a file, such as "
            "sqlite:///results.db"
        )
    if file is not None:
        try:
            _check_sqlite(flag, url, file)
        except BadInput:
            raise
        except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a name too long or with a zero byte
            reason = getattr(error, "strerror", None) or str(error)
            raise BadInput(
                f"{flag}: got {url!r}, expected a file that can be opened; name another ({reason})"
            ) from None
        return
    from sqlalchemy import create_engine
    from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

    try:
        engine = create_engine(url)
        with engine.connect():
            pass
        engine.dispose()
    except (NoSuchModuleError, ImportError) as error:
        raise BadInput(
            f"{flag}: got {masked(url)}, {expected}; this one needs a driver ({error}): for PostgreSQL, "
            "pip install 'psycopg[binary]'"
        ) from None
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise BadInput(
            f"{flag}: got {masked(url)}, expected a database that can be opened; it said: {reason}"
        ) from None


def _check_sqlite(flag: str, url: str, file: Path) -> None:
    """Check an SQLite file without opening it, which would create it."""
    folder = file.resolve().parent
    if not folder.is_dir():
        raise BadInput(f"{flag}: got {url}, expected a file in a folder that exists; make {folder} or name another")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise BadInput(
            f"{flag}: got {url}, expected a file that can be written; change its permissions or name another"
        )
    if file.is_dir():
        raise BadInput(f"{flag}: got {url}, expected a file, this is a folder; name a file in it")
    if file.exists() and not file.is_file():
        raise BadInput(f"{flag}: got {url}, expected a file, this is a pipe or a device; name a file")
    if file.exists() and file.stat().st_size and not _starts_with(file, b"SQLite format 3"):
        raise BadInput(f"{flag}: got {url}, expected an SQLite database, this file is another kind; name another file")


def _starts_with(file: Path, text: bytes) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(text)) == text


def _check_server(flag: str, url: str) -> None:
    import requests

    try:
        requests.get(f"{url.rstrip('/')}/health", timeout=10).raise_for_status()
    except requests.RequestException as error:
        raise BadInput(
            f"{flag}: got {masked(url)}, expected an MLflow server that answers; start it or correct the address "
            f"({type(error).__name__})"
        ) from None
