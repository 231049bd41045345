"""Search on a simulated device, stop it at N moments evenly spread over a search, and search again each time.

Print a line of JSON for each.

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

import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  before processes are forked, for all of them
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from simulated import SimulatedRunner
from support import DIGITS, make_stores, request, write_without_waiting_for_the_disk

from amp_track.commands.search import search
from amp_track.config.job import Job

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


def search_once(
    folder: Path, storage: str, stop_after_seconds: float | None, number: signal.Signals = signal.SIGTERM
) -> None:
    """Search as the command does; the signal comes after that time."""
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process has it ignored
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), number))
    if stop_after_seconds is not None:
        signal.setitimer(signal.ITIMER_REAL, stop_after_seconds)
    # Without `owns_process` the handler of SIGTERM is a user's own, which raises wherever it likes.
    search_options = {"precisions": ("fp32",), "trials": 2, "study": "stopped", "storage": storage}
    asked = request(Job(workload=DIGITS), owns_process=True, **search_options)
    search(asked, runner=SimulatedRunner())
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
    assert in_a_process(search_once, Path("first").resolve(), storage, None) == 0
    takes_seconds = time.monotonic() - begun
    for index in range(times):
        folder = Path(str(index)).resolve()
        shutil.copytree(templates, folder)
        runs = folder / "mlflow.db", "select status from runs"
        after_seconds, number = 0.8 * takes_seconds * (index + 0.5) / times, signals[index % len(signals)]
        end = {"signal": number.name, "after_seconds": after_seconds, "of_seconds": takes_seconds}
        end |= {"interrupted": in_a_process(search_once, folder, storage, after_seconds, number)}
        end |= {"trials": trial_states(folder, storage), "runs": column(*runs)}
        end |= {"resumed": in_a_process(search_once, folder, storage, None)}
        end |= {"trials_after": trial_states(folder, storage), "runs_after": column(*runs)}
        print(json.dumps(end), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], [signal.Signals[name] for name in sys.argv[3].split(",")])
