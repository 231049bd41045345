"""Studies in PostgreSQL, which is restarted, goes away, and loses answers."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from held_workers import HeldWorker, in_state, max_batches, runs, trials, undisturbed, wait_for
from optuna.trial import TrialState
from postgresql import Server, line_to, server  # noqa: F401  # a fixture
from support import DIGITS

from amp_track.records import masking
from amp_track.study.database import worker_lock
from amp_track.study.opening import open_storage

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("fresh_stores")]
FIT = ["max-batch", DIGITS, "--precision", "fp32,bf16", "--study", "s", "--json"]


@pytest.fixture
def url(server: Server, request: pytest.FixtureRequest) -> str:  # noqa: F811
    return server.new_database("d" + "".join(letter for letter in request.node.name if letter.isalnum())[-50:].lower())


def wait_until_more_are_done(worker: HeldWorker, url: str) -> None:
    def done() -> int:
        return len(in_state(TrialState.COMPLETE, "s/max-batch", url))

    enough = done() + 2
    wait_for(lambda: worker.process.poll() is not None or done() >= enough)


@pytest.mark.parametrize("mode", [pytest.param("fast", marks=pytest.mark.slow), "immediate"])
def test_a_restarted_server_is_waited_for(mode: str, server: Server, url: str) -> None:  # noqa: F811
    with HeldWorker("one", *FIT, "--storage", url, holds=(1,), seconds=0.05, times="silence=0") as worker:
        worker.wait_until_it_holds(1)
        server.stop(mode)
        worker.let_go(1)
        worker.wait_until_it_says("waiting for the database of --storage")
        server.start()
        found = max_batches(worker.result())
    assert found == undisturbed()
    assert worker.stderr.count("waiting for the database") == 1
    assert worker.stderr.count("answers again") == 1
    assert {trial.state for trial in trials("s/max-batch", url)} == {TrialState.COMPLETE}
    assert {run.info.status for run in runs()} == {"FINISHED"}


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_restarts_at_any_moment_cost_nothing(mode: str, server: Server, url: str) -> None:  # noqa: F811
    with HeldWorker("one", *FIT, "--storage", url, holds=(0,), seconds=0.1, times="heartbeat=1,grace=4") as worker:
        worker.wait_until_it_holds(0)
        worker.let_go(0)
        while worker.process.poll() is None:
            server.stop(mode)
            server.start()
            wait_until_more_are_done(worker, url)
        found = max_batches(worker.result())
    assert found == undisturbed()
    complete = in_state(TrialState.COMPLETE, "s/max-batch", url)
    assert not in_state(TrialState.RUNNING, "s/max-batch", url)
    assert {run.info.status for run in runs()} == {"FINISHED"}
    assert len(runs()) == len(complete) + 1 + len(in_state(TrialState.COMPLETE, "alone/max-batch")) + 1


def test_a_server_that_stays_away_ends_the_command_in_one_line(server: Server, url: str) -> None:  # noqa: F811
    times = "silence=0,database=3"
    with HeldWorker("one", *FIT, "--storage", url, holds=(1,), times=times) as worker:
        worker.wait_until_it_holds(1)
        server.stop("immediate")
        try:
            worker.let_go(1)
            assert worker.process.wait(timeout=240) == 1, worker.stderr
        finally:
            server.start()
    assert "Traceback" not in worker.stderr
    last = worker.stderr.splitlines()[-1]
    shown = masking.masked_within(url)
    assert last.startswith(f"amp-track: The database {shown} has not answered for")
    assert "RUNNING" not in [run.info.status for run in runs()]
    with HeldWorker("two", *FIT, "--storage", url) as worker:
        assert max_batches(worker.result()) == undisturbed()
    assert len(in_state(TrialState.FAIL, "s/max-batch", url)) == 1
    assert not in_state(TrialState.RUNNING, "s/max-batch", url)


def test_ctrl_c_ends_the_wait_for_a_server(server: Server, url: str) -> None:  # noqa: F811
    with HeldWorker("one", *FIT, "--storage", url, holds=(1,), times="silence=0,after_interrupt=1") as worker:
        worker.wait_until_it_holds(1)
        server.stop("fast")
        try:
            worker.let_go(1)
            worker.wait_until_it_says("waiting for the database of --storage")
            worker.process.send_signal(signal.SIGINT)
            assert worker.process.wait(timeout=240) == 130, worker.stderr
        finally:
            server.start()
    assert "Traceback" not in worker.stderr
    assert {run.info.status for run in runs()} == {"KILLED", "FINISHED"}


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda study, trial: study.tell(trial, 3.0), {"state": TrialState.COMPLETE, "values": [3.0]}),
        (lambda study, trial: trial.set_user_attr("a", 1), {"user_attrs": {"a": 1}}),
        (lambda study, trial: trial.suggest_int("n", 1, 1), {"params": {"n": 1}}),
    ],
)
@pytest.mark.filterwarnings("ignore:Heartbeat of storage")  # which only `trials.next_trial` sends
def test_a_write_whose_answer_is_lost_happens_once(
    write: Callable[[optuna.Study, optuna.Trial], object],
    expected: dict[str, object],
    server: Server,  # noqa: F811
    url: str,
) -> None:
    with line_to(server) as line:
        storage = open_storage(server.address(url.rpartition("/")[2], line.port))
        study = optuna.create_study(study_name="s", storage=storage, direction="maximize")
        trial = study.ask()
        line.lose_answers = 1
        write(study, trial)
        assert line.lose_answers == 0
        storage.close()
    (stored,) = trials("s", url)
    unwritten = {"state": TrialState.RUNNING, "values": None, "user_attrs": {}, "params": {}}
    assert {name: getattr(stored, name) for name in unwritten} == unwritten | expected


def test_a_trial_whose_making_has_no_answer_is_failed(server: Server, url: str) -> None:  # noqa: F811
    with line_to(server) as line:
        through = server.address(url.rpartition("/")[2], line.port)
        with HeldWorker("one", *FIT, "--storage", through, holds=(0,), times="heartbeat=1,grace=3") as worker:
            worker.wait_until_it_holds(0)
            storage = open_storage(through)
            study = optuna.load_study(study_name="s/max-batch", storage=storage)
            line.lose_answers = 1
            study._storage.create_new_trial(study._study_id)
            storage.close()
            worker.let_go(0)
            assert max_batches(worker.result()) == undisturbed()
    assert [trial.state for trial in trials("s/max-batch", url)].count(TrialState.FAIL) == 2


_TWO = """
import sys
from amp_track.study.database import worker_lock
print("asks", flush=True)
with worker_lock(sys.argv[1], "run"):
    print("is alone", flush=True)
