"""train without --precision: bf16 on a device that has units for it, else fp32."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from simulated import SimulatedRunner
from support import MEBIBYTE, ROOT, WORKLOADS, Done, request

from amp_track.commands.train import train
from amp_track.commands.worker import work
from amp_track.config.commands import request_of
from amp_track.config.inspection import Inspection, Support
from amp_track.config.job import Job
from amp_track.records.result import JobResult

pytestmark = pytest.mark.usefixtures("fresh_stores")
TINY = str(WORKLOADS / "tiny.py")


@dataclass
class EmulatingRunner(SimulatedRunner):
    """A device without bfloat16 units."""

    def inspect(self, job: Job) -> Inspection:
        found = super().inspect(job)
        emulated = Support(supported=True, reason="bfloat16 is emulated here", has_caution=True)
        return dataclasses.replace(found, precisions=tuple((dict(found.precisions) | {"bf16": emulated}).items()))


@pytest.mark.parametrize(
    ("runner", "precision", "reason"),
    [
        (SimulatedRunner(), "bf16", "this device has ('fp32', 'bf16', 'amp')"),
        (SimulatedRunner(supported=("fp32", "amp")), "fp32", "this device has ('fp32', 'amp')"),
        (EmulatingRunner(), "fp32", "bfloat16 is emulated here"),
    ],
)
def test_the_device_decides_the_precision_that_nobody_gave(
    runner: SimulatedRunner, precision: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    result = train(request_of("train", TINY, {}), runner=runner)
    assert (result.job.precision, [job.precision for job in runner.jobs]) == (precision, [precision])
    assert f"{precision}: {reason} (--precision chooses another)" in capfd.readouterr().err


def test_a_given_precision_is_kept_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    result = train(request_of("train", TINY, {"job_precision": "fp16"}), runner=SimulatedRunner())
    assert result.job.precision == "amp"
    assert "chooses another" not in capfd.readouterr().err


def test_the_max_batch_is_found_only_at_the_precision_of_the_device() -> None:
    given = {"job_batch_size": "auto", "job_memory_budget_bytes": str(8 * MEBIBYTE)}
    runner = SimulatedRunner()
    result = train(request_of("train", TINY, given), runner=runner)
    assert {job.precision for job in runner.jobs} == {"bf16"}
    assert result.job.batch_size == 314


def test_a_worker_of_the_study_of_a_training_searches_its_precision_only() -> None:
    given = {"job_batch_size": "auto", "job_memory_budget_bytes": str(8 * MEBIBYTE), "stores_study": "mine"}

    def interrupted(job: Job) -> JobResult | None:
        if job.batch_size > 300:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        train(request_of("train", TINY, given), runner=SimulatedRunner(fails=interrupted))
    runner = SimulatedRunner()
    work(request(Job(workload=TINY), study="mine", given=frozenset({"workload"})), runner=runner)
    assert {job.precision for job in runner.jobs} == {"bf16"}


def test_no_other_command_leaves_the_precision_to_the_device() -> None:
    assert {request_of(name, TINY, {}).job.precision for name in ("dtypes", "explain", "max-batch")} == {"amp"}


@pytest.mark.slow
def test_a_resumed_training_keeps_its_precision(amp_track: Callable[..., Done]) -> None:
    made = amp_track("train", TINY, "--precision", "fp32", "--checkpoint-every", "1")
    assert made.returncode == 0, made.stderr
    (run_id,) = (line.split()[2].rstrip(";") for line in made.stdout.splitlines() if line.startswith("MLflow run "))
    longer = amp_track("train", TINY, "--resume", run_id, "--epochs", "3")
    assert longer.returncode == 0, longer.stderr
    assert longer.stdout.startswith("fp32 batch")
    assert "chooses another" not in longer.stderr


def test_flags_are_parsed_without_torch() -> None:
    code = "import sys; from amp_track.config.commands import request_of; request_of('train', 'a.py', {}); "
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path.cwd(), env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0
