"""Measure the cost of a growing study: start, next proposal, records of a trial, page, and memory.

    python -m benchmarks.growth [--counts 10,100,1000,10000] [--repeats 3] [--workers 8]

The study searches batch size and learning rate for the digits, in fp32, with trainings of two steps, in SQLite. It runs
a few trainings. One of them is then copied in both databases up to each count, with random batch size, learning rate
and metric. A command resumes the search for one training, a timed process for a few more, several search workers at the
same time for a few each, and another command writes the report.

Writes benchmarks/results/growth-cpu.json and prints the same as a table.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import resource
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from amp_track.config.job import Job
from amp_track.records.result import JobResult
from amp_track.runner.fork_server import REQUIRED_MODULES, STEP_MODULES
from amp_track.runner.runner import JobRunner
from benchmarks import markdown, processes, provenance

DIGITS = str(processes.ROOT / "experiments" / "digits.py")
MEBIBYTE = 2**20
FEW, MORE = 3, 6
"""The number of real trainings before and after the copies."""
_OF_A_TRIAL = (
    "trial_params", "trial_values", "trial_user_attributes", "trial_system_attributes", "trial_intermediate_values",
)  # fmt: skip
_OF_A_RUN = ("metrics", "latest_metrics", "params", "tags")


class NotedJobRunner(JobRunner):
    """Records the start and end of each job, on the clock that processes share."""

    def __init__(self, workload: str) -> None:
        super().__init__(workload, steps_back=True)
        self.begun: list[float] = []
        self.ended: list[float] = []
        self.commits: list[int] = []
        """The commits in both databases before each job."""

    def run(self, job: Job, *arguments: Any, **settings: Any) -> JobResult:
        self.begun.append(time.time())
        self.commits.append(sum(map(change_counter, ("optuna.db", "mlflow.db"))))
        job_result = super().run(job, *arguments, **settings)
        self.ended.append(time.time())
        return job_result


def search(trials: int, runner: JobRunner) -> None:
    """Search in the current folder until the study has `trials` trainings."""
    from amp_track.commands import search
    from amp_track.config.options import MaxBatchOptions, Request, SearchOptions, Stores

    search.search(
        Request(
            job=Job(workload=DIGITS, steps=2),
            stores=Stores(study="s"),
            max_batch_options=MaxBatchOptions(precisions=("fp32",), max_batch_size=1024),
            search_options=SearchOptions(trials=trials, lr_range=(1e-4, 1.0)),
            owns_process=True,
        ),
        runner=runner,
    )


def resume(count: int) -> dict[str, Any]:
    """Resume a search with `count` trainings and return its cost. Run it in a separate process."""
    from amp_track.study import storage
    from amp_track.study.search import Space

    runner = NotedJobRunner(DIGITS)
    named = _ends_of(storage, "name_worker")
    drawn = _ends_of(Space, "suggest")
    search(count + MORE, runner)
    # A proposal is the time from naming a trial's worker to choosing its params.
    proposals = [end - begin for begin, end in zip(named, drawn, strict=True)]
    between = [begun - ended for ended, begun in zip(runner.ended, runner.begun[1:], strict=False)]
    others = [gap - proposal for gap, proposal in zip(between, proposals[1:], strict=True)]
    return {
        "proposal_seconds": statistics.median(proposals),
        "between_jobs_seconds": statistics.median(between),
        "records_seconds": statistics.median(others),
        "trainings_per_second": len(runner.begun) / (runner.ended[-1] - runner.begun[0]),
        "commits": statistics.median(later - sooner for sooner, later in itertools.pairwise(runner.commits)),
        "records": records_of_last_trial(),
        "end_seconds": time.time() - runner.ended[-1],
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEBIBYTE,
    }


def join(total: int) -> dict[str, Any]:
    """Search as one of several workers until the study has `total` trainings. Run it in a separate process."""
    runner = NotedJobRunner(DIGITS)
    search(total, runner)
    return {
        "begun": runner.begun,
        "ended": runner.ended,
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEBIBYTE,
    }


def share(folder: Path, count: int, workers: int) -> dict[str, float]:
    """Let search workers, each in its process, continue a study of `count` trainings together. Return their cost."""
    total = count + workers * MORE
    command = [sys.executable, "-m", "benchmarks.growth", "--child", "join", str(total)]
    begun = [
        subprocess.Popen(command, cwd=folder, env=os.environ | processes.ENVIRONMENT, stdout=subprocess.PIPE)
        for _ in range(workers)
    ]
    found = [json.loads(process.communicate()[0]) for process in begun]
    gaps = [next_ - end for each in found for end, next_ in zip(each["ended"], each["begun"][1:], strict=False)]
    seconds = max(max(each["ended"]) for each in found) - min(min(each["begun"]) for each in found)
    return {
        "workers_between_jobs_seconds": statistics.median(gaps),
        "workers_trainings_per_second": sum(len(each["ended"]) for each in found) / seconds,
        "workers_memory_mib": max(each["memory_mib"] for each in found),
    }


def change_counter(file: str) -> int:
    """Return how often an SQLite file without a write-ahead log has been changed, by its header."""
    return int.from_bytes(os.pread(_opened(file), 4, 24), "big")


@functools.cache
def _opened(file: str) -> int:
    """Open a file for good: to close it would drop the locks that SQLite holds on it in this process.

    Another process then writes at the same time, and reads fail (https://sqlite.org/howtocorrupt.html, 2.2).
    """
    return os.open(file, os.O_RDONLY)


def _ends_of(owner: Any, name: str) -> list[float]:
    """Return a list to which each later call of a function appends its end time."""
    function, ends = getattr(owner, name), []

    def call(*arguments: Any, **keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        ends.append(time.perf_counter())
        return result

    setattr(owner, name, call)
    return ends


def records_of_last_trial() -> int:
    """Return the number of rows of the newest training in both databases of the current folder."""
    with (
        contextlib.closing(sqlite3.connect("optuna.db")) as optuna,
        contextlib.closing(sqlite3.connect("mlflow.db")) as mlflow,
    ):
        newest = "SELECT MAX(trial_id) FROM trials JOIN studies USING (study_id) WHERE study_name = 's/train'"
        ((trial_id,),) = optuna.execute(f"{newest} AND state = 'COMPLETE'")
        run_id = run_id_of(optuna, trial_id)
        counts = [("trial_id", trial_id, optuna, table) for table in _OF_A_TRIAL]
        counts += [("run_uuid", run_id, mlflow, table) for table in _OF_A_RUN]
        rows = 2  # the trial and the run
        for key, value, store, table in counts:
            ((count,),) = store.execute(f"SELECT COUNT(*) FROM {table} WHERE {key} = ?", (value,))
            rows += count
    return rows


def run_id_of(optuna: sqlite3.Connection, trial_id: int) -> str:
    """Return the id of the MLflow run of a trial."""
    from amp_track.study.storage import RUN_ID

    asked = "SELECT value_json FROM trial_user_attributes WHERE trial_id = ? AND key = ?"
    ((text,),) = optuna.execute(asked, (trial_id, RUN_ID))
    return str(json.loads(text))


def start(count: int) -> dict[str, float]:
    """Resume a search of `count` trainings by its command and return the time until it reports the first training."""
    settings = {
        "--precision": "fp32", "--max-batch-size": "1024", "--steps": "2", "--lr-range": "1e-4,1.0", "--study": "s",
        "--trials": str(count + 1),
    }  # fmt: skip
    command = [sys.executable, "-m", "amp_track", "search", DIGITS, *itertools.chain(*settings.items())]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as resumed:
        assert resumed.stderr is not None
        said = [(time.perf_counter() - began, line) for line in resumed.stderr]
    assert resumed.returncode == 0, said
    (seconds,) = [seconds for seconds, line in said if line.startswith("training within")]
    return {"start_seconds": seconds}


def import_alone() -> dict[str, float]:
    """Import what a job of the digits needs in a Python of its own, and return what that cost: no start is faster."""
    modules = ", ".join([*REQUIRED_MODULES, *STEP_MODULES])
    code = f"import gc, os; gc.disable(); import {modules}; os._exit(0)"
    return {"import_seconds": processes.seconds_of([sys.executable, "-c", code], Path.cwd())}


def report() -> dict[str, float]:
    """Make the report of the study in the current folder, and return what that cost."""
    seconds = processes.seconds_of([sys.executable, "-m", "amp_track", "report", "s"], Path.cwd())
    (page,) = Path("mlruns").glob("*/*/artifacts/report.html")
    return {
        "report_seconds": seconds,
        "report_memory_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / MEBIBYTE,
        "page_mib": page.stat().st_size / MEBIBYTE,
    }


def copy_rows(store: sqlite3.Connection, table: str, key: str, old: object, changes: Mapping[str, object]) -> None:
    """Copy the rows of a table that belong to one thing, with changes by column. A row's own number is a new one."""
    columns = [(name, bool(is_key)) for _, name, _, _, _, is_key in store.execute(f"PRAGMA table_info({table})")]
    own = [name for name, is_key in columns if is_key and name not in changes]
    is_numbered = len(own) == 1 and len([name for name, is_key in columns if is_key]) == 1
    kept = [name for name, _ in columns if not (is_numbered and name in own)]
    for row in store.execute(f"SELECT {', '.join(kept)} FROM {table} WHERE {key} = ?", (old,)).fetchall():
        values = [changes.get(name, value) for name, value in zip(kept, row, strict=True)]
        store.execute(f"INSERT INTO {table} ({', '.join(kept)}) VALUES ({', '.join('?' * len(kept))})", values)


def with_less(stored: str, factor: float) -> str:
    """Return a stored job result with its metric and speed multiplied by a factor."""
    job_result = json.loads(json.loads(stored))
    changed = {name: job_result[name] * factor for name in ("metric", "samples_per_second")}
    return json.dumps(json.dumps(job_result | changed))


def move_artifacts(mlflow: sqlite3.Connection) -> None:
    """Point the artifacts of all runs to the current folder, to which the databases were copied."""
    ((old,),) = mlflow.execute("SELECT artifact_location FROM experiments WHERE experiment_id = 0")
    folders = str(Path(old).parent), str(Path("mlruns").resolve())
    mlflow.execute("UPDATE experiments SET artifact_location = REPLACE(artifact_location, ?, ?)", folders)
    mlflow.execute("UPDATE runs SET artifact_uri = REPLACE(artifact_uri, ?, ?)", folders)


def grow(count: int) -> None:
    """Copy a training of the search in the current folder until it has `count`."""
    from amp_track.study.storage import JOB_RESULT, RUN_ID

    chance = random.Random(count)
    with (
        contextlib.closing(sqlite3.connect("optuna.db")) as optuna,
        contextlib.closing(sqlite3.connect("mlflow.db")) as mlflow,
    ):
        ((study_id,),) = optuna.execute("SELECT study_id FROM studies WHERE study_name = 's/train'")
        asked = "SELECT trial_id, number FROM trials WHERE study_id = ? AND state = 'COMPLETE' ORDER BY number"
        trial_id, _ = optuna.execute(asked, (study_id,)).fetchall()[-1]
        ((last,),) = optuna.execute("SELECT MAX(number) FROM trials WHERE study_id = ?", (study_id,))
        ((newest,),) = optuna.execute("SELECT MAX(trial_id) FROM trials")
        run_id = run_id_of(optuna, trial_id)
        of_job_result = "SELECT value_json FROM trial_system_attributes WHERE trial_id = ? AND key = ?"
        ((job_result,),) = optuna.execute(of_job_result, (trial_id, JOB_RESULT))
        for copy in range(1, count - FEW + 1):
            new, new_run = newest + copy, uuid.uuid4().hex
            copy_rows(optuna, "trials", "trial_id", trial_id, {"trial_id": new, "number": last + copy})
            for table in _OF_A_TRIAL:
                copy_rows(optuna, table, "trial_id", trial_id, {"trial_id": new})
            optuna.execute(
                "UPDATE trial_params SET param_value = ? WHERE trial_id = ? AND param_name = 'batch_size'",
                (chance.randint(16, 1024), new),
            )
            optuna.execute(
                "UPDATE trial_params SET param_value = ? WHERE trial_id = ? AND param_name = 'lr'",
                (10 ** chance.uniform(-4, 0), new),
            )
            less = chance.random()
            optuna.execute("UPDATE trial_values SET value = value * ? WHERE trial_id = ?", (less, new))
            optuna.execute(
                "UPDATE trial_system_attributes SET value_json = ? WHERE trial_id = ? AND key = ?",
                (with_less(job_result, less), new, JOB_RESULT),
            )
            optuna.execute(
                "UPDATE trial_user_attributes SET value_json = ? WHERE trial_id = ? AND key = ?",
                (json.dumps(new_run), new, RUN_ID),
            )
            copy_rows(mlflow, "runs", "run_uuid", run_id, {"run_uuid": new_run})
            for table in _OF_A_RUN:
                copy_rows(mlflow, table, "run_uuid", run_id, {"run_uuid": new_run})
            mlflow.execute(
                "UPDATE tags SET value = ? WHERE run_uuid = ? AND key = 'optuna.trial'", (str(last + copy), new_run)
            )
        move_artifacts(mlflow)
        optuna.commit()
        mlflow.commit()


def measure(counts: list[int], repeats: int, workers: int) -> dict[str, Any]:
    """Return the median cost per count. The counts take turns, because the speed of a machine varies over time."""
    result = provenance.of_device(DIGITS)
    result |= {"n": repeats, "trainings": MORE, "workers": workers}
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        made.mkdir()
        child(made, "few")
        for _, (count, runs) in itertools.product(range(repeats), found.items()):
            place = Path(folder) / "grown"
            shutil.copytree(made, place)
            child(place, "grow", count)
            resumed = child(place, "start", count) | import_alone() | child(place, "resume", count + 1)
            shared = share(place, count + 1 + MORE, workers)
            runs.append(resumed | shared | child(place, "report"))
            print(count, runs[-1], file=sys.stderr)
            shutil.rmtree(place)
    rows = [
        {"trials": count, **{name: statistics.median(run[name] for run in runs) for name in runs[0]}}
        for count, runs in found.items()
    ]
    return result | {"rows": rows}


def child(folder: Path, what: str, count: int = 0) -> Any:
    """Run one step of the benchmark in a separate process and return its output."""
    return processes.json_of("benchmarks.growth", "--child", what, str(count), folder=folder)


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "trials": lambda row: f"{row['trials']:,}",
    "start": lambda row: f"{row['start_seconds']:.1f} s",
    "imports only": lambda row: f"{row['import_seconds']:.1f} s",
    "next proposal": lambda row: f"{1000 * row['proposal_seconds']:.0f} ms",
    "between two jobs": lambda row: f"{1000 * row['between_jobs_seconds']:.0f} ms",
    "without the proposal": lambda row: f"{1000 * row['records_seconds']:.0f} ms",
    "between two jobs, 8 workers": lambda row: f"{1000 * row['workers_between_jobs_seconds']:.0f} ms",
    "trainings per second": lambda row: f"{row['trainings_per_second']:.1f}",
    "trainings per second, 8 workers": lambda row: f"{row['workers_trainings_per_second']:.1f}",
    "memory of one of 8 workers": lambda row: f"{row['workers_memory_mib']:.0f} MiB",
    "commits of a trial": lambda row: f"{row['commits']:.0f}",
    "rows of a trial": lambda row: f"{row['records']}",
    "end": lambda row: f"{row['end_seconds']:.1f} s",
    "memory": lambda row: f"{row['memory_mib']:.0f} MiB",
    "report": lambda row: f"{row['report_seconds']:.1f} s",
    "memory of the report": lambda row: f"{row['report_memory_mib']:.0f} MiB",
    "page": lambda row: f"{row['page_mib']:.1f} MiB",
}
"""Functions from a row to its cell, by heading."""


def table(result: dict[str, Any]) -> str:
    """Return the cost of a study as it grows: a column for each number of trials."""
    (heading, trials), *measures = COLUMNS.items()
    headings = [heading, *map(trials, result["rows"])]
    rows = [[name, *map(cell, result["rows"])] for name, cell in measures]
    return markdown.table(headings, rows) + provenance.caption(result, "torch")


def main() -> None:
    """Measure, write and print; or run one step for the measuring process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--counts", default="10,100,1000,10000", help="trials (default 10,100,1000,10000)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements per count (default 3)")
    parser.add_argument("--workers", type=int, default=8, help="search workers at the same time (default 8)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        what, count = arguments.child
        done = {
            "few": lambda: search(FEW, JobRunner(DIGITS, steps_back=True)),
            "grow": lambda: grow(int(count)),
            "start": lambda: start(int(count)),
            "resume": lambda: resume(int(count)),
            "join": lambda: join(int(count)),
            "report": report,
        }[what]()
        print(json.dumps(done))
        return
    result = measure([int(count) for count in arguments.counts.split(",")], arguments.repeats, arguments.workers)
    provenance.write("growth-cpu", result)
    print(table(result))


if __name__ == "__main__":
    main()
