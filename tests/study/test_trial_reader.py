"""Trials as they are read in bulk: the same as Optuna reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import optuna
import pytest
import sqlalchemy
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import RDBStorage
from optuna.trial import TrialState, create_trial

from amp_track.study import opening, optuna_internals, storage, trial_reader
from amp_track.study.database import SharedStorage

URL = "sqlite:///optuna.db"
DISTRIBUTIONS = {
    "precision": CategoricalDistribution(("fp32", "amp", None)),
    "batch_size": IntDistribution(1, 1000, log=True),
    "lr": FloatDistribution(1e-4, 1.0, log=True),
}


@pytest.fixture
def opened() -> Iterator[SharedStorage]:
    shared = opening.open_storage(URL)
    assert isinstance(shared, SharedStorage)
    yield shared
    shared.close()


def study_of_all_kinds(shared: SharedStorage) -> optuna.Study:
    """Make a study with a trial in every state, and values and attributes of every kind, beside another study."""
    study = storage.open_study(
        "s", shared, URL, objectives=[("metric", "maximize"), ("speed", "minimize")], settings={}
    )
    other = storage.open_study("other", shared, URL, objectives=[("value", "maximize")], settings={})
    other.add_trial(create_trial(value=1.0, user_attrs={"of": "another"}))
    params = {"precision": None, "batch_size": 7, "lr": 0.25}
    for values in ([1.5, math.inf], [-math.inf, 0.0], [0.1, 1e300]):
        study.add_trial(
            create_trial(
                params=params,
                distributions=DISTRIBUTIONS,
                values=values,
                user_attrs={"text": "ö", "nothing": None, "nested": {"a": [1, 2.5, True]}},
                system_attrs={"constraints": [0.5]},
                intermediate_values={3: math.nan, 1: math.inf, 2: -math.inf, 4: 0.5},
            )
        )
    study.enqueue_trial({"batch_size": 3})
    for state in (TrialState.FAIL, TrialState.PRUNED, TrialState.RUNNING):
        study.add_trial(create_trial(state=state, params={"lr": 0.5}, distributions={"lr": DISTRIBUTIONS["lr"]}))
    other.add_trial(create_trial(value=2.0))
    return study


def test_every_kind_of_trial_is_read_as_optuna_reads_it(opened: SharedStorage) -> None:
    study_id = optuna_internals.study_id_of(study_of_all_kinds(opened))
    theirs = RDBStorage(URL)
    trials = theirs.get_all_trials(study_id)
    assert {trial.state for trial in trials} == set(TrialState)
    # A NaN is not equal to itself; `repr` has everything, the order of params too.
    assert [repr(trial) for trial in opened.get_all_trials(study_id)] == [repr(trial) for trial in trials]
    theirs.engine.dispose()


def test_what_trials_have_in_common_is_in_memory_once(opened: SharedStorage) -> None:
    first, second, *_ = opened.get_all_trials(optuna_internals.study_id_of(study_of_all_kinds(opened)), deepcopy=False)
    assert first.user_attrs["nested"] is second.user_attrs["nested"]
    assert first.distributions["lr"] is second.distributions["lr"]


@pytest.mark.parametrize("states", [None, (TrialState.COMPLETE,), (TrialState.FAIL, TrialState.RUNNING)])
@pytest.mark.parametrize(("older", "above"), [(set(), -1), ({2, 6}, 3), (set(range(50_000)), 3), (set(), 10**6)])
def test_the_same_part_of_a_study_is_read(
    states: tuple[TrialState, ...] | None, older: set[int], above: int, opened: SharedStorage
) -> None:
    study_id = optuna_internals.study_id_of(study_of_all_kinds(opened))
    trials = trial_reader.read_trials(opened, study_id, None, set(), -1)
    expected = [
        repr(trial)
        for trial in trials
        if (states is None or trial.state in states)
        and (optuna_internals.id_of(trial) > above or optuna_internals.id_of(trial) in older)
    ]
    read = trial_reader.read_trials(opened, study_id, states, older, above)
    assert [repr(trial) for trial in read] == expected


def test_more_trials_than_are_asked_for_at_a_time(opened: SharedStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_reader, "_AT_A_TIME", 2)
    test_every_kind_of_trial_is_read_as_optuna_reads_it(opened)


def test_a_study_that_is_gone_is_told(opened: SharedStorage) -> None:
    with pytest.raises(KeyError, match="Record does not exist"):
        opened.get_all_trials(999)


def test_the_studies_of_a_process_read_a_finished_trial_once_and_see_what_others_write(opened: SharedStorage) -> None:
    study = study_of_all_kinds(opened)
    before = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    asked: list[str] = []
    sqlalchemy.event.listen(
        opened.engine, "before_cursor_execute", lambda *arguments: asked.append(f"{arguments[2]} {arguments[3]}")
    )
    again = opening.load_study("s", opened)
    assert again is not None
    for trial in again.get_trials(deepcopy=False):
        is_the_same = trial is before[trial.number]
        assert is_the_same == trial.state.is_finished()
    assert any("trial_params" in question for question in asked)  # of those that run
    other_process = RDBStorage(URL)
    (running,) = (trial for trial in before.values() if trial.state is TrialState.RUNNING)
    other_process.set_trial_user_attr(optuna_internals.id_of(running), "note", "new")
    other_process.set_trial_state_values(optuna_internals.id_of(running), TrialState.COMPLETE, [2.0, 3.0])
    optuna.load_study(study_name="s", storage=other_process).add_trial(create_trial(values=[4.0, 5.0]))
    other_process.engine.dispose()
    seen = study.get_trials(deepcopy=False)
    assert (seen[running.number].values, seen[running.number].user_attrs["note"]) == ([2.0, 3.0], "new")
    assert seen[-1].values == [4.0, 5.0]


def test_the_pareto_front_is_optunas(opened: SharedStorage) -> None:
    study = study_of_all_kinds(opened)
    study.add_trial(create_trial(values=[9.0, 9.0], system_attrs={"constraints:trains": 0.0}))
    study.add_trial(create_trial(values=[8.0, 9.5], system_attrs={"constraints:trains": 0.0}))
    front = [trial.number for trial in optuna_internals.pareto_front(study, study.get_trials(deepcopy=False))]
    assert front == [trial.number for trial in study.best_trials] != []
