"""The two databases' addresses: checked before anything is written, made ready by one process at a time, shown without
their passwords."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from amp_track.records.errors import BadInput

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"
DEFAULT_STORAGE = "sqlite:///optuna.db"


def tracking_uri(given: str | None) -> str:
    """Where MLflow's runs go: the flag, else MLFLOW_TRACKING_URI (which `mlflow run` sets), else a file here."""
    return given or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI


def masked(url: str) -> str:
    """The address with its password as ***."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        address = make_url(url)
        secrets = {name: "***" for name in address.query if "pass" in name.lower()}
        return address.update_query_dict(secrets).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):
        return url.rpartition("@")[2]  # not an address we can take apart: leave out all that might be a secret


def check_tracking(flag: str, url: str) -> None:
    """As `check`; MLflow's store may be a server too."""
    if url.startswith(("http://", "https://")):
        _check_server(flag, url)
    else:
        check(flag, url)


def check_apart(tracking_uri: str, storage: str) -> None:
    """Raises BadInput when both stores are one database: the two keep their schema's version under the same name."""
    if _identity(tracking_uri) == _identity(storage):
        raise BadInput(
            f"--storage: got {masked(storage)}, which is MLflow's database too, expected one of its own; name another"
        )


def check(flag: str, url: str) -> None:
    """Raises BadInput, before anything is written, when the database at `url` cannot be opened."""
    from sqlalchemy import create_engine
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

    expected = "expected a database address such as sqlite:///optuna.db or postgresql://user:password@host/name"
    try:
        address = make_url(url)
    except (ArgumentError, ValueError):
        raise BadInput(f"{flag}: got {masked(url)!r}, {expected}") from None
    if address.get_backend_name() == "sqlite" and address.database:
        _check_sqlite(flag, url, Path(address.database))
        return
    try:
        engine = create_engine(address)
        with engine.connect():
            pass
        engine.dispose()
    except (NoSuchModuleError, ImportError) as error:
        raise BadInput(f"{flag}: got {masked(url)}, {expected}; this one needs a driver: {error}") from None
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise BadInput(
            f"{flag}: got {masked(url)}, expected a database that can be opened; it said: {reason}"
        ) from None


def _check_sqlite(flag: str, url: str, file: Path) -> None:
    """Without opening it: that would create the file."""
    folder = file.resolve().parent
    if not folder.is_dir():
        raise BadInput(f"{flag}: got {url}, expected a file in a folder that exists; make {folder} or name another")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise BadInput(
            f"{flag}: got {url}, expected a file that can be written; change its permissions or name another"
        )
    if file.is_dir():
        raise BadInput(f"{flag}: got {url}, expected a file, this is a folder; name a file in it")
    if file.exists() and file.stat().st_size and not file.read_bytes()[:16].startswith(b"SQLite format 3"):
        raise BadInput(f"{flag}: got {url}, expected an SQLite database, this file is another kind; name another file")


def exists(url: str) -> bool:
    """False for an SQLite file that is yet to be made."""
    from sqlalchemy.engine import make_url

    address = make_url(url)
    return address.get_backend_name() != "sqlite" or not address.database or Path(address.database).exists()


def _check_server(flag: str, url: str) -> None:
    import requests

    try:
        requests.get(f"{url.rstrip('/')}/health", timeout=10).raise_for_status()
    except requests.RequestException as error:
        raise BadInput(
            f"{flag}: got {masked(url)}, expected an MLflow server that answers; start it or correct the address "
            f"({type(error).__name__})"
        ) from None


@contextmanager
def first_use(url: str) -> Iterator[None]:
    """Held while a store makes its tables: the first use of a fresh database by several processes at once destroys it
    (MLflow: 8 of 8 processes failed, and later ones too)."""
    name = hashlib.sha256(str(_identity(url)).encode()).hexdigest()[:16]
    with FileLock(Path(tempfile.gettempdir()) / f"amp_track-{os.getuid() if hasattr(os, 'getuid') else 0}-{name}.lock"):
        yield


def _identity(url: str) -> str | Path:
    prefix = "sqlite:///"
    return Path(url.removeprefix(prefix)).resolve() if url.startswith(prefix) else url
