"""A client of an MLflow store, and what it says of itself meanwhile."""

from __future__ import annotations

import logging

import mlflow

from amp_track.records import masking
from amp_track.records.errors import BadInput
from amp_track.tracking import mlflow_internals


def open_client(uri: str) -> mlflow.MlflowClient:
    """Return a client, which makes the tables of a server's new database. Raises BadInput for a schema of another."""
    expected = f"expected a store of MLflow {mlflow.__version__}"
    if not uri.startswith("http") and (missing := mlflow_internals.missing_tables(uri)):
        raise BadInput(
            f"--tracking-uri: got {masking.masked(uri)}, which lacks {min(missing)}, {expected}; if an older version "
            f"has made it, take a backup and run `mlflow db upgrade {masking.masked(uri)}`, else name another"
        )
    try:
        return mlflow.MlflowClient(tracking_uri=uri)
    except mlflow.exceptions.MlflowException as error:
        if error.__cause__ is not None:  # of the database itself
            raise
        said = str(error).partition("NOTE:")[0].strip()
        raise BadInput(f"--tracking-uri: got {masking.masked(uri)}, {expected}; it said: {said}") from None


def hush() -> None:
    """Keep MLflow's and alembic's loggers quiet."""
    for noisy in ("alembic", "mlflow.tracking"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs the traceback of what it raises
