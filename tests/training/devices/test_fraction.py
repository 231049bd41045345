from hypothesis import given
from hypothesis import strategies as st

from amp_track.training.devices.accelerator import fraction_for


@given(total_bytes=st.integers(2**30, 2**38), data=st.data())
def test_torch_makes_the_same_budget_of_its_fraction(total_bytes: int, data: st.DataObject) -> None:
    budget_bytes = data.draw(st.integers(1, total_bytes))
    assert int(fraction_for(budget_bytes, total_bytes) * total_bytes) == budget_bytes
