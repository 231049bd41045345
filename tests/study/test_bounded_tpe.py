"""TPE that looks at a hundred trials: the same as Optuna's up to there, and inside the space beyond."""

from __future__ import annotations

import random

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from amp_track.study.bounded_tpe import BoundedTPE, TellingTrials, which_say_most
from amp_track.study.trial_cache import SoFar

DISTRIBUTIONS = {
    "precision": CategoricalDistribution(("fp32", "amp")),
    "batch_size": IntDistribution(16, 1000, log=True),
}
BOTH = [StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE]


def study(count: int, seed: int = 0) -> optuna.Study:
    """Return a study of made-up trainings: large batches are fast, and have a high loss."""
    chance, made = random.Random(seed), optuna.create_study(directions=["minimize", "maximize"])
    for _ in range(count):
        batch_size = chance.randint(16, 1000)
        made.add_trial(
            create_trial(
                params={"precision": chance.choice(("fp32", "amp")), "batch_size": batch_size},
                distributions=DISTRIBUTIONS,
                values=[batch_size + chance.random(), batch_size + chance.random()],
            )
        )
    return made


def drawn(count: int, sampler: optuna.samplers.BaseSampler) -> tuple[str, int]:
    made = study(count)
    made.sampler = sampler
    trial = made.ask()
    return trial.suggest_categorical("precision", ("fp32", "amp")), trial.suggest_int("batch_size", 16, 1000, log=True)


def bounded(count: int, seed: int) -> BoundedTPE:
    """Return the sampler of the next trial of a study with so many."""
    so_far = SoFar()
    so_far.look(study(count).trials)
    return BoundedTPE(seed=seed, looks_at=TellingTrials(BOTH, so_far).beside(count))


@pytest.mark.parametrize("count", [0, 5, 30, 100])
def test_it_is_optunas_own_as_long_as_there_are_few(count: int) -> None:
    for seed in range(5):
        assert drawn(count, bounded(count, seed)) == drawn(count, optuna.samplers.TPESampler(seed=seed))


def test_of_many_trials_it_draws_what_optuna_draws_of_those_that_say_most() -> None:
    for seed in range(5):
        few = optuna.create_study(directions=BOTH, sampler=optuna.samplers.TPESampler(seed=seed))
        few.add_trials(which_say_most(study(300).trials, BOTH))
        trial = few.ask()
        theirs = (
            trial.suggest_categorical("precision", ("fp32", "amp")),
            trial.suggest_int("batch_size", 16, 1000, log=True),
        )
        assert drawn(300, bounded(300, seed)) == theirs


def test_of_many_trials_it_draws_inside_the_space() -> None:
    draws = [drawn(300, bounded(300, seed)) for seed in range(20)]
    assert len(set(draws)) > 10
    assert all(16 <= batch_size <= 1000 for _, batch_size in draws)


def test_it_draws_near_the_best() -> None:
    """One objective that wants batches of 200."""
    made = optuna.create_study(direction="maximize")
    chance = random.Random(1)
    for _ in range(400):
        batch_size = chance.randint(16, 1000)
        value = -abs(batch_size - 200.0)
        made.add_trial(
            create_trial(params={"b": batch_size}, distributions={"b": IntDistribution(16, 1000)}, value=value)
        )
    near, so_far = 0, SoFar()
    telling = TellingTrials(made.directions, so_far)
    for seed in range(20):
        so_far.look(made.trials)
        made.sampler = BoundedTPE(seed=seed, looks_at=telling.beside(len(made.trials)))
        near += abs(made.ask().suggest_int("b", 16, 1000) - 200) <= 100
    assert near >= 15


def frozen(number: int, values: list[float] | None, state: TrialState | None = None) -> FrozenTrial:
    trial = create_trial(values=values, state=state or (TrialState.RUNNING if values is None else TrialState.COMPLETE))
    trial.number = number
    return trial


@given(st.lists(st.none() | st.lists(st.floats(-10, 10), min_size=2, max_size=2), min_size=101, max_size=300))
def test_what_says_most_are_the_running_the_best_and_the_newest(values: list[list[float] | None]) -> None:
    trials = [frozen(number, of_trial) for number, of_trial in enumerate(values)]
    chosen = which_say_most(trials, BOTH)
    numbers = [trial.number for trial in chosen]
    assert numbers == sorted(set(numbers))
    running = [trial.number for trial in trials if trial.state is TrialState.RUNNING]
    assert set(running[-40:]) <= set(numbers)
    finished = [trial for trial in trials if trial.values is not None]
    assert len(numbers) == min(100, len(finished) + len(running[-40:]))
    if finished:
        assert min(trial.values[0] for trial in finished) in {t.values[0] for t in chosen if t.values is not None}
        assert max(trial.values[1] for trial in finished) in {t.values[1] for t in chosen if t.values is not None}


@pytest.mark.parametrize("seed", range(20))
def test_what_is_remembered_of_finished_trials_leads_to_the_same_hundred(seed: int) -> None:
    """At each look new trials have begun, and others have begun or ended, in any order and often equally good."""
    chance, so_far, trials = random.Random(seed), SoFar(), list[FrozenTrial]()
    telling = TellingTrials(BOTH, so_far)
    states = (*[TrialState.COMPLETE] * 6, TrialState.RUNNING, TrialState.WAITING, TrialState.FAIL)
    for _ in range(6):
        trials += [frozen(len(trials) + place, None) for place in range(chance.randint(0, 90))]
        part = chance.choice((0.2, 0.6, 1.0))
        for number, trial in enumerate(trials):
            if not trial.state.is_finished() and chance.random() < part:
                state = chance.choice(states)
                values = [float(chance.choice((chance.randint(0, 500), 0, 500, "inf"))) for _ in BOTH]
                trials[number] = frozen(number, values if state is TrialState.COMPLETE else None, state)
        drawn = next((trial.number for trial in trials if trial.state is TrialState.RUNNING), -1)
        others = [trial for trial in trials if trial.number != drawn]
        seen = [trial for trial in others if trial.state in (TrialState.COMPLETE, TrialState.RUNNING)]
        expected = which_say_most(others, BOTH) if len(seen) > 100 else None
        so_far.look(trials)
        assert telling.beside(drawn) == expected
