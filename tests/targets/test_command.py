"""A command as a target: an unchanged script, watched in the job process or through its launcher."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from support import MEBIBYTE, OUR_FRAMES, WORKLOADS, Done

from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.config.precisions import PRECISIONS
from amp_track.records.errors import BadInput, TargetFailed
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner.runner import JobRunner
from amp_track.session.run_job import raise_on_crash
from amp_track.targets.command import CommandTarget
from amp_track.targets.source import script_of

SCRIPT = str(WORKLOADS / "scripts" / "train.py")
TORCHRUN = str(Path(sys.executable).parent / "torchrun")
MODULE = "python", "-m", "torch.distributed.run"
CommandJob = Callable[..., Job]


@pytest.fixture
def command_job(runner: JobRunner) -> CommandJob:
    """Return a function that makes a resolved probe of a command."""

    def make(*words: str, **settings: object) -> Job:
        asked = {"precision": "fp32", "batch_size": 8, "probe": True, "memory_budget_bytes": 64 * MEBIBYTE} | settings
        job = Job(workload=script_of(words), command=words, device="cpu", **asked)
        return resolve(job, runner.inspect(job))

    return make


def test_a_probe_of_a_script_ends_by_itself_and_leaves_no_file(
    runner: JobRunner, command_job: CommandJob, tmp_path: Path
) -> None:
    job = command_job("python", SCRIPT, "--bs", "{batch_size}", "--out", "{scratch}/weights.pt")
    job_result = runner.run(job)
    assert job_result.status is JobStatus.FITS, job_result
    assert job_result.steps >= 5
    assert job_result.samples_per_second
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "launcher", [["python"], pytest.param([TORCHRUN, "--nproc-per-node", "1"], marks=pytest.mark.slow)]
)
def test_a_script_that_ignores_its_precision_is_noticed(
    runner: JobRunner, command_job: CommandJob, launcher: Sequence[str]
) -> None:
    words = (("bf16", "--bf16"), ("amp", ""))
    probe = [*launcher, SCRIPT, "--bs", "{batch_size}", "{precision}"]
    in_amp = runner.run(command_job(*probe, precision_words=words, precision="amp"))
    in_bf16 = runner.run(command_job(*probe, precision_words=words, precision="bf16"))
    assert in_amp.fits and in_bf16.fits, (in_amp, in_bf16)
    assert (in_amp.ignores_precision, in_bf16.ignores_precision) == (True, False)
    in_fp32 = runner.run(command_job(*launcher, SCRIPT, "--bs", "{batch_size}", "--bf16"))
    assert in_fp32.fits and in_fp32.ignores_precision


def test_a_longer_run_makes_the_whole_training(runner: JobRunner, command_job: CommandJob, tmp_path: Path) -> None:
    job = command_job("python", SCRIPT, "--bs={batch_size}", "--out", f"{tmp_path}/x", probe=False, batch_size=100)
    assert runner.run(job).steps == 3 * 10
    assert (tmp_path / "x").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[TORCHRUN], MODULE])
def test_a_script_under_a_launcher_has_the_same_peak(
    runner: JobRunner, command_job: CommandJob, launcher: Sequence[str]
) -> None:
    script = [SCRIPT, "--bs", "{batch_size}"]
    alone = runner.run(command_job(sys.executable, *script))
    launched = runner.run(command_job(*launcher, "--nproc-per-node", "1", *script))
    assert launched.status is JobStatus.FITS, launched
    assert launched.peak_bytes == alone.peak_bytes


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "batch_size", "status"),
    [
        ([], 900, JobStatus.OOM),
        (["--ends", "after out of memory"], 8, JobStatus.OOM),
        (["--ends", "with a bug"], 8, JobStatus.CRASHED),
        (["--no-such-flag"], 8, JobStatus.CRASHED),
    ],
)
def test_each_end_under_a_launcher_has_its_status(
    runner: JobRunner, command_job: CommandJob, words: list[str], batch_size: int, status: JobStatus
) -> None:
    job = command_job("env", sys.executable, SCRIPT, "--bs", "{batch_size}", *words, batch_size=batch_size)
    job_result = runner.run(job)
    assert job_result.status is status, job_result


@pytest.mark.nightly
def test_ranks_of_a_launcher_end_with_their_job(runner: JobRunner, command_job: CommandJob, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import sys, time, torch\nprint(sys.argv)\ntime.sleep(600)\n")
    job = command_job(TORCHRUN, "--nproc-per-node", "2", "hangs.py", "{batch_size}")
    assert runner.run(dataclasses.replace(job, job_timeout_seconds=15.0)).status is JobStatus.TIMED_OUT

    def left() -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["cmdline"]) if "hangs.py" in (each.info["cmdline"] or [])]

    deadline = time.monotonic() + 10
    while left() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left() == []


@pytest.mark.parametrize(
    ("words", "status", "message", "shown"),
    [
        (["--batch", "{batch_size}"], JobStatus.CRASHED, "exit code 2", "unrecognized arguments: --batch 8"),
        (["--bs", "{batch_size}", "--ends", "with a bug"], JobStatus.CRASHED, "KeyError", "a bug of the script"),
        (["--bs", "{batch_size}", "--ends", "after out of memory"], JobStatus.OOM, "allocate", ""),
    ],
)
def test_each_end_has_its_status(
    runner: JobRunner, command_job: CommandJob, words: list[str], status: JobStatus, message: str, shown: str
) -> None:
    job_result = runner.run(command_job("python", SCRIPT, *words))
    assert job_result.status is status, job_result
    assert message in job_result.message
    assert shown in job_result.traceback
    assert OUR_FRAMES not in job_result.traceback


def test_a_script_that_hangs_is_timed_out_with_its_last_lines(runner: JobRunner, command_job: CommandJob) -> None:
    Path("hangs.py").write_text("import time\nprint('waiting for data', flush=True)\ntime.sleep(600)\n")
    job = command_job("python", "hangs.py", "{batch_size}")
    job_result = runner.run(dataclasses.replace(job, job_timeout_seconds=1.0))
    assert (job_result.status, job_result.traceback) == (JobStatus.TIMED_OUT, "waiting for data")


def test_a_script_that_spawns_its_training_is_rejected(
    runner: JobRunner, command_job: CommandJob, tmp_path: Path
) -> None:
    script = tmp_path / "spawns.py"
    script.write_text("import torch.multiprocessing as mp\nif __name__ == '__main__': mp.spawn(print, nprocs=2)")
    with pytest.raises(BadInput, match=r"processes that it starts itself .* start it with torchrun\."):
        runner.run(command_job("python", str(script), "--bs", "{batch_size}"))


def test_a_script_that_ends_before_a_step_is_rejected(runner: JobRunner, command_job: CommandJob) -> None:
    with pytest.raises(BadInput, match="it ended without an optimizer step"):
        runner.run(command_job("python", SCRIPT, "--bs", "{batch_size}", "--ends", "before a step"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["python", SCRIPT], r"The command has no \{batch_size\}"),
        (["python", "nowhere.py", "{batch_size}"], "no word of this command is an existing Python file"),
    ],
)
def test_a_command_that_cannot_be_probed_is_rejected(words: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        script_of(words)


def test_the_words_of_a_precision(command_job: CommandJob, tmp_path: Path) -> None:
    job = command_job("python", SCRIPT, "--bs", "{batch_size}", "{precision}", "--note={precision}")
    assert job.words(scratch="s")[2:] == ["--bs", "8", "fp32", "--note=fp32"]
    given = dataclasses.replace(job, precision="bf16", precision_words=(("bf16", "--bf16 --fast"), ("fp32", "")))
    assert given.words(scratch="s")[4:] == ["--bf16", "--fast", "--note=--bf16 --fast"]
    assert dataclasses.replace(given, precision="fp32").words(scratch="s")[4:] == ["--note="]
    Path("run.py").write_text("from transformers import HfArgumentParser")
    theirs = dataclasses.replace(job, workload="run.py", command=("python", "run.py", "{precision}"))
    assert [dataclasses.replace(theirs, precision=name).words(scratch="s")[2:] for name in ("fp32", "amp", "bf16")] == [
        [], ["--fp16"], ["--bf16"],
    ]  # fmt: skip


def test_a_precision_that_the_command_does_not_take_is_skipped() -> None:
    target = CommandTarget(Job(workload=SCRIPT, command=("python", SCRIPT, "--bs", "{batch_size}")))
    reasons = dict(target.inspect().unsupported)
    assert reasons.keys() == set(PRECISIONS) - {"fp32"}
    assert "{precision}" in reasons["bf16"]


def test_a_precision_whose_command_is_that_of_fp32_is_skipped(clean_folder: Path) -> None:
    Path("run.py").write_text("from lightning.pytorch.cli import LightningCLI")
    job = Job(workload="run.py", command=("python", "run.py", "{batch_size}", "--trainer.precision={precision}"))
    assert [name for name, _ in CommandTarget(job).inspect().unsupported] == ["tf32"]
    given = dataclasses.replace(job, precision_words=(("fp32", "32-true"), ("tf32", "32-true-tf32")))
    reasons = dict(CommandTarget(given).inspect().unsupported)
    assert reasons == dict.fromkeys(("amp", "bf16"), "no --precision-words for it")


def test_a_crash_shows_the_command_that_was_run() -> None:
    command = ("python", "train.py", "--batch-size", "{batch_size}", "--precision", "{precision}")
    job = Job(workload="train.py", command=command, precision="fp32", batch_size=2)
    with pytest.raises(TargetFailed, match=r"at fp32, batch 2: python train\.py --batch-size 2 --precision fp32"):
        raise_on_crash(job, JobResult(status=JobStatus.CRASHED, message="exit code 2"))
    with pytest.raises(TargetFailed, match=r"; batch 1 fits\. Does it reject odd batch sizes"):
        raise_on_crash(job, JobResult(status=JobStatus.CRASHED, message="exit code 2"), where="batch 1 fits")


def test_an_unrelated_file_beside_a_script_starts_no_new_study(clean_folder: Path) -> None:
    shutil.copytree(Path(SCRIPT).parent, clean_folder, dirs_exist_ok=True)
    target = CommandTarget(Job(workload="train.py", command=("python", "train.py", "{batch_size}")))
    known = target.inspect()
    Path("unrelated.py").touch()
    assert target.inspect() == known
    assert known.workload_imports == ("helper.py",)
    Path("helper.py").write_text("changed")
    assert target.inspect().workload_digest != known.workload_digest


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_stores")
def test_the_max_batch_of_a_script_is_proven_by_whole_trainings(
    amp_track: Callable[..., Done], runner: JobRunner, command_job: CommandJob
) -> None:
    words = ["python", SCRIPT, "--bs", "{batch_size}", "{precision}"]
    given = ["--precision-words", "fp32=", "--precision-words", "bf16=--bf16", "--memory-budget", "64MiB"]
    done = amp_track("max-batch", *given, "--json", "--", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    recommended = found["recommended"]
    assert recommended["command"].startswith(f"python {SCRIPT} --bs ")
    assert recommended["epoch_steps"] == math.ceil(1000 / recommended["batch_size"]), "as its DataLoader shows it"
    job = command_job(*words, precision_words=(("fp32", ""), ("bf16", "--bf16")), probe=False)

    def runs(batch_size: int, precision: str) -> list[JobStatus]:
        whole = dataclasses.replace(job, precision=precision, batch_size=batch_size)
        return [runner.run(whole).status for _ in range(3)]

    for precision in ("fp32", "bf16"):
        largest = found["precisions"][precision]["max_batch"]
        assert runs(largest, precision) == [JobStatus.FITS] * 3
        assert JobStatus.OOM in runs(largest + 1, precision)
