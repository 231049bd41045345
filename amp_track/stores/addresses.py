"""The addresses of the two stores: their defaults, their identity, and the files and servers that they name."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"
DEFAULT_EXPERIMENT = "amp_track"
DEFAULT_STORAGE = "sqlite:///optuna.db"
STORAGE_VARIABLE = "AMP_TRACK_STORAGE"
"""Environment variable with the address of Optuna's database, for a command without --storage."""
UI_HOST, UI_PORT = "127.0.0.1", 5000
"""Where `mlflow ui` listens, unless it is told otherwise."""
OUTBOX = "amp_track-outbox"
"""The folder, beside the study, where records wait for a tracking server that does not answer."""
_SQLITE = "sqlite:///"
_JOURNAL_ENDING = ".log"


def tracking_uri(given: str | None) -> str:
    """Return where MLflow's runs go: the flag, else MLFLOW_TRACKING_URI (which `mlflow run` sets), else a file here."""
    return given or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI


def sqlite_file(url: str) -> Path | None:
    """Return the file of an SQLite address; None for every other database. Raises ValueError if it is no address."""
    # sqlalchemy, which says the same of such an address, takes 0.2 s to import. Its version 2.1 began to decode %20.
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
    """Return the file of a journal of Optuna's, which is named by its path alone: PATH.log; None for a database."""
    return Path(url) if url.endswith(_JOURNAL_ENDING) and "://" not in url else None


def store_file(url: str) -> Path | None:
    """Return the file of a store, SQLite's or a journal; None for one on a server. Raises ValueError as above."""
    return journal_file(url) or sqlite_file(url)


def in_memory(url: str) -> bool:
    """True for an SQLite address without a file, whose database ends with the process. Raises ValueError as above."""
    file = sqlite_file(url)
    return file.name == ":memory:" if file is not None else url.startswith("sqlite")


def exists(url: str) -> bool:
    """Return False for the file of a store that is yet to be made."""
    file = store_file(url)
    return file is None or os.path.exists(file)  # which raises nothing where a folder may not be entered


def identity(url: str) -> str | Path:
    """Return what is the same for two addresses of one file, however each is written. Raises ValueError."""
    file = store_file(url)
    return file.resolve() if file is not None else url


def local_folder(location: str) -> Path | None:
    """Return the folder that a path or a `file://` address names; None for a place elsewhere."""
    parts = urlsplit(location)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(location) if not parts.scheme else None


def server(url: str) -> str:
    """Return what is the same for two addresses of one server: without user, password and most options."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port is not None else ""
    named = [(name, value) for name, value in parse_qsl(parts.query) if name in ("host", "port")]  # as libpq allows
    place = f"{parts.hostname or ''}{port}{parts.path.rstrip('/')}"
    return f"{parts.scheme.partition('+')[0]}://{place}" + (f"?{urlencode(named)}" if named else "")


def ui(uri: str) -> str:
    """Return the address of the UI that shows a tracking store: the server's, or where `mlflow ui` listens."""
    return server(uri) if uri.startswith("http") else f"http://{UI_HOST}:{UI_PORT}"


def outbox_folder(storage: str) -> Path:
    """Return where records wait for a tracking server: beside the study's SQLite file, else in this folder.

    The folder of a journal is one that machines share, and each of them delivers its own.
    """
    file = sqlite_file(storage) if journal_file(storage) is None else None
    return file.parent / OUTBOX if file is not None else Path(OUTBOX)


def is_of_this_machine(host: str) -> bool:
    """Return whether no other machine reaches a host by this name or address, as far as that can be read from it."""
    return host == "localhost" or host.startswith("127.")
