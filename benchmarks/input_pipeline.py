"""Compare images/s of loading with images/s of training: when does the loader limit the speed of training?

    python -m benchmarks.input_pipeline [--device cpu] [--images 256] [--batch-size 16] [--repeats 3]

ResNet-50 with a frozen backbone at 224 pixels (experiments/caltech256.py), on generated JPEG files like those of
Caltech-256 (400 × 300 pixels, quality 90): coarse noise, decoded, resized and augmented like photos. Three medians: the
loader only, with 0, 1, 2, … workers; the training only, on batches in memory (--synthetic); and the training with the
loader, with the fraction of time that it waited.

The files are in the cache of the file system: a disk can only be slower. Writes
benchmarks/results/input-pipeline-<device>.json and prints it as a Markdown table.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

from amp_track.config.inspection import Inspection, resolve
from amp_track.config.job import Job
from amp_track.records.result import JobResult
from amp_track.runner.runner import JobRunner
from amp_track.targets.workload import load_workload
from amp_track.training.data import Batches
from benchmarks import markdown
from benchmarks.provenance import provenance, sentence, write

CALTECH256 = str(Path(__file__).parent.parent / "experiments" / "caltech256.py")
CLASSES = 8


def write_images(folder: Path, count: int) -> None:
    """Write images, distributed evenly over the class folders."""
    random = numpy.random.default_rng(0)
    for number in range(count):
        place = folder / f"{number % CLASSES + 1:03}.class{number % CLASSES + 1}"
        place.mkdir(exist_ok=True)
        coarse = random.integers(0, 256, (30, 40, 3), dtype=numpy.uint8)
        Image.fromarray(coarse).resize((400, 300), Image.Resampling.BICUBIC).save(place / f"{number}.jpg", quality=90)


def worker_counts() -> list[int]:
    """Return 0, 1, 2, 4, … up to the number of cores."""
    cores = os.cpu_count() or 1
    return [0, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)]


def loading_images_per_second(job: Job, workers: int) -> float:
    """Return the speed of the second epoch of training batches; the first one is a warm-up."""
    batches = Batches(dataclasses.replace(job, num_workers=workers), load_workload(job.workload, job.options))
    rates = []
    for epoch in batches.epochs():
        started, images = time.perf_counter(), 0
        for part in epoch:
            images += part.samples
        rates.append(images / (time.perf_counter() - started))
    return rates[-1]


def measure(device: str, images: int, batch_size: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as text:
        write_images(Path(text), images)
        runner = JobRunner(CALTECH256)
        job, found = job_on(runner, Path(text), device, batch_size)
        loading = {
            str(workers): statistics.median(loading_images_per_second(job, workers) for _ in range(repeats))
            for workers in worker_counts()
        }
        training = {
            precision: training_of(runner, dataclasses.replace(job, precision=precision), repeats)
            for precision in precisions(found)
        }
    return provenance(found) | {
        "n": repeats,
        "images": images,
        "batch_size": batch_size,
        "loading_images_per_second": loading,
        "training": training,
    }


def job_on(runner: JobRunner, folder: Path, device: str, batch_size: int, **options: str) -> tuple[Job, Inspection]:
    """Return a job of two epochs on the images of a folder, and its inspection."""
    listed = {"data_dir": str(folder), "weights": "none", **options}
    asked = Job(
        workload=CALTECH256, options=tuple(listed.items()), device=device, precision="fp32", batch_size=batch_size,
        epochs=2,
    )  # fmt: skip
    found = runner.inspect(asked)
    return resolve(asked, found), found


def precisions(found: Inspection) -> list[str]:
    """Return the supported precisions. On a CPU, leave out amp: nobody trains a ResNet-50 in float16 there."""
    supported = [name for name, support in found.precisions if support.supported]
    return [name for name in supported if found.hardware.kind != "cpu" or name != "amp"]


def training_of(runner: JobRunner, job: Job, repeats: int) -> dict[str, Any]:
    alone = [run(runner, dataclasses.replace(job, synthetic=True)) for _ in range(repeats)]
    result: dict[str, Any] = {"synthetic": speed(alone)}
    for workers in (0, worker_counts()[-1]):
        job_results = [run(runner, dataclasses.replace(job, num_workers=workers)) for _ in range(repeats)]
        result[str(workers)] = {
            "images_per_second": speed(job_results),
            "waited_fraction": statistics.median(job_result.waited_fraction or 0.0 for job_result in job_results),
        }
    return result


def run(runner: JobRunner, job: Job) -> JobResult:
    job_result = runner.run(job)
    assert job_result.fits, f"{job_result.message}\n{job_result.traceback}"
    return job_result


def speed(job_results: list[JobResult]) -> float:
    return statistics.median(job_result.samples_per_second or 0.0 for job_result in job_results)


def table(result: dict[str, Any]) -> str:
    """Return images/s of loading alone, and of training with 0 workers and the most that were tried."""
    loading = result["loading_images_per_second"]
    workers = [f"{count} worker{'' if count == '1' else 's'}" for count in loading]
    alone = markdown.table(
        ["images/s", *workers], [["loading alone", *(f"{speed:,.0f}" for speed in loading.values())]]
    )
    most = [count for count in loading if count != "0" and count in next(iter(result["training"].values()))]
    rows = []
    for precision, found in result["training"].items():
        loaded = [found[count] for count in ("0", *most)]
        cells = [f"{run['images_per_second']:,.1f} ({run['waited_fraction']:.0%})" for run in loaded]
        rows.append([precision, f"{found['synthetic']:,.1f}", *cells])
    headings = ["training, images/s (part of the time spent waiting)", "images that are in memory already"]
    training = markdown.table([*headings, "0 workers", *(f"{count} workers" for count in most)], rows)
    caption = f"*{sentence(result, 'torch', 'torchvision')}, n={result['n']}, medians, batch {result['batch_size']}*"
    return "\n\n".join([alone, training, caption])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda, … (default cpu)")
    parser.add_argument("--images", type=int, default=256, help="JPEG files to load (default 256)")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step (default 16)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each (default 3)")
    arguments = parser.parse_args()
    result = measure(arguments.device, arguments.images, arguments.batch_size, arguments.repeats)
    write(f"input-pipeline-{arguments.device.replace(':', '')}", result)
    print(table(result))


if __name__ == "__main__":
    main()