"""


def test_a_block_is_for_one_worker_of_all_machines_until_it_has_been_stopped_for_too_long(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", _TWO, url]
    other_machine = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "other machine")}
    pipe = subprocess.PIPE
    with (
        worker_lock(url, "study"),
        worker_lock(url, "run"),
        subprocess.Popen(command, stdout=pipe, text=True, env=other_machine) as waiting,
    ):
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "asks\n"
        assert select.select([waiting.stdout], [], [], 1.0)[0] == [], "it waits"
        waiting.kill()
    with monkeypatch.context() as patch:
        patch.setattr("amp_track.study.database._HOLD_SECONDS", 1)
        with worker_lock(url, "run"):
            done = subprocess.run(command, stdout=pipe, text=True, env=other_machine, timeout=60)
    assert done.stdout.splitlines() == ["asks", "is alone"]
    with pytest.raises(LookupError), worker_lock(url, "run"):
        raise LookupError
    done = subprocess.run(command, stdout=pipe, text=True, env=other_machine, timeout=30)
    assert done.stdout.splitlines() == ["asks", "is alone"]


def test_workers_of_several_machines_that_begin_at_once_share_one_run(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a study whose tables are yet to be made. The locks of one machine lie in the user's cache folder."""
    with contextlib.ExitStack() as stack:
        workers = []
        for name in ("one", "two", "three"):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine-{name}"))
            workers.append(stack.enter_context(HeldWorker(name, *FIT, "--storage", url)))
        found = [max_batches(worker.result()) for worker in workers]
    assert found == [undisturbed()] * 3
    assert [run.info.run_name for run in runs() if "mlflow.parentRunId" not in run.data.tags] == ["alone", "s"]
