"""A job's end of the pipe to its command."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from amp_track.records.errors import SUMMARY_CHARACTERS, BadInput, BadOption, printable, text_of


class Sender:
    """Sends a job's messages. Only the job's own process does: one that the workload forks ends when it tries to.

    Else a forked process that comes back from the workload's code would train on, and send a second outcome.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._process = os.getpid()
        os.register_at_fork(after_in_child=connection.close)  # so that it closes when the job's own process ends

    def send(self, message: Any) -> None:
        """Send an event, a result or an error. If that is not possible, end the process."""
        if os.getpid() != self._process:
            _end("a process that the workload forked came back from its code, and ends here; end it with os._exit()")
        # A class of the workload's own is not known where it arrives.
        if isinstance(message, BadInput) and type(message) is not BadOption:
            detail = printable(str(getattr(message, "detail", "")))
            message = BadInput(printable(text_of(message), SUMMARY_CHARACTERS), detail)
        try:
            self._connection.send(message)
        except BrokenPipeError:
            os._exit(1)  # nobody listens any more
        except OSError as error:
            _end(f"the job cannot report to its command ({error}); close only files that the workload has opened")


def _end(why: str) -> None:
    try:
        sys.stderr.write(f"amp-track: {why}\n")
        sys.stderr.flush()
    finally:  # whatever the workload has made of stderr
        os._exit(1)
