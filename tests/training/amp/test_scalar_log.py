import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_track.training.amp.scalar_log import ScalarLog

scalars = st.floats(width=32, allow_nan=False)


@settings(deadline=None)
@given(st.lists(st.tuples(scalars, st.sampled_from(["", "fetch", "poll", "truncate"])), max_size=200), st.randoms())
def test_what_is_appended_is_fetched_in_order(entries: list[tuple[float, str]], choice: object) -> None:
    log = ScalarLog()
    expected: list[float] = []
    for value, what in entries:
        log.append(torch.tensor(value))
        expected.append(value)
        assert len(log) == len(expected)
        if what in ("fetch", "poll"):  # nothing is on its way on a CPU
            assert log.fetch(wait=what == "fetch") == expected
            expected = []
        elif what == "truncate":
            expected = expected[: choice.randrange(len(expected) + 1)]  # type: ignore[attr-defined]
            log.truncate(len(expected))
    assert log.fetch() == expected
    assert len(log) == 0


def test_scalars_of_any_dtype_and_shape_are_fetched_as_numbers() -> None:
    log = ScalarLog()
    for scalar in (torch.tensor(1, dtype=torch.int32), torch.tensor([2.5], dtype=torch.bfloat16)):
        log.append(scalar)
    assert log.fetch() == [1.0, 2.5]
    log.append(torch.tensor(1.0))
    log.clear()
    assert log.fetch() == []
