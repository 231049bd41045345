"""What it means that a tracking server has not done what it was asked."""

from __future__ import annotations

import errno
import json

import mlflow
import requests

from amp_track.records import masking
from amp_track.records.errors import chain

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
