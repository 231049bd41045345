"""What loading, tracking, a trial and a fresh process cost: loading first, which decides how fast a GPU may train."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import precisions
from benchmarks.gpu.parts import Machine, Part, Planned, Reporter, Request
from benchmarks.gpu.rows import Row

IN_MEMORY = "images in memory"
TRIAL = "a trial and a fresh process"
TRACKED = ("bare loop", "amp_track", "amp_track --diagnose 100", "Lightning, every step", "Lightning, every 50")
"""The ways of `benchmarks.overhead`, which imports torch."""
_IMAGES, _BATCH_SIZE, _REPEATS, _TRACKING_REPEATS = 1024, 128, 15, 2
_TINY_IMAGES, _TINY_BATCH_SIZE, _TINY_REPEATS = 24, 8, 1


def loading_key(workers: int) -> str:
    return f"loading alone, {workers} workers"


def training_key(precision: str, how: str) -> str:
    return f"training {precision}, {how}"


def tracking_key(way: str) -> str:
    return f"tracking, tiny MLP, {way}"


def worker_counts(*, tiny: bool) -> list[int]:
    """The most first, then none: between them lies what loading can do."""
    cores = 1 if tiny else os.cpu_count() or 1
    powers = [2**power for power in range(cores.bit_length()) if 2**power <= cores]
    return [powers[-1], 0, *reversed(powers[:-1])]


def parts(machine: Machine, kept: Mapping[str, Row]) -> list[Part]:
    counts = worker_counts(tiny=machine.tiny)
    loading = [Planned(key=loading_key(count)) for count in counts]
    training = [
        Planned(key=training_key(precision, how), impossible=machine.precisions[precision])
        for how in _hows(machine.tiny)
        for precision in _training_precisions(machine.tiny)
    ]
    stores, lightning = machine.lacks("mlflow") or machine.lacks("optuna"), machine.lacks("lightning")
    tracking = [
        Part(name=way, rows=[Planned(key=tracking_key(way), missing=(lightning if "Light" in way else "") or stores)])
        for way in (TRACKED[:2] if machine.tiny else TRACKED)
    ]
    return [
        Part(name="input", rows=[*loading[:2], *training, *loading[2:]]),
        Part(name="trial", rows=[Planned(key=TRIAL, missing=stores)]),
        *tracking,
    ]


def _training_precisions(tiny: bool) -> tuple[str, ...]:
    return ("bf16",) if tiny else precisions(("amp", "bf16"))


def _hows(tiny: bool) -> tuple[str, ...]:
    most, none, *_ = worker_counts(tiny=tiny)
    return (IN_MEMORY, *(f"{count} workers" for count in ((most,) if tiny else (most, none))))


def measure(request: Request, report: Reporter) -> None:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    if request.part == "input":
        _measure_input(request, report)
    elif request.part == "trial":
        repeats = _TINY_REPEATS if request.tiny else _REPEATS
        report.row(TRIAL, lambda: _trial(request, repeats), n=repeats)
    else:
        repeats = 1 if request.tiny else _TRACKING_REPEATS
        report.row(tracking_key(request.part), lambda: _tracking(request, repeats), n=repeats)


def _measure_input(request: Request, report: Reporter) -> None:
    from amp_track.runner.runner import Sandbox
    from benchmarks import input_pipeline

    images, batch = (_TINY_IMAGES, _TINY_BATCH_SIZE) if request.tiny else (_IMAGES, _BATCH_SIZE)
    size = {"image_size": "32"} if request.tiny else {}
    with _images(images) as folder:
        sandbox = Sandbox(input_pipeline.CALTECH256)
        job, _ = input_pipeline.job_on(sandbox, folder, request.device, batch, **size)
        for workers in worker_counts(tiny=request.tiny):
            if (key := loading_key(workers)) in request.keys:
                report.row(
                    key,
                    lambda count=workers: {"images_per_second": input_pipeline.loading_images_per_second(job, count)},
                )
        for how in _hows(request.tiny):
            for precision in precisions():
                if (key := training_key(precision, how)) in request.keys:
                    own = dataclasses.replace(
                        job, precision=precision, synthetic=how == IN_MEMORY,
                        loader_workers=0 if how == IN_MEMORY else int(how.split()[0]),
                    )  # fmt: skip
                    report.row(key, lambda one=own: _loaded(input_pipeline.run(sandbox, one)))


@contextlib.contextmanager
def _images(count: int) -> Iterator[Path]:
    from benchmarks import input_pipeline

    with tempfile.TemporaryDirectory() as folder:
        input_pipeline.write_images(Path(folder), count)
        yield Path(folder)


def _loaded(outcome: Any) -> dict[str, Any]:
    return {"images_per_second": outcome.samples_per_second, "waited_fraction": outcome.waited_fraction}


def _trial(request: Request, repeats: int) -> dict[str, Any]:
    from benchmarks import trials

    found = trials.measure(repeats, request.device)
    names = ("trial_overhead", "fresh_process", "empty_process", "device_process")
    return {f"{name}_seconds": found.get(f"{name}_seconds_median") for name in names}


def _tracking(request: Request, repeats: int) -> dict[str, Any]:
    """Steps/s of a model so small that all a step costs beside it shows."""
    from benchmarks import overhead

    assert tuple(overhead.WAYS) == TRACKED
    case = next(iter(overhead.CASES["cuda"]))
    steps = 30 if request.tiny else case.steps
    case = dataclasses.replace(case, device=request.device, steps=steps)
    runs = [overhead.in_own_process(case, request.part)["steps_per_second"] for _ in range(repeats)]
    return {"steps_per_second": statistics.median(runs), "runs": runs}
