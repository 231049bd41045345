"""Search on a simulated device, stop it at N moments evenly spread over its jobs, and search again each time.

Print a line of JSON for each. A moment is a job's number and a part of the time that a job takes: by time alone all
stops may fall into one part of the search on a machine whose load changes.

python tests/integration/interrupted_searches.py N STORAGE SIGNALS, with the tests' folder and the repository on
PYTHONPATH. STORAGE is the address of Optuna's, SIGNALS the names of those that are used in turn, separated by commas.
"""

import json
import os
import shutil
import signal
import sqlite3
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  before processes are forked, for all of them
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from simulated import SimulatedRunner
from support import DIGITS, make_stores, request, write_without_waiting_for_the_disk

from amp_track.commands.search import search
from amp_track.config.job import Job
from amp_track.records.result import JobResult
from amp_track.study import database

_LONGEST_SECONDS = 60


def in_a_process(body, *arguments) -> int:
    """Call `body` in a forked process, which has mlflow imported, and return its exit code."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            body(*arguments)
            code = 0
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class StoppedRunner(SimulatedRunner):
    """A device on which a timer starts with one of the jobs."""

    stop_at_job = -1
    stop_after_seconds = 0.0

    def run(self, job: Job, *arguments: Any, **named: Any) -> JobResult:
        if len(self.jobs) == self.stop_at_job:
            signal.setitimer(signal.ITIMER_REAL, self.stop_after_seconds)
        return super().run(job, *arguments, **named)


def search_once(
    folder: Path, storage: str, stop_at_job: int, stop_after_seconds: float, number: signal.Signals = signal.SIGTERM
) -> None:
    """Search as the command does; the signal comes that long after that job has begun, or never for job -1."""
    os.chdir(folder)
    # A process killed before its trial names it leaves the next one to wait this long.
    database.TIMES = database.Times(heartbeat=1, grace=5)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process has it ignored
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), number))
    runner = StoppedRunner()
    runner.stop_at_job, runner.stop_after_seconds = stop_at_job, stop_after_seconds
    # Without `owns_process` the handler of SIGTERM is a user's own, which raises wherever it likes.
    search_options = {"precisions": ("fp32",), "trials": 2, "study": "stopped", "storage": storage}
    asked = request(Job(workload=DIGITS), owns_process=True, **search_options)
    search(asked, runner=runner)
    signal.setitimer(signal.ITIMER_REAL, 0)


def column(file: Path, query: str) -> list[str]:
    connection = sqlite3.connect(file)
    try:
        return [row[0] for row in connection.execute(query)]
    finally:
        connection.close()


def trial_states(folder: Path, storage: str) -> list[str]:
    if storage.startswith("sqlite"):
        return column(folder / "optuna.db", "select state from trials")
    journal = JournalStorage(JournalFileBackend(str(folder / storage)))
    studies = [optuna.load_study(study_name=study.study_name, storage=journal) for study in journal.get_all_studies()]
    return [trial.state.name for study in studies for trial in study.get_trials(deepcopy=False)]


def main(times: int, storage: str, signals: list[signal.Signals]) -> None:
    write_without_waiting_for_the_disk()
    templates = Path("templates")
    templates.mkdir()
    assert in_a_process(make_stores, templates.resolve()) == 0
    shutil.copytree(templates, "first")
    begun = time.monotonic()
    assert in_a_process(search_once, Path("first").resolve(), storage, -1, 0.0) == 0
    jobs = len(trial_states(Path("first"), storage))
    job_seconds = (time.monotonic() - begun) / jobs
    for index in range(times):
        folder = Path(str(index)).resolve()
        shutil.copytree(templates, folder)
        runs = folder / "mlflow.db", "select status from runs"
        stop_at_job, number = jobs * index // times, signals[index % len(signals)]
        after_seconds = max(job_seconds * (0.618 * index % 1), 1e-4)
        end = {"signal": number.name, "at_job": stop_at_job, "after_seconds": after_seconds}
        end |= {"interrupted": in_a_process(search_once, folder, storage, stop_at_job, after_seconds, number)}
        end |= {"trials": trial_states(folder, storage), "runs": column(*runs)}
        end |= {"resumed": in_a_process(search_once, folder, storage, -1, 0.0)}
        end |= {"trials_after": trial_states(folder, storage), "runs_after": column(*runs)}
        print(json.dumps(end), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], [signal.Signals[name] for name in sys.argv[3].split(",")])
