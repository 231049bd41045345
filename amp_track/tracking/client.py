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


_REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS")
"""The answers to a write that is wrong itself, and will be: of a run that was deleted, for example."""
_OF_THE_SERVER = (
    "INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED",
    "UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED", "ENDPOINT_NOT_FOUND",
)  # fmt: skip
"""The answers that say nothing of the write: the server is in trouble, does not know who asks, or is not there yet."""
_HTTP_OF_THE_SERVER = (401, 403, 404, 407, 408, 429)
_LONGEST_REASON = 200


def is_rejection(error: Exception) -> bool:
    """Return whether a write is wrong itself, so that trying again is of no use."""
    if isinstance(error, mlflow.exceptions.MlflowException):
        return error.error_code in _REFUSALS
    return isinstance(error, FileNotFoundError)


def is_of_the_server(error: Exception) -> bool:
    """Return whether an error says nothing of the write: the same one may succeed later, and so may every other."""
    for cause in chain(error):
        if isinstance(cause, requests.HTTPError) and cause.response is not None:
            status = cause.response.status_code
            return status >= 500 or status in _HTTP_OF_THE_SERVER
        if isinstance(cause, requests.RequestException | ConnectionError | TimeoutError | json.JSONDecodeError):
            return True  # the last one, where something before the server answers with a page for people
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE):
            return True
    return isinstance(error, mlflow.exceptions.MlflowException) and error.error_code in _OF_THE_SERVER


def reason_of(error: BaseException) -> str:
    """Return why a store did not answer, in the words of an error's first cause: `[Errno 111] Connection refused`."""
    *_, first = chain(error)
    text = (str(first).strip() or type(first).__name__).splitlines()[0]
    return masking.masked_within(text)[:_LONGEST_REASON]
