"""What tracking costs: a trial beyond its own job, a fresh process, and a step against the bare loop, in one run.

    python -m benchmarks.overhead [--repeats 15] [--device cpu]

Writes benchmarks/results/overhead-<device>.json and prints the same as a table. Times are medians; the ratios are what
to compare, the absolute numbers are this machine's. Every job is on the same digits, model, precision (fp32) and batch
size as the bare loop, without a memory budget (an enforced CPU budget costs speed of its own).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from amp_track import commands
from amp_track.job import Job
from amp_track.outcome import Outcome
from amp_track.request import Request, Stores
from amp_track.sandbox import Sandbox
from amp_track.session import Session

if TYPE_CHECKING:  # every job's process imports this module: mlflow and optuna come late, as in the commands
    import optuna

    from amp_track.tracking import Run

DIGITS = str(Path(__file__).parent.parent / "experiments" / "digits.py")
RESULTS = Path(__file__).parent / "results"


def bare_loop(connection: Any, device: str, epochs: int) -> None:
    """The loop a careful user writes by hand, in a process of its own: it evaluates after each epoch, but has no
    events, no history, no tracking. Sends its milliseconds per training step, the first epoch left out."""
    import torch
    from torch.nn import functional
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    from amp_track.workload import load_workload

    torch.manual_seed(0)
    workload = load_workload(DIGITS)
    model = workload.model().to(device)
    optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
    data, eval_inputs = workload.train_data(), workload.eval_data()[:][0]
    batches = BatchSampler(RandomSampler(data), workload.batch_size, drop_last=False)  # type: ignore[arg-type]
    loader: DataLoader[Any] = DataLoader(data, sampler=batches, batch_size=None)
    steps, seconds = 0, 0.0
    for epoch in range(epochs):
        model.train()
        started = time.perf_counter()
        for inputs, targets in loader:
            loss = functional.cross_entropy(model(inputs.to(device)), targets.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            steps += epoch > 0
        loss.item()
        seconds += (time.perf_counter() - started) * (epoch > 0)
        model.eval()
        with torch.inference_mode():
            for part in eval_inputs.split(workload.batch_size):
                model(part.to(device)).argmax(dim=1)
    connection.send(seconds / steps * 1000)


def nothing(connection: Any) -> None:
    """A fresh process that has torch and does nothing with it."""
    connection.send(None)


def in_fresh_process(target: Callable[..., None], *arguments: Any) -> tuple[Any, float]:
    """What `target` sends from a process forked from the sandbox's own server, and the seconds it took in all."""
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    started = time.perf_counter()
    process = context.Process(target=target, args=(sender, *arguments))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    return result, time.perf_counter() - started


class TimedSandbox(Sandbox):
    """Notes how long each job took, its process included."""

    seconds = 0.0

    def run(self, job: Job, *arguments: Any, **settings: Any) -> Outcome:
        started = time.perf_counter()
        try:
            return super().run(job, *arguments, **settings)
        finally:
            self.seconds = time.perf_counter() - started


class Trials:
    """Trials as `search` runs them, on stores of their own in the current folder."""

    def __init__(self, device: str) -> None:
        import optuna

        request = Request(job=Job(workload=DIGITS, device=device, precision="fp32"), stores=Stores(study="overhead"))
        self.session = Session.prepare(request, ("fp32",))
        self.session.sandbox = self.sandbox = TimedSandbox(DIGITS)
        self.tracker = self.session.open_tracker()
        self.study, _ = self.session.open_fit_study()
        self.study.sampler = optuna.samplers.RandomSampler()

    def run(self, parent: Run, job: Job) -> tuple[Outcome, float]:
        """The outcome of one trial, and the seconds of the whole trial."""
        from amp_track.study import storage

        outcomes = []

        def objective(trial: optuna.Trial) -> float:
            storage.name_worker(trial)
            outcome, run_id = commands.run_trial(self.session, self.tracker, parent, self.study, trial, job)
            storage.remember(trial, outcome, run_id)
            storage.constrain(trial, "memory", 0.0)
            outcomes.append(outcome)
            return outcome.samples_per_second or 0.0

        started = time.perf_counter()
        self.study.optimize(objective, n_trials=1)
        return outcomes[0], time.perf_counter() - started


