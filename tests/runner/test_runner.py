"""Fresh processes that run out of memory, raise, exit, hang or are killed: each returns the right status."""

import dataclasses
import mmap
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import DIGITS, FAULTS, MEBIBYTE, OUR_FRAMES, ROOT, WORKLOADS

from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.records.errors import BadInput, TargetFailed
from amp_track.records.events import EpochEnded, Event, Launched, Started
from amp_track.records.result import JobStatus
from amp_track.runner.runner import JobRunner
from amp_track.training.devices import heap

FaultJob = Callable[..., Job]


def test_a_job_that_fits_streams_its_epochs(runner: JobRunner, fault_job: FaultJob) -> None:
    events: list[Event] = []
    job_result = runner.run(fault_job("none", epochs=3), events.append)
    assert job_result.status is JobStatus.FITS
    assert job_result.steps == job_result.optimizer_steps == 3 * 16
    launched, started = events[:2]
    assert isinstance(launched, Launched)
    assert isinstance(started, Started)
    assert [event.epoch for event in events if isinstance(event, EpochEnded)] == [1, 2, 3]
    assert dict(started.settings)["fp32_precision.cudnn.conv"] == "ieee"


@pytest.mark.parametrize(
    ("line", "hanging"),
    [
        ("import torch\n", "import torch\nwhile True: pass\n"),
        ("return TensorDataset(", "return time.sleep(1e6) or TensorDataset("),
    ],
    ids=["import", "data"],
)
def test_a_workload_that_hangs_when_it_is_inspected_is_given_up(tmp_path: Path, line: str, hanging: str) -> None:
    workload = tmp_path / "workload.py"
    workload.write_text(Path(FAULTS).read_text().replace(line, hanging, 1))
    job = Job(workload=str(workload), device="cpu", job_timeout_seconds=0.2)
    with pytest.raises(
        TargetFailed, match=r"workload\.py: importing it and loading .* longer than 0\.2 s \(--job-timeout"
    ):
        JobRunner(str(workload)).inspect(job)


@pytest.mark.parametrize("phase", ["model", "forward", "backward", "optimizer", "evaluation"])
def test_out_of_memory_is_told_and_placed(runner: JobRunner, fault_job: FaultJob, phase: str) -> None:
    job_result = runner.run(fault_job(phase, memory_budget_bytes=64 * MEBIBYTE))
    assert (job_result.status, job_result.phase, job_result.requested_bytes) == (JobStatus.OOM, phase, 2**36)


def test_a_workloads_exception_is_a_crash_with_its_traceback(runner: JobRunner, fault_job: FaultJob) -> None:
    job_result = runner.run(fault_job("raise", memory_budget_bytes=64 * MEBIBYTE))
    assert job_result.status is JobStatus.CRASHED
    assert job_result.message == "ValueError: the labels are off by one (in forward)"
    assert 'raise ValueError("the labels are off by one")' in job_result.traceback
    assert OUR_FRAMES not in job_result.traceback


@pytest.mark.parametrize(
    ("says", "signal_name"),
    [
        ("", "SIGSEGV"),
        ("could not create a primitive", ""),
        *(
            pytest.param(message, "", marks=pytest.mark.nightly)
            for message in (
                "GET was unable to find an engine to execute this computation",
                "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
                "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
            )
        ),
    ],
)
def test_a_crash_that_only_the_budget_causes_is_out_of_memory(runner: JobRunner, says: str, signal_name: str) -> None:
    tight = Job(workload=str(WORKLOADS / "odd_when_tight.py"), options=(("says", says),) if says else ())
    tight = dataclasses.replace(tight, precision="fp32", batch_size=32, memory_budget_bytes=24 * MEBIBYTE, probe=True)
    job = resolve(tight, runner.inspect(tight))
    job_result = runner.run(job)
    assert (job_result.status, job_result.signal) == (JobStatus.OOM, signal_name)
    assert job_result.peak_bytes is not None
    assert job_result.peak_bytes > 32 * MEBIBYTE
    assert f"{says + ' (in forward)' if says else 'SIGSEGV'} within the budget" in job_result.message
    assert runner.run(dataclasses.replace(job, batch_size=4)).fits


def test_a_batch_above_the_data_is_no_question_of_memory(runner: JobRunner, fault_job: FaultJob) -> None:
    assert runner.run(fault_job("none", batch_size=65)).status is JobStatus.OVER_DATASET


def test_errors_of_an_inspection_are_raised_here(runner: JobRunner) -> None:
    with pytest.raises(TargetFailed, match="no such folder: images"):
        runner.inspect(Job(workload=FAULTS, options=(("fault", "data"),)))
    with pytest.raises(BadInput, match="expected one of auto, cpu"):
        runner.inspect(Job(workload=DIGITS, device="cuda:99"))


def test_non_finite_losses_are_counted(runner: JobRunner, fault_job: FaultJob) -> None:
    job_result = runner.run(fault_job("nan", epochs=1))
    assert job_result.fits
    assert job_result.non_finite_losses is not None
    assert job_result.non_finite_losses.batches == job_result.steps == 16


def test_the_jobs_of_one_seed_are_equal(runner: JobRunner, fault_job: FaultJob) -> None:
    first, second, other = (runner.run(fault_job("none", epochs=2, seed=seed)).train_loss for seed in (1, 1, 2))
    assert first == second != other


@pytest.mark.parametrize(
    ("settings", "steps"),
    # 64 samples: 10+10, 10+10, 10+10, 4
    [({"epochs": 1, "batch_size": 10, "grad_accum": 2}, 4), ({"steps": 21}, 21)],
)
def test_accumulation_and_steps_set_the_length(
    runner: JobRunner, fault_job: FaultJob, settings: dict[str, int], steps: int
) -> None:
    assert runner.run(fault_job("none", **settings)).steps == steps


