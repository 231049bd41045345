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

from amp_track.job import Inspection, Job, Outcome, resolve
from amp_track.sandbox import Sandbox

if TYPE_CHECKING:  # every job's process imports this module: mlflow and optuna come late, as in the commands
    from amp_track.tracking import Tracker

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


def tracked(
    sandbox: Sandbox, tracker: Tracker, parent: Any, job: Job, found: Inspection, storage: Any
) -> tuple[Outcome, float, float]:
    """One trial as `search` runs it: its outcome, the seconds of the whole trial, and those of its job's process."""
    import optuna

    from amp_track.study import storage as study_storage
    from amp_track.tracking import describe

    study = optuna.load_study(study_name="overhead", storage=storage)
    started = time.perf_counter()
    job_seconds = 0.0
    outcomes = []

    def objective(trial: optuna.Trial) -> float:
        nonlocal job_seconds
        study_storage.name_worker(trial)
        with tracker.run("trial", parent=parent, tags={"optuna.trial": str(trial.number)}) as run:
            trial.set_user_attr(study_storage.RUN_ID, run.run_id)
            describe(run, job, found, kind="train")
            run.flush()
            job_started = time.perf_counter()
            outcome = sandbox.run(job, lambda event: run.event(event, found.quality_name))
            job_seconds = time.perf_counter() - job_started
            run.outcome(outcome)
        study_storage.remember(trial, outcome, run.run_id)
        study_storage.constrain(trial, "memory", 0.0)
        outcomes.append(outcome)
        return outcome.samples_per_second or 0.0

    study.optimize(objective, n_trials=1)
    return outcomes[0], time.perf_counter() - started, job_seconds


def measure(repeats: int, device: str, epochs: int = 40) -> dict[str, Any]:
    import optuna

    from amp_track.study import storage as study_storage
    from amp_track.tracking import Tracker

    sandbox = Sandbox(DIGITS)
    found = sandbox.inspect(Job(workload=DIGITS, device=device))
    job = resolve(Job(workload=DIGITS, device=device, precision="fp32", epochs=epochs), found)
    assert job.batch_size is not None
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        storage = study_storage.open_storage("sqlite:///optuna.db")
        optuna.create_study(study_name="overhead", storage=storage, direction="maximize")
        tracker = Tracker("sqlite:///mlflow.db")
        bare, steps, trials, processes, jobs = [], [], [], [], []
        steps_per_epoch = -(-found.training_samples // job.batch_size)
        with tracker.run("overhead", tags={}) as parent:
            for repeat in range(repeats + 1):  # the first of each warms up, and is left out
                milliseconds, _ = in_fresh_process(bare_loop, found.device, epochs)
                outcome, trial_seconds, job_seconds = tracked(sandbox, tracker, parent, job, found, storage)
                short = dataclasses.replace(job, epochs=1)
                short_outcome, _, short_seconds = tracked(sandbox, tracker, parent, short, found, storage)
                _, empty_seconds = in_fresh_process(nothing)
                if repeat == 0:
                    continue
                assert outcome.samples_per_second is not None
                bare.append(milliseconds)
                steps.append(1000 * found.training_samples / steps_per_epoch / outcome.samples_per_second)
                trials.append(trial_seconds - job_seconds)
                processes.append(short_seconds - short_outcome.wall_seconds)
                jobs.append(empty_seconds)
        storage.engine.dispose()
    median = statistics.median
    return {
        "date": datetime.date.today().isoformat(),
        "device": found.device_name,
        "versions": dict(found.versions),
        "n": repeats,
        "epochs": epochs,
        "batch_size": job.batch_size,
        "bare_loop_ms_per_step": bare,
        "tracked_ms_per_step": steps,
        # Each pair ran within seconds: the median of their ratios is steadier than the ratio of the medians.
        "tracked_over_bare": median(one / other for one, other in zip(steps, bare, strict=True)),
        "trial_overhead_seconds": trials,
        "trial_overhead_seconds_median": median(trials),
        "fresh_process_seconds": processes,
        "fresh_process_seconds_median": median(processes),
        "empty_process_seconds_median": median(jobs),
        "trial_overhead_over_training": median(trials) / (median(steps) / 1000 * steps_per_epoch * epochs),
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
