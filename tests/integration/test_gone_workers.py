"""Search workers that stand still or are gone: nothing is lost, counted twice, or left RUNNING."""

import itertools
import signal
import time
from typing import Any

import pytest
from held_workers import HeldWorker, in_state, machine, max_batches, runs, trials, undisturbed, wait_for
from optuna.trial import TrialState
from support import DIGITS, skip_without_namespaces

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("fresh_stores")]
STORAGES = ["sqlite:///optuna.db", "optuna.log"]
GRACE_SECONDS = 4
TIMES = f"heartbeat=2,grace={GRACE_SECONDS}"
COMMANDS = {
    "max-batch": ["max-batch", DIGITS, "--precision", "fp32,bf16", "--study", "s", "--json"],
    "train": ["search", DIGITS, "--precision", "fp32,bf16", "--study", "s", "--trials", "8", "--json"],
    "compare": ["compare", DIGITS, "--precision", "fp32,bf16", "--vary", "width=4,8,16", "--study", "s", "--json"],
}  # fmt: skip
"""By the part of the study in which a worker stands still, the command."""


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the commands take another storage by default."""
    monkeypatch.setenv("AMP_TRACK_STORAGE", request.param)
    return str(request.param)


def the_work_of(part: str, trial: Any) -> Any:
    """Return what only one trial of a study does."""
    if part == "max-batch":
        kind = trial.user_attrs["kind"]
        return (
            trial.number
            if kind in ("repeat", "timing")
            else (trial.params["precision"], trial.params["batch_size"], kind)
        )
    return str(trial.system_attrs["fixed_params"]) if "fixed_params" in trial.system_attrs else trial.number


@pytest.mark.parametrize(
    ("part", "storage"),
    [
        pytest.param("max-batch", STORAGES[0], marks=pytest.mark.slow),
        *(case for case in itertools.product(COMMANDS, STORAGES) if case != ("max-batch", STORAGES[0])),
    ],
    indirect=["storage"],
)
def test_a_worker_that_was_stopped_leaves_its_measurement_out_and_goes_on(part: str, storage: str) -> None:
    expected = undisturbed()
    if part == "train":
        undisturbed("s", storage=storage)
    with HeldWorker("first", *COMMANDS[part], holds=(0,), times=TIMES) as first:
        first.wait_until_it_holds(0)
        first.process.send_signal(signal.SIGSTOP)
        with HeldWorker("second", *COMMANDS[part], holds=(1, 3), times=TIMES) as second:
            second.wait_until_it_holds(1)
            time.sleep(6)  # more than the grace period
            second.let_go(1)
            second.wait_until_it_holds(3)
            first.let_go(0)
            first.process.send_signal(signal.SIGCONT)
            wait_for_another_trial_of(first, part)
            second.let_go(3)
            results = [worker.result() for worker in (first, second)]
    (failed,) = in_state(TrialState.FAIL, f"s/{part}")
    assert failed.user_attrs["worker"]["pid"] == first.process.pid
    assert first.stderr.count("taken over") == 1
    assert f"trial {failed.number} of s/{part} was taken over" in first.stderr
    assert "taken over" not in second.stderr
    complete = in_state(TrialState.COMPLETE, f"s/{part}")
    work = [the_work_of(part, trial) for trial in complete]
    assert len(work) == len(set(work)), "counted twice"
    assert the_work_of(part, failed) in work or part == "max-batch", "it was lost"
    for result in results:
        if part == "max-batch":
            assert max_batches(result) == expected
        elif part == "train":
            assert len(result["trials"]) >= 8
        else:
            assert len(complete) == 6
    statuses = {(run.data.tags.get("optuna.study"), run.data.tags.get("optuna.trial")): run for run in runs()}
    late = statuses[f"s/{part}", str(failed.number)]
    assert (late.info.status, late.data.tags["amp_track.status"]) == ("KILLED", "interrupted")
    assert [run.info.status for run in runs()].count("KILLED") == 1
    assert {run.info.status for run in runs()} == {"KILLED", "FINISHED"}


def wait_for_another_trial_of(worker: HeldWorker, part: str) -> None:
    def has_gone_on() -> bool:
        done = in_state(TrialState.COMPLETE, f"s/{part}")
        return any(trial.user_attrs["worker"]["pid"] == worker.process.pid for trial in done)

    wait_for(lambda: has_gone_on() or worker.process.poll() is not None)
    assert has_gone_on(), worker.stderr


@pytest.fixture
def elsewhere() -> tuple[str, ...]:
    skip_without_namespaces(machine("any"))
    return machine("elsewhere")


@pytest.mark.usefixtures("storage")
def test_a_machine_that_is_gone_is_noticed_by_a_worker_at_work(elsewhere: tuple[str, ...]) -> None:
    expected = undisturbed()
    command = COMMANDS["max-batch"]
    with HeldWorker("near", *command, holds=(0, 1), times=TIMES) as near:
        near.wait_until_it_holds(0)
        with HeldWorker("far", *command, holds=(1,), times=TIMES, prefix=elsewhere) as far:
            far.wait_until_it_holds(1)
        near.let_go(0)
        near.wait_until_it_holds(1)
        (lost,) = [
            trial for trial in in_state(TrialState.RUNNING, "s/max-batch") if trial.user_attrs["worker"]["pid"] == 1
        ]
        time.sleep(2 * GRACE_SECONDS)  # else what is left may be done before the lost one is given up
        near.let_go(1)
        assert max_batches(near.result()) == expected
    assert trials("s/max-batch")[lost.number].state is TrialState.FAIL
    assert {trial.state for trial in trials("s/max-batch")} == {TrialState.COMPLETE, TrialState.FAIL}
    of_trial = {(run.data.tags.get("optuna.study"), run.data.tags.get("optuna.trial")): run for run in runs()}
    assert of_trial["s/max-batch", str(lost.number)].info.status == "KILLED"
    assert of_trial["s/max-batch", str(lost.number)].data.tags["amp_track.status"] == "interrupted"
    assert {run.info.status for run in runs()} == {"FINISHED", "KILLED"}
