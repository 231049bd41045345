"""What a search remembers of its trials is what it would see of all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from amp_track.study.trial_cache import SoFar

LOOKS = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.tuples(st.integers(0, 20), st.sampled_from(TrialState)), max_size=8)),
    min_size=1, max_size=6,
)  # fmt: skip
"""Before each look: how many trials have begun, and which others have become what."""


def trial(number: int, state: TrialState) -> FrozenTrial:
    made = create_trial(
        state=state,
        values=[1.0] if state is TrialState.COMPLETE else None,
        params={"batch_size": batch_size_of(number)},
        distributions={"batch_size": IntDistribution(1, 5)},
    )
    made.number = number
    return made


def batch_size_of(number: int) -> int:
    return number % 5 + 1


@given(LOOKS)
def test_it_knows_what_all_trials_say(looks: list[tuple[int, list[tuple[int, TrialState]]]]) -> None:
    so_far, trials = SoFar(), list[FrozenTrial]()
    for new, changes in looks:
        trials += [trial(len(trials) + place, TrialState.WAITING) for place in range(new)]
        for number, state in changes:
            if number < len(trials) and not trials[number].state.is_finished():
                trials[number] = trial(number, state)
        so_far.look(trials)
        complete = [each.number for each in trials if each.state is TrialState.COMPLETE]
        running = [each.number for each in trials if each.state is TrialState.RUNNING]
        assert sorted(each.number for each in so_far.complete) == complete
        assert [each.number for each in so_far.running] == running
        assert so_far.begun == len(complete) + len(running)
        for number in range(25):
            assert so_far.begun_before(number) == sum(other < number for other in complete + running)
        for batch_size in range(1, 6):
            found = so_far.complete_with({"batch_size": batch_size})
            same = [number for number in complete if batch_size_of(number) == batch_size]
            assert found.number in same if found is not None else not same


def test_a_damaged_trial_whose_params_have_no_hash_is_remembered() -> None:
    damaged = trial(0, TrialState.COMPLETE)
    damaged.params = {"batch_size": [1]}
    so_far = SoFar()
    so_far.look([damaged])
    assert so_far.complete == [damaged]
    assert so_far.complete_with({"batch_size": 1}) is None
