"""The addresses of the two stores: their defaults, their identity, and how they are shown without passwords."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"
DEFAULT_STORAGE = "sqlite:///optuna.db"
STORAGE_VARIABLE = "AMP_TRACK_STORAGE"
"""Environment variable with the address of Optuna's database, for a command without --storage."""
UI_HOST, UI_PORT = "127.0.0.1", 5000
"""Where `mlflow ui` listens, unless it is told otherwise."""
SPOOL = "amp_track-spool"
"""The folder, beside the study, where records wait for a tracking server that does not answer."""
_SQLITE = "sqlite:///"
_JOURNAL_ENDING = ".log"
_SECRET = re.compile("pass|pwd|token|secret|key|auth", re.IGNORECASE)
"""What the name of a secret option of an address has in it."""
_SECRET_OPTION = re.compile(
    r"([?&][^=&\s]{0,99}(?:pass|pwd|token|secret|key|auth)[^=&\s]{0,99}=)[^&\s]*", re.IGNORECASE
)
"""A secret option of an address within a text."""
_PASSWORD = re.compile("://([^:/]*):(.*)@", re.DOTALL)
"""User and password of an address: one that contains @ ends at the last of them."""
_SEPARATOR = re.compile("[@:/?#]")
"""What an address is split at: a driver takes the rest of a password that contains one for a host, or a database."""
_MOST_SEPARATORS = 32
_SHORTEST_SECRET = 3
"""Shorter text is not looked for in messages: it is in every other word."""
_known_secrets: set[str] = set()


def tracking_uri(given: str | None) -> str:
    """Return where MLflow's runs go: the flag, else MLFLOW_TRACKING_URI (which `mlflow run` sets), else a file here."""
    return given or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI


def masked(url: str) -> str:
    """Return the address with its password as ***."""
    if "://" in url:
        return _SECRET_OPTION.sub(r"\1***", _without_password(url))
    return url if journal_file(url) is not None else url.rpartition("@")[2]


def _without_password(address: str) -> str:
    head, at, place = address.rpartition("@")
    found = re.search("://([^:/]*):", head)
    if not at or found is None:
        return address
    user = found[1] if "@" not in found[1] else "***"
    return f"{head[: found.start()]}://{user}:***@{place}"


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


def remember(address: str) -> None:
    """Keep the password of an address out of the messages of this process from here on, see `masked_within`."""
    _known_secrets.update(secrets_of(address))


def secrets_of(address: str) -> set[str]:
    """Return all text that would show a part of an address's password, or of a secret option of it.

    Drivers decode passwords, and take a part of one with an unescaped @ for the host.
    """
    found = _PASSWORD.search(address)
    password = found[2] if found is not None else ""
    options = [value for name, value in parse_qsl(address.partition("?")[2]) if _SECRET.search(name)]
    elsewhere = masked(address)
    secrets = set()
    for secret in filter(None, (password, *options)):
        decoded = unquote(secret)
        for form in {secret, decoded, repr(secret)[1:-1], repr(decoded)[1:-1]}:
            cuts = [-1, *(found.start() for found in _SEPARATOR.finditer(form)), len(form)]
            pairs = itertools.combinations(cuts, 2) if len(cuts) <= _MOST_SEPARATORS else itertools.pairwise(cuts)
            parts = {form[start + 1 : end] for start, end in pairs} | {form}
            secrets |= {part for part in parts if len(part) >= _SHORTEST_SECRET and part not in elsewhere}
            secrets |= {f"{form[cut + 1 :]}@" for cut in cuts[1:-1]}
    return secrets


def masked_within(text: str, secrets: Iterable[str] | None = None) -> str:
    """Return a text with the password of every address in it as ***, and what else shows a secret.

    Args:
        text: a message, which may repeat what a database's driver says.
        secrets: those of `secrets_of`; by default of all addresses given to `remember`.
    """
    text = re.sub(r"\S+", lambda word: _masked_word(word[0]), text)
    for secret in sorted(_known_secrets if secrets is None else secrets, key=len, reverse=True):
        text = text.replace(secret, "***@" if secret.endswith("@") else "***")
    return text


def _masked_word(word: str) -> str:
    masked_word = _SECRET_OPTION.sub(r"\1***", _without_password(word))
    head, at, place = masked_word.rpartition("@")
    token = re.search("://[^:/]*$", head) if at else None
    return masked_word if token is None else f"{head[: token.start()]}://***@{place}"


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


def spool_folder(storage: str) -> Path:
    """Return where records wait for a tracking server: beside the study's SQLite file, else in this folder.

    The folder of a journal is one that machines share, and each of them delivers its own.
    """
    file = sqlite_file(storage) if journal_file(storage) is None else None
    return file.parent / SPOOL if file is not None else Path(SPOOL)


def is_of_this_machine(host: str) -> bool:
    """Return whether no other machine reaches a host by this name or address, as far as that can be read from it."""
    return host == "localhost" or host.startswith("127.")
