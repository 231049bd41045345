"""Open a client of an MLflow store, and classify the errors that it raises."""

from __future__ import annotations

import errno
import json
import logging

import mlflow
import requests

from amp_track.records import masking
from amp_track.records.errors import BadInput, chain
from amp_track.tracking import mlflow_internals


def open_client(uri: str) -> mlflow.MlflowClient:
    """Return a client. Raise BadInput if another version of MLflow created the store."""
    if not uri.startswith("http") and (missing := mlflow_internals.missing_tables(uri)):
        raise BadInput(
            f"--tracking-uri: {masking.masked(uri)} has no table {min(missing)}, which MLflow {mlflow.__version__} "
            f"needs. Make a backup and run `mlflow db upgrade {masking.masked(uri)}`, or use another store."
        )
    try:
        return mlflow.MlflowClient(tracking_uri=uri)
    except mlflow.exceptions.MlflowException as error:
        if error.__cause__ is not None:  # an error of the database
            raise
        message = str(error).partition("NOTE:")[0].strip()
        raise BadInput(
            f"--tracking-uri: {masking.masked(uri)} cannot be opened by MLflow {mlflow.__version__}: {message}"
        ) from None


def hush() -> None:
    """Silence the loggers of MLflow and alembic."""
    for noisy in ("alembic", "mlflow.tracking"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs errors that it also raises


_REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS")
"""Error codes of writes that can never succeed, for example to a deleted run."""
_OF_THE_SERVER = (
    "INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED",
    "UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED", "ENDPOINT_NOT_FOUND",
)  # fmt: skip
"""Error codes that do not depend on the write: an overloaded, unauthorized or missing server."""
_HTTP_OF_THE_SERVER = (401, 403, 404, 407, 408, 429)
_LONGEST_REASON = 200


def is_rejection(error: Exception) -> bool:
    """Return whether the store rejected a write for good, so that retries are useless."""
    if isinstance(error, mlflow.exceptions.MlflowException):
        return error.error_code in _REFUSALS
    return isinstance(error, FileNotFoundError)


def is_of_the_server(error: Exception) -> bool:
    """Return whether an error is due to the server or the network, so that a retry may succeed."""
    for cause in chain(error):
        if isinstance(cause, requests.HTTPError) and cause.response is not None:
            status = cause.response.status_code
            return status >= 500 or status in _HTTP_OF_THE_SERVER
        if isinstance(cause, requests.RequestException | ConnectionError | TimeoutError | json.JSONDecodeError):
            return True  # JSON: a proxy answered with an HTML page
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE):
            return True
    return isinstance(error, mlflow.exceptions.MlflowException) and error.error_code in _OF_THE_SERVER


def reason_of(error: BaseException) -> str:
    """Return the message of an error's root cause in one line, such as `[Errno 111] Connection refused`."""
    *_, first = chain(error)
    text = (str(first).strip() or type(first).__name__).splitlines()[0]
    return masking.masked_within(text)[:_LONGEST_REASON]