def test_synthetic_batches_report_no_metric(runner: JobRunner, fault_job: FaultJob) -> None:
    job_result = runner.run(fault_job("none", synthetic=True, epochs=1))
    assert job_result.fits
    assert job_result.metric is None
    assert job_result.samples_per_second is not None


_INTERRUPTED = f"""
import os, signal
from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.runner import job_processes
from amp_track.runner.runner import JobRunner
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs of a shell
box = JobRunner({FAULTS!r})
job = Job(workload={FAULTS!r}, options=(("fault", "hang"),), precision="fp32")
job = resolve(job, box.inspect(job))
open_connections = []
class Child(job_processes.Child):
    def __init__(self, *arguments):
        open_connections.append(arguments)
        os.kill(os.getpid(), signal.SIGINT)
        super().__init__(*arguments)
job_processes.Child = Child
try:
    box.run(job)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


_WITHOUT_A_GUARD = f"""
from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.runner.runner import JobRunner
box = JobRunner({DIGITS!r})
job = Job(workload={DIGITS!r}, precision="fp32", batch_size=300, probe=True, memory_budget_bytes=2**26)
print(box.run(resolve(job, box.inspect(job))).peak_bytes)
"""


def _printed_by_a_command_of_its_own(folder: Path, script: str, **environment: str) -> str:
    folder.mkdir()
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, cwd=folder, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT / "tests")])} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_ctrl_c_as_a_job_starts_ends_it_too(tmp_path: Path) -> None:
    """Otherwise the command hangs, because multiprocessing waits at exit for running children."""
    assert _printed_by_a_command_of_its_own(tmp_path / "own", _INTERRUPTED) == "interrupted\n"


@pytest.mark.nightly
def test_a_job_takes_the_same_memory_in_every_command(tmp_path: Path) -> None:
    """In any program, folder and environment. A script needs no `if __name__ == "__main__"`."""
    here = _printed_by_a_command_of_its_own(tmp_path / "one", _WITHOUT_A_GUARD)
    there = _printed_by_a_command_of_its_own(tmp_path / "a folder elsewhere", _WITHOUT_A_GUARD, SOMETHING="x" * 3000)
    assert int(here) == pytest.approx(int(there), rel=0.002)


_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_READS_ITS_PAGES = """
import re
from pathlib import Path

import torch
from tiny import Tiny

def huge_kib():
    return int(re.search(r"AnonHugePages: +([0-9]+)", Path("/proc/self/smaps_rollup").read_text())[1])

class Model(torch.nn.Linear):
    def forward(self, x):
        before_kib = huge_kib()
        taken = torch.ones(2**24)
        print(huge_kib() - before_kib, file=Path(__file__).with_suffix(".txt").open("a"))
        return super().forward(x) + taken[0]

class Reads(Tiny):
    def model(self):
        return Model(4, 2)
"""


@pytest.mark.skipif(
    not (_HUGE_PAGES.exists() and "[madvise]" in _HUGE_PAGES.read_text() and heap.with_huge_pages("")),
    reason="this kernel gives huge pages to every program or to none, or of another size",
)
@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="this malloc cannot ask for huge pages")
def test_only_runners_of_jobs_with_a_budget_ask_for_huge_pages(tmp_path: Path) -> None:
    """Other jobs would be faster than outside of amp_track."""
    workload = tmp_path / "reads.py"
    workload.write_text(_READS_ITS_PAGES)
    shutil.copy(WORKLOADS / "tiny.py", tmp_path)
    has_huge_pages = []
    for huge_pages in (False, True, False):
        runner = JobRunner(str(workload), huge_pages=huge_pages)
        job = Job(workload=str(workload), device="cpu", precision="fp32", memory_budget_bytes=256 * MEBIBYTE)
        assert runner.run(resolve(job, runner.inspect(job))).fits
        written = workload.with_suffix(".txt")
        has_huge_pages.append(max(map(int, written.read_text().split())) > 32 * 1024)
        written.unlink()
    assert has_huge_pages == [False, True, False]


def within_and_below(runner: JobRunner, precision: str, batch_size: int) -> tuple[str, str]:
    """Return the statuses of two trainings: with a budget of exactly the measured peak, and with two pages less."""
    budget_bytes = 100 * MEBIBYTE
    job = Job(workload=DIGITS, precision=precision, batch_size=batch_size, epochs=1, memory_budget_bytes=budget_bytes)
    job = resolve(job, runner.inspect(job))
    taken_bytes = runner.run(job).peak_bytes
    assert taken_bytes is not None
    within, below = (
        runner.run(dataclasses.replace(job, memory_budget_bytes=budget_bytes)).status
        for budget_bytes in (taken_bytes, taken_bytes - 2 * mmap.PAGESIZE)
    )
    return str(within), str(below)


def test_the_limit_and_the_meter_agree(runner: JobRunner) -> None:
    """Otherwise the max batch is off by one."""
    assert within_and_below(runner, "fp32", 512) == ("fits", "oom")


@pytest.mark.nightly
@pytest.mark.parametrize("threads", ["1", "2"])
def test_they_agree_whatever_the_threads(tmp_path: Path, threads: str) -> None:
    """Separate heaps of torch's threads were once counted by the limit and not by the meter."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_runner import within_and_below
from support import DIGITS
from amp_track.runner.runner import JobRunner
for precision, batch_size in (("fp32", 512), ("amp", 512), ("bf16", 946)):
    print(*within_and_below(JobRunner(DIGITS), precision, batch_size))
"""
    said = _printed_by_a_command_of_its_own(tmp_path / "own", script, OMP_NUM_THREADS=threads)
    assert said.splitlines() == ["fits oom"] * 3
