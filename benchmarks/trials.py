"""Measure the overhead of a trial beyond its job, and the start of a job process.

    python -m benchmarks.trials [--repeats 15] [--device cpu]

Writes benchmarks/results/trials-<device>.json and prints it as a table. Times are medians on the digits, in fp32,
without a memory budget. benchmarks/overhead.py measures the cost of tracking per step.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from amp_track.commands import max_batch
from amp_track.config.job import Job
from amp_track.config.options import Request, Stores
from amp_track.records.result import JobResult
from amp_track.runner.runner import JobRunner
from amp_track.session.publish import LatePlots
from amp_track.session.run_job import run_trial
from amp_track.session.session import Session
from amp_track.session.study_session import Studies, TrackedStudy
from benchmarks import markdown, processes, provenance

if TYPE_CHECKING:  # every job process imports this module, so mlflow and optuna are imported late
    from amp_track.tracking import Run

DIGITS = str(processes.ROOT / "experiments" / "digits.py")
FRESH_PROCESS_AIM_SECONDS = 0.15


def nothing(connection: Any) -> None:
    """Do nothing in a fresh process with torch."""
    connection.send(None)


def device_alone(connection: Any, device: str) -> None:
    """Start the device in a fresh process: on a GPU, CUDA and its libraries."""
    import torch

    torch.zeros(1, device=device)
    connection.send(None)


def process_seconds(target: Callable[..., None], *arguments: Any) -> float:
    """Return the seconds of a process that is forked from the fork server of the job runner."""
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    started = time.perf_counter()
    process = context.Process(target=target, args=(sender, *arguments))
    process.start()
    sender.close()
    receiver.recv()
    process.join()
    return time.perf_counter() - started


class TimedJobRunner(JobRunner):
    """Records the duration of each job, including its process."""

    seconds = 0.0
    cpu_seconds = 0.0
    """CPU time of this thread."""

    def run(self, job: Job, *arguments: Any, **settings: Any) -> JobResult:
        started, cpu_started = time.perf_counter(), time.thread_time()
        try:
            return super().run(job, *arguments, **settings)
        finally:
            self.seconds = time.perf_counter() - started
            self.cpu_seconds = time.thread_time() - cpu_started


class Trials:
    """Trials as `search` runs them, with stores in the current folder."""

    def __init__(self, device: str) -> None:
        import optuna

        from amp_track.tracking import Tracker

        request = Request(job=Job(workload=DIGITS, device=device, precision="fp32"), stores=Stores(study="trials"))
        self.runner = TimedJobRunner(DIGITS)
        self.session = Session.prepare(request, ("fp32",), runner=self.runner)
        self.tracker = Tracker(self.session.request.stores.mlflow.url)
        self.studies = Studies(self.session)
        self.study, _ = max_batch.open_study(self.studies)
        self.study.sampler = optuna.samplers.RandomSampler()

    def run(self, parent: Run, plots: LatePlots, job: Job) -> tuple[JobResult, float]:
        """Run one trial; return its result and its seconds."""
        from amp_track.study import dashboard, storage
        from amp_track.study.trials import next_trial

        tracked_study = TrackedStudy(self.session, self.studies, self.study, self.tracker, parent, plots)
        started = time.perf_counter()
        storage.end_stale_trials(self.study)
        with next_trial(self.study) as asked:
            storage.name_worker(asked.trial)
            job_result, run_id = run_trial(tracked_study, asked.trial, job)
            columns = dashboard.columns(job_result)
            storage.remember(asked.trial, job_result, run_id, constraint=("memory", 0.0), columns=columns)
            asked.value = job_result.samples_per_second or 0.0
        return job_result, time.perf_counter() - started


def measure(repeats: int, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        trials = Trials(device)
        found = trials.session.inspection
        job = dataclasses.replace(trials.session.job, epochs=1)
        numbers: dict[str, list[float]] = defaultdict(list)
        jobs: dict[bool, list[float]] = {True: [], False: []}
        with trials.tracker.run("trials", tags={}) as parent, LatePlots() as plots:
            for repeat in range(2 * (repeats + 1)):  # the first of each is a warm-up and not recorded
                is_beside = repeat % 2 == 1
                started = time.perf_counter()
                if not is_beside:
                    plots.finish()
                drawing_seconds = time.perf_counter() - started
                cpu_started = time.thread_time()
                job_result, trial_seconds = trials.run(parent, plots, job)
                cpu_seconds = time.thread_time() - cpu_started
                job_seconds = trials.runner.seconds
                empty_seconds, device_seconds = process_seconds(nothing), process_seconds(device_alone, device)
                if repeat < 2:
                    continue
                jobs[is_beside].append(job_seconds)
                if is_beside:
                    numbers["trial_overhead_seconds"].append(trial_seconds - job_seconds)
                    numbers["trial_overhead_cpu_seconds"].append(cpu_seconds - trials.runner.cpu_seconds)
                    numbers["fresh_process_seconds"].append(job_seconds - job_result.wall_seconds)
                    numbers["empty_process_seconds"].append(empty_seconds)
                    numbers["device_process_seconds"].append(device_seconds)
                else:
                    numbers["plot_seconds"].append(drawing_seconds)
        trials.studies.close()
    # Ratios of two consecutive jobs: one while a plot is drawn, one without.
    numbers["job_seconds_ratio_beside_a_plot"] = [
        beside / alone for beside, alone in zip(jobs[True], jobs[False], strict=True)
    ]
    medians = {f"{name}_median": statistics.median(values) for name, values in numbers.items()}
    return provenance.provenance(found) | {"n": repeats} | numbers | medians


def fresh_process_aim(device: str, device_process_seconds: float) -> tuple[float, str]:
    """Return the goal for the start of a job process in seconds, and its text.

    On a GPU every process starts CUDA, which this package cannot speed up, so the goal is on top of that.
    """
    if device.partition(":")[0] == "cpu":
        return FRESH_PROCESS_AIM_SECONDS, f"≤ {FRESH_PROCESS_AIM_SECONDS:g} s"
    aim = device_process_seconds + FRESH_PROCESS_AIM_SECONDS
    return aim, f"≤ {aim:.2f} s: {FRESH_PROCESS_AIM_SECONDS:g} s more than a process that only starts the device"


def table(result: dict[str, Any], device: str = "cpu") -> str:
    limit, aim = fresh_process_aim(device, result["device_process_seconds_median"])
    trial, fresh = result["trial_overhead_seconds_median"], result["fresh_process_seconds_median"]
    cpu, plot = result["trial_overhead_cpu_seconds_median"], result["plot_seconds_median"]
    ratio = result["job_seconds_ratio_beside_a_plot_median"]
    rows = [
        [
            "a trial without its job: MLflow and Optuna on SQLite",
            f"{trial:.3f} s",
            markdown.aim("≤ 0.05 s", trial > 0.05),
        ],
        ["the same in CPU time", f"{cpu:.3f} s", ""],
        ["a fresh process for a job, after the first", f"{fresh:.3f} s", markdown.aim(aim, fresh > limit)],
        ["the plot of its curves, drawn during the next job", f"{plot:.3f} s", ""],
        ["time of a job with a plot drawn meanwhile, relative to without", f"{ratio:.2f} ×", ""],
    ]
    return markdown.table(["", "measured", "aim"], rows) + provenance.caption(result, "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="measurements per row (default 15)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, … (default cpu)")
    arguments = parser.parse_args()
    result = measure(arguments.repeats, arguments.device)
    provenance.write(f"trials-{arguments.device.replace(':', '')}", result)
    print(table(result, arguments.device))


if __name__ == "__main__":
    main()
