"""Real files for the tests of experiments: JPEG trees, and trainings on them."""

import dataclasses
import io
import os
from collections.abc import Mapping
from pathlib import Path

import numpy
from PIL import Image
from support import ROOT

from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.records.result import JobResult
from amp_track.runner.runner import JobRunner

CALTECH256 = str(ROOT / "experiments" / "caltech256.py")
CIFAR10 = str(ROOT / "experiments" / "cifar10.py")


def encoded(format: str = "JPEG", mode: str = "RGB", *, seed: int = 0, size: tuple[int, int] = (40, 30)) -> bytes:
    """An image of coarse noise."""
    pixels = numpy.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=numpy.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size).convert(mode).save(file, format)
    return file.getvalue()


def write_tree(root: Path, classes: Mapping[str, int]) -> Path:
    """So many good images in each class folder, named as in Caltech-256: 001.ak47/001_0001.jpg."""
    for folder, count in classes.items():
        (root / folder).mkdir(parents=True)
        for number in range(1, count + 1):
            (root / folder / f"{folder[:3]}_{number:04}.jpg").write_bytes(encoded(seed=number))
        os.utime(root / folder, ns=(0, 0))  # some file systems' clocks are too coarse to tell a change soon after
    return root


def write_odd_tree(root: Path) -> Path:
    """What a real folder may hold. Class 1 has four good images of five kinds of colour, class 2 three bad ones and a
    good one, class 3 nothing."""
    write_tree(
        root, {"001.ak47": 1, "002.american-flag": 1, "003.backpack": 0, "004.baseball-bat": 6, "257.clutter": 2}
    )
    first, second = root / "001.ak47", root / "002.american-flag"
    (first / "grey.jpg").write_bytes(encoded(mode="L"))
    (first / "cmyk.JPG").write_bytes(encoded(mode="CMYK"))
    (first / "palette.jpg").write_bytes(encoded("PNG", "P"))
    (second / "truncated.jpg").write_bytes(encoded(size=(200, 200))[:-600])
    (second / "text.jpg").write_text("not found\n")
    (second / "zero.jpg").touch()
    # Passed over without a word:
    for junk in ("Thumbs.db", ".hidden.jpg", "._004_0001.jpg", "RENAME2"):
        (root / "004.baseball-bat" / junk).write_bytes(b"\0\5\26\7")
    (root / "004.baseball-bat" / "deeper.jpg").mkdir()
    (root / ".cache").mkdir()
    return root


def job_of(runner: JobRunner, workload: str, options: Mapping[str, object], **settings: object) -> Job:
    """A resolved job of two small steps."""
    texts = tuple((name, str(value)) for name, value in options.items())
    job = Job(**{"workload": workload, "options": texts, "batch_size": 4, "steps": 2} | settings)
    return resolve(job, runner.inspect(job))


def job_result_in(runner: JobRunner, job: Job, precision: str) -> JobResult:
    return runner.run(dataclasses.replace(job, precision=precision))