def measure(repeats: int, device: str, epochs: int = 40) -> dict[str, Any]:
    # For the fork server, and so for both loops. By default glibc gives memory back or keeps it as its heap happens to
    # lie, which made one and the same loop take 2.6 or 5.4 ms a step, and the ratio anything from 0.76 to 1.21.
    os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        trials = Trials(device)
        found = trials.session.found
        job = dataclasses.replace(trials.session.job, epochs=epochs)
        assert job.batch_size is not None
        steps_per_epoch = -(-found.training_samples // job.batch_size)
        bare, tracked, beyond, processes, empty = [], [], [], [], []
        with trials.tracker.run("overhead", tags={}) as parent:
            for repeat in range(repeats + 1):  # the first of each warms up, and is left out
                bare_milliseconds = 0.0
                if repeat % 2:  # in turns, so that neither always comes first
                    bare_milliseconds, _ = in_fresh_process(bare_loop, found.device, epochs)
                outcome, trial_seconds = trials.run(parent, job)
                job_seconds = trials.sandbox.seconds
                if not repeat % 2:
                    bare_milliseconds, _ = in_fresh_process(bare_loop, found.device, epochs)
                short, _ = trials.run(parent, dataclasses.replace(job, epochs=1))
                short_seconds = trials.sandbox.seconds
                _, empty_seconds = in_fresh_process(nothing)
                if repeat == 0:
                    continue
                assert outcome.samples_per_second is not None
                bare.append(bare_milliseconds)
                tracked.append(1000 * found.training_samples / steps_per_epoch / outcome.samples_per_second)
                beyond.append(trial_seconds - job_seconds)
                processes.append(short_seconds - short.wall_seconds)
                empty.append(empty_seconds)
        trials.session.storage.engine.dispose()
    median = statistics.median
    return {
        "date": datetime.date.today().isoformat(),
        "device": found.device_name,
        "versions": dict(found.versions),
        "n": repeats,
        "epochs": epochs,
        "batch_size": job.batch_size,
        "bare_loop_ms_per_step": bare,
        "tracked_ms_per_step": tracked,
        # Each pair ran within seconds: the median of their ratios is steadier than the ratio of the medians.
        "tracked_over_bare": median(one / other for one, other in zip(tracked, bare, strict=True)),
        "trial_overhead_seconds": beyond,
        "trial_overhead_seconds_median": median(beyond),
        "fresh_process_seconds": processes,
        "fresh_process_seconds_median": median(processes),
        "empty_process_seconds_median": median(empty),
        "trial_overhead_over_training": median(beyond) / (median(tracked) / 1000 * steps_per_epoch * epochs),
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['device']}, n={result['n']}, {result['date']}, torch {result['versions']['torch']}")
    for heading in ("what", "median", "goal"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    median = statistics.median
    table.add_row("bare loop", f"{median(result['bare_loop_ms_per_step']):.2f} ms/step", "")
    table.add_row("tracked training", f"{median(result['tracked_ms_per_step']):.2f} ms/step", "")
    table.add_row("tracked / bare", f"{result['tracked_over_bare']:.3f}", "≤ 1.05")
    table.add_row("a trial beyond its job", f"{result['trial_overhead_seconds_median']:.3f} s", "≤ 0.2 s")
    table.add_row("… as a part of its training", f"{result['trial_overhead_over_training']:.3f}", "")
    table.add_row("a job's fresh process", f"{result['fresh_process_seconds_median']:.3f} s", "≤ 0.15 s")
    table.add_row("an empty fresh process", f"{result['empty_process_seconds_median']:.3f} s", "")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="measurements of each (default 15)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, … (default cpu)")
    arguments = parser.parse_args()
    result = measure(arguments.repeats, arguments.device)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"overhead-{arguments.device.replace(':', '')}.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    show(result)


if __name__ == "__main__":
    main()
