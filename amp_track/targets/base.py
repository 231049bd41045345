"""Load what a job runs. Another kind of target is another module with the methods of `WorkloadTarget`."""

from __future__ import annotations

import importlib
import os
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from amp_track.config.job import Job
from amp_track.records.errors import printable

if TYPE_CHECKING:
    from amp_track.targets.workload import WorkloadTarget

_PACKAGE = Path(__file__).parents[1]
_OUR_FRAME = re.compile(rf'^  File "{re.escape(f"{_PACKAGE}{os.sep}")}.*\n(?:    .*\n)*', re.MULTILINE)
"""Matches a frame of this package in the text of a loader process's exception."""


def load_target(job: Job) -> WorkloadTarget:
    """Load the target of a job. Raises BadInput if it cannot be loaded."""
    from amp_track.targets.workload import WorkloadTarget  # not in the fork server, which imports this module

    return WorkloadTarget(job)


def users_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this package and of importlib, safe to print."""
    frames = traceback.extract_tb(error.__traceback__)
    not_users = (str(_PACKAGE), str(Path(importlib.__file__).parent), "<frozen importlib")
    users = [frame for frame in frames if not frame.filename.startswith(not_users)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(users)]
    return printable(_OUR_FRAME.sub("", "".join(lines + traceback.format_exception_only(error))))
