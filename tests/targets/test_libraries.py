"""Unchanged scripts of transformers, Lightning and timm: probed with the words of each library, and proven by hand."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from PIL import Image
from support import MEBIBYTE, WORKLOADS, Done

from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.records.result import JobStatus
from amp_track.runner.runner import JobRunner
from amp_track.targets.source import script_of

pytestmark = pytest.mark.nightly
SCRIPTS = WORKLOADS / "libraries"
TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2"]
TRANSFORMERS = [
    str(SCRIPTS / "run_text.py"), "--per_device_train_batch_size", "{batch_size}", "{precision}",
    "--per_device_eval_batch_size", "64", "--output_dir", "{scratch}", "--use_cpu", "--num_train_epochs", "2",
    "--save_strategy", "no", "--eval_strategy", "epoch", "--report_to", "none",
]  # fmt: skip
LIGHTNING = [
    str(SCRIPTS / "cli.py"), "fit", "--data.batch_size={batch_size}", "--trainer.precision={precision}",
    "--trainer.default_root_dir={scratch}", "--trainer.accelerator=cpu", "--trainer.max_epochs=2",
]  # fmt: skip
TIMM = [str(SCRIPTS / "timm_train.py"), "--data-dir", "images", "-b", "{batch_size}", "{precision}"]
_HAS_CLI = pytest.mark.skipif(importlib.util.find_spec("jsonargparse") is None, reason="needs jsonargparse")
LIBRARIES = ["transformers", pytest.param("lightning", marks=_HAS_CLI), "timm"]
WORDS = {"transformers": TRANSFORMERS, "lightning": LIGHTNING, "timm": TIMM}


@pytest.fixture
def images(clean_folder: Path) -> None:
    """A folder of small images of two classes, as timm reads it."""
    random = numpy.random.default_rng(0)
    for split, count in (("train", 150), ("val", 20)):
        for name in ("a", "b"):
            folder = clean_folder / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(random.integers(0, 255, (32, 32, 3), dtype=numpy.uint8)).save(folder / f"{number}.png")


def job_of(runner: JobRunner, words: list[str], **settings: object) -> Job:
    asked = {"precision": "fp32", "batch_size": 8, "probe": True, "memory_budget_bytes": 256 * MEBIBYTE} | settings
    job = Job(workload=script_of(words), command=tuple(words), device="cpu", **asked)
    return resolve(job, runner.inspect(job))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.usefixtures("images")
def test_a_probe_of_a_script_leaves_nothing_behind(
    runner: JobRunner, clean_folder: Path, library: str, precision: str
) -> None:
    job_result = runner.run(job_of(runner, ["python", *WORDS[library]], precision=precision))
    assert job_result.status is JobStatus.FITS, job_result
    assert job_result.steps >= 5
    assert job_result.training_samples, "its loader was seen"
    assert {file.name for file in clean_folder.iterdir()} == {"images"}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.usefixtures("images")
def test_two_ranks_of_torchrun_are_watched(runner: JobRunner, library: str) -> None:
    words = [*TORCHRUN, *WORDS[library]]
    if library == "lightning":
        words += ["--trainer.devices=2", "--trainer.strategy=ddp"]
    job_result = runner.run(job_of(runner, words))
    assert job_result.status is JobStatus.FITS, job_result
    too_large = {"batch_size": 280, "memory_budget_bytes": 64 * MEBIBYTE}
    assert runner.run(job_of(runner, words, **too_large)).status is JobStatus.OOM


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.usefixtures("fresh_stores", "images")
def test_the_max_batch_is_proven_by_whole_trainings(
    amp_track: Callable[..., Done], runner: JobRunner, library: str
) -> None:
    words = ["python", *WORDS[library]]
    budget = {"transformers": 64, "lightning": 48, "timm": 224}[library]
    settings = ["--memory-budget", f"{budget}MiB", "--precision", "fp32,bf16", "--confirm-steps", "epoch"]
    done = amp_track("max-batch", *settings, "--job-timeout", "5m", "--json", "--", *words)
    assert done.returncode == 0, done.stderr
    assert "resource_tracker" not in done.stderr
    found = json.loads(done.stdout)
    for precision in ("fp32", "bf16"):
        whole = job_of(runner, words, precision=precision, probe=False, memory_budget_bytes=budget * MEBIBYTE)

        def runs(batch_size: int, whole: Job = whole) -> list[JobStatus]:
            return [runner.run(dataclasses.replace(whole, batch_size=batch_size)).status for _ in range(3)]

        largest = found["precisions"][precision]["max_batch"]
        assert runs(largest) == [JobStatus.FITS] * 3
        assert JobStatus.OOM in runs(largest + 1)
