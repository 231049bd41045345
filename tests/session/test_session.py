"""The work of a command while torch is imported."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
from simulated import SimulatedRunner
from support import DIGITS, MEBIBYTE, request

from amp_track.config.inspection import Inspection
from amp_track.config.job import Job
from amp_track.records.errors import BadInput
from amp_track.records.result import JobResult
from amp_track.session import session


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_stores")
def test_what_opens_stores_that_are_there_is_imported_while_torch_is() -> None:
    """Otherwise each command waits for it afterwards, for half a second."""
    program = """
import sys
from amp_track.config.options import Request
from amp_track.session.session import _import_libraries
from amp_track.config.job import Job
_import_libraries(Request(job=Job(workload="x.py"))).result()
print([name in sys.modules for name in ("alembic.context", "mlflow.store.tracking.sqlalchemy_store")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[True, True]\n", done.stderr


@pytest.mark.usefixtures("clean_folder")
def test_a_script_is_inspected_as_a_command_only() -> None:
    """As a workload it would be imported, which would train."""
    Path("train.py").write_text("print('trains')\n")
    asked = request(Job(workload="train.py"))
    with pytest.raises(BadInput, match="defines no subclass of Workload"):
        session.Session.prepare(asked, (), runner=SimulatedRunner(), uses_stores=False)
    command = dataclasses.replace(asked.job, command=("python", "train.py", "{batch_size}"))
    session.Session.prepare(dataclasses.replace(asked, job=command), (), runner=SimulatedRunner(), uses_stores=False)


class SlowlyInspected(SimulatedRunner):
    """Its workload takes a while to be imported."""

    def inspect(self, job: Job) -> Inspection:
        time.sleep(0.1)
        return super().inspect(job)


@pytest.mark.parametrize(("limit", "advice"), [(None, "Ctrl-C"), (90.0, "--job-timeout 90")])
def test_an_inspection_that_takes_long_says_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limit: float | None, advice: str
) -> None:
    asked = request(Job(workload=__file__, job_timeout_seconds=limit))
    session.Session.prepare(asked, (), runner=SlowlyInspected(), uses_stores=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(session, "_LONG_SECONDS", 0.01)
    session.Session.prepare(asked, (), runner=SlowlyInspected(), uses_stores=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{__file__}: still importing")
    assert advice in line


@pytest.mark.usefixtures("clean_folder")
def test_what_a_long_training_needs_is_measured_in_a_few_steps() -> None:
    class Measuring(SimulatedRunner):
        steps: ClassVar[list[int | None]] = []

        def measure(self, job: Job) -> JobResult:
            self.steps.append(job.steps)
            return super().measure(job)

    job = Job(workload=DIGITS, steps=10**6, precision="fp32", batch_size=64, memory_budget_bytes=MEBIBYTE)
    prepared = session.Session.prepare(request(job), ("fp32",), runner=Measuring(), uses_stores=False)
    for steps in (10**6, 3, None):
        assert prepared.bytes_needed(dataclasses.replace(prepared.job, steps=steps))
    assert Measuring.steps == [20, 3, None]
