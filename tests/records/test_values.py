import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.records import values


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 * 2**20), ("6GiB", 6 * 2**30), ("6GB", 6 * 10**9), ("1.5 GiB", 3 * 2**29), ("4096", 4096)],
)
def test_byte_size_reads_binary_and_decimal_units(text: str, size: int) -> None:
    assert values.byte_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "0", "-5MiB", "5%", "MiB"])
def test_byte_size_refuses_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError):
        values.byte_size(text)


@given(st.integers(min_value=1, max_value=10**15))
def test_positive_integer_reads_back_what_was_written(number: int) -> None:
    assert values.positive_integer(str(number)) == number


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "abc", "", "1e3"])
def test_positive_integer_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        values.positive_integer(text)


@pytest.mark.parametrize("text", ["0", "-1e-3", "nan", "inf", "abc"])
def test_positive_number_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        values.positive_number(text)


def test_precisions_keeps_the_order_and_drops_repeats() -> None:
    assert values.precisions("bf16, fp32,bf16") == ("bf16", "fp32")


def test_interval_wants_the_lower_first() -> None:
    assert values.interval("1e-4,1e-2") == (1e-4, 1e-2)
    with pytest.raises(ValueError):
        values.interval("1e-2,1e-4")


def test_option_splits_at_the_first_equals_sign() -> None:
    assert values.option("path=a=b") == ("path", "a=b")
    with pytest.raises(ValueError):
        values.option("width")


@given(st.integers(min_value=0, max_value=2**60))
def test_format_bytes_is_within_half_a_per_cent(size: int) -> None:
    number, unit = values.format_bytes(size).split()
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert abs(float(number) * factor - size) <= 0.005 * size + 0.5


@pytest.mark.parametrize(
    ("text", "left_free"), [("5%", 50), ("0.15%", 2), ("512MiB", 512 * 2**20), ("300", 300), (" 10 % ", 100)]
)
def test_headroom_is_a_part_of_the_budget_or_a_size(text: str, left_free: int) -> None:
    assert values.headroom(text).of(1000) == left_free


@pytest.mark.parametrize("text", ["", "0%", "100%", "-5%", "nan%", "inf%", "x%", "much"])
def test_headroom_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        values.headroom(text)
