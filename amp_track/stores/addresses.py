"""Store addresses of MLflow and Optuna: defaults, canonical forms, and the files and servers that they name."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"
DEFAULT_EXPERIMENT = "amp_track"
DEFAULT_STORAGE = "sqlite:///optuna.db"
STORAGE_VARIABLE = "AMP_TRACK_STORAGE"
"""Environment variable with the store address of Optuna, for a command without --storage."""
UI_HOST, UI_PORT = "127.0.0.1", 5000
"""The default host and port of `mlflow ui`."""
OUTBOX = "amp_track-outbox"
"""The folder of records not yet delivered to a tracking server."""
_SQLITE = "sqlite:///"
_JOURNAL_ENDING = ".log"


def tracking_uri(given: str | None) -> str:
    """Return MLflow's store address: the flag, or MLFLOW_TRACKING_URI (which `mlflow run` sets), or a local file."""
    return given or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI


def sqlite_file(url: str) -> Path | None:
    """Return the file of an SQLite address; None for every other database. Raises ValueError if it is not a URL."""
    # This shortcut avoids the import of sqlalchemy (0.2 s). Since its version 2.1 it decodes %20.
    if url.startswith(_SQLITE) and not {"?", "%"} & set(url):
        name: str | None = url.removeprefix(_SQLITE)
    else:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError

        try:
            address = make_url(url)
        except ArgumentError as error:
            raise ValueError(str(error)) from error
        name = address.database if address.get_backend_name() == "sqlite" else None
    return Path(name) if name else None


def journal_file(url: str) -> Path | None:
    """Return the file of an Optuna journal, whose address is its path PATH.log; None for a database."""
    return Path(url) if url.endswith(_JOURNAL_ENDING) and "://" not in url else None


def store_file(url: str) -> Path | None:
    """Return the file of an SQLite store or a journal; None for a server. Raises ValueError if it is not a URL."""
    return journal_file(url) or sqlite_file(url)


def in_memory(url: str) -> bool:
    """Return whether an SQLite address names an in-memory database. Raises ValueError if it is not a URL."""
    file = sqlite_file(url)
    return file.name == ":memory:" if file is not None else url.startswith("sqlite")


def exists(url: str) -> bool:
    """Return whether a store exists; True for a store on a server."""
    file = store_file(url)
    return file is None or os.path.exists(file)  # Path.exists() raises if a folder is not accessible


def identity(url: str) -> str | Path:
    """Return a canonical key: equal for addresses that name the same store. Raises ValueError if it is not a URL."""
    file = store_file(url)
    return file.resolve() if file is not None else url


def local_folder(location: str) -> Path | None:
    """Return the folder that a path or a `file://` URL names; None for any other URL."""
    parts = urlsplit(location)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(location) if not parts.scheme else None


def server(url: str) -> str:
    """Return a canonical key of a server, without user, password and most options."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port is not None else ""
    named = [(name, value) for name, value in parse_qsl(parts.query) if name in ("host", "port")]  # libpq options
    place = f"{parts.hostname or ''}{port}{parts.path.rstrip('/')}"
    return f"{parts.scheme.partition('+')[0]}://{place}" + (f"?{urlencode(named)}" if named else "")


def ui(uri: str) -> str:
    """Return the URL of the UI that shows a tracking store: the server's, or the default of `mlflow ui`."""
    return server(uri) if uri.startswith("http") else f"http://{UI_HOST}:{UI_PORT}"


def outbox_folder(storage: str) -> Path:
    """Return the outbox folder: in the folder of the study's SQLite file, or in the working folder.

    Not in the folder of a journal: machines share that folder, and each machine delivers its own records.
    """
    file = sqlite_file(storage) if journal_file(storage) is None else None
    return file.parent / OUTBOX if file is not None else Path(OUTBOX)


def is_of_this_machine(host: str) -> bool:
    """Return whether a host name or address is local: localhost or 127.*."""
    return host == "localhost" or host.startswith("127.")
