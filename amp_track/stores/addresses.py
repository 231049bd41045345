"""Store addresses of MLflow and Optuna: parsed once, with the file or server that each names, and defaults."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from amp_track.records.masking import masked

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"
DEFAULT_EXPERIMENT = "amp_track"
DEFAULT_STORAGE = "sqlite:///optuna.db"
STORAGE_VARIABLE = "AMP_TRACK_STORAGE"
"""Environment variable with the store address of Optuna, for a command without --storage."""
UI_VARIABLE = "AMP_TRACK_UI"
"""Environment variable with the URL of MLflow's UI for links, where a browser reaches the server under another name."""
UI_HOST, UI_PORT = "127.0.0.1", 5000  # the default host and port of `mlflow ui`
DEFAULT_UI = f"http://{UI_HOST}:{UI_PORT}"
REQUEST_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT", "30"
"""MLflow's variable for the seconds that it waits for an answer, and the value that a command sets if it has none."""
OUTBOX = "amp_track-outbox"  # the folder of records not yet delivered to a tracking server


@dataclass(frozen=True)
class StoreAddress:
    """The address of a store of MLflow or Optuna. `parse` makes it."""

    url: str
    kind: Literal["sqlite", "memory", "journal", "server", "http", "invalid"]
    """`server` is a database server, `http` a tracking server, `memory` an SQLite database without a file."""
    file: Path | None = None  # the SQLite file or the journal

    @classmethod
    @functools.cache
    def parse(cls, url: str) -> StoreAddress:
        """Return the address. It is `invalid` if it is neither a URL nor a journal, whose address is its path PATH.log.

        Examples:
            >>> StoreAddress.parse("sqlite:///optuna.db").file
            PosixPath('optuna.db')
        """
        if url.endswith(".log") and "://" not in url:
            return cls(url, "journal", Path(url))
        if url.startswith(("http://", "https://")):
            return cls(url, "http")
        # This shortcut avoids the import of sqlalchemy (0.2 s). Since its version 2.1 it decodes %20.
        if url.startswith("sqlite:///") and not {"?", "%"} & set(url):
            is_sqlite, name = True, url.removeprefix("sqlite:///")
        else:
            from sqlalchemy.engine import make_url
            from sqlalchemy.exc import ArgumentError

            try:
                parsed = make_url(url)
            except (ArgumentError, ValueError):  # ValueError: the port is not a number
                return cls(url, "invalid")
            is_sqlite, name = parsed.get_backend_name() == "sqlite", parsed.database or ""
        if not is_sqlite:
            return cls(url, "server")
        return cls(url, "sqlite", Path(name)) if name and Path(name).name != ":memory:" else cls(url, "memory")

    def __str__(self) -> str:
        return masked(self.url)

    @property
    def sqlite_file(self) -> Path | None:
        """The file of an SQLite database; None for every other store."""
        return self.file if self.kind == "sqlite" else None

    @property
    def key(self) -> str | Path:
        """Equal for addresses that name the same store."""
        return self.file.resolve() if self.file is not None else self.url

    def exists(self) -> bool:
        """Return whether the store exists; True for a store on a server."""
        return self.file is None or os.path.exists(self.file)  # Path.exists() raises if a folder is not accessible

    @property
    def ui(self) -> str:
        """The URL of the UI that shows a tracking store: AMP_TRACK_UI, the server's, or the default of `mlflow ui`."""
        own = server(self.url) if self.kind == "http" else DEFAULT_UI
        return os.environ.get(UI_VARIABLE, "").rstrip("/") or own

    @property
    def has_ui(self) -> bool:
        """Whether a server shows the tracking store already."""
        return self.kind == "http" or bool(os.environ.get(UI_VARIABLE))

    @property
    def outbox_folder(self) -> Path:
        """The outbox of a study: in the folder of its SQLite file, or in the working folder.

        Not in the folder of a journal: machines share that folder, and each machine delivers its own records.
        """
        return Path(OUTBOX) if self.sqlite_file is None else self.sqlite_file.parent / OUTBOX


def tracking_address(given: str | None) -> StoreAddress:
    """Return MLflow's store address: the flag, or MLFLOW_TRACKING_URI (which `mlflow run` sets), or a local file."""
    return StoreAddress.parse(given or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI)


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
