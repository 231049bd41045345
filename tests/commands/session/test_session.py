"""What a command does while torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.usefixtures("fresh_stores")
def test_what_opens_stores_that_are_there_is_imported_while_torch_is() -> None:
    """Else each command waits for it afterwards, for half a second."""
    program = """
import sys
from amp_track.commands.request import Request
from amp_track.commands.session.session import _get_ready
from amp_track.records.job import Job
_get_ready(Request(job=Job(workload="x.py")), "sqlite:///mlflow.db")
print([name in sys.modules for name in ("alembic.context", "mlflow.store.tracking.sqlalchemy_store")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[True, True]\n", done.stderr
