"""The addresses of the two stores: their defaults, their identity, and how they are shown without passwords."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"
DEFAULT_STORAGE = "sqlite:///optuna.db"


def tracking_uri(given: str | None) -> str:
    """Return where MLflow's runs go: the flag, else MLFLOW_TRACKING_URI (which `mlflow run` sets), else a file here."""
    return given or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI


def masked(url: str) -> str:
    """Return the address with its password as ***."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        address = make_url(url)
        secrets = {name: "***" for name in address.query if "pass" in name.lower()}
        return address.update_query_dict(secrets).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):
        return url.rpartition("@")[2]  # no address that can be parsed: leave out all that might be a secret


def exists(url: str) -> bool:
    """Return False for an SQLite file that is yet to be made."""
    from sqlalchemy.engine import make_url

    address = make_url(url)
    return address.get_backend_name() != "sqlite" or not address.database or Path(address.database).exists()


def identity(url: str) -> str | Path:
    """Return what is the same for two addresses of one SQLite file, however each is written."""
    prefix = "sqlite:///"
    return Path(url.removeprefix(prefix)).resolve() if url.startswith(prefix) else url
