import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_track.training.amp.scalar_log import ScalarLog

CPU = torch.device("cpu")


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(width=32, allow_nan=False), st.booleans()), max_size=200))
def test_what_is_appended_is_fetched_in_order(entries: list[tuple[float, bool]]) -> None:
    log = ScalarLog(200, CPU)
    expected: list[float] = []
    for value, fetch in entries:
        log.append(torch.tensor(value))
        expected.append(value)
        assert len(log) == len(expected)
        if fetch:
            assert log.fetch() == expected
            expected = []
    assert log.fetch() == expected
    assert len(log) == 0


def test_other_dtypes_are_kept_as_float32() -> None:
    log = ScalarLog(100, CPU)
    for _ in range(70):
        log.append(torch.tensor(1.5, dtype=torch.float16))
    assert log.fetch() == [1.5] * 70


def test_clearing_forgets() -> None:
    log = ScalarLog(100, CPU)
    for number in range(70):
        log.append(torch.tensor(float(number)))
    log.clear()
    log.append(torch.tensor(7.0))
    assert log.fetch() == [7.0]


def test_more_than_it_holds_is_an_error() -> None:
    log = ScalarLog(3, CPU)
    for number in range(3):
        log.append(torch.tensor(float(number)))
    with pytest.raises(IndexError, match=r"full \(3 scalars\)"):
        log.append(torch.tensor(3.0))
    assert log.fetch() == [0.0, 1.0, 2.0]
