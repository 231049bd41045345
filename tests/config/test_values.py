import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.config import values
from amp_track.records import units


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 * 2**20), ("6GiB", 6 * 2**30), ("6GB", 6 * 10**9), ("1.5 GiB", 3 * 2**29), ("4096", 4096)],
)
def test_byte_size_reads_binary_and_decimal_units(text: str, size: int) -> None:
    assert values.byte_size(text) == size


def test_the_smallest_size_is_a_byte() -> None:
    assert values.byte_size(" 1 ") == 1


@pytest.mark.parametrize("text", ["", "lots", "0", "1.5", "1.0", "-5MiB", "5%", "MiB", "5 MiB!", "8EiB", "9" * 400])
def test_byte_size_rejects_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError):
        values.byte_size(text)


@given(st.integers(min_value=1, max_value=10**15))
def test_positive_integer_reads_back_what_was_written(number: int) -> None:
    assert values.positive_integer(str(number)) == number


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "abc", "", "1e3"])
def test_positive_integer_rejects(text: str) -> None:
    with pytest.raises(ValueError):
        values.positive_integer(text)


@pytest.mark.parametrize("text", ["0", "-1e-3", "nan", "inf", "abc"])
def test_positive_number_rejects(text: str) -> None:
    with pytest.raises(ValueError):
        values.positive_number(text)


@pytest.mark.parametrize(("text", "number"), [("0", 0), (" 7 ", 7), ("007", 7)])
def test_natural_number_reads(text: str, number: int) -> None:
    assert values.natural_number(text) == number


@pytest.mark.parametrize("text", ["-1", "1.5", "abc", "", "1_000", "+1"])
def test_natural_number_rejects(text: str) -> None:
    with pytest.raises(ValueError):
        values.natural_number(text)


def test_there_are_four_precisions_in_a_fixed_order() -> None:
    assert values.PRECISIONS == ("fp32", "tf32", "amp", "bf16")


def test_fp16_is_another_name_for_amp() -> None:
    assert values.precision("fp16") == "amp"
    assert values.precisions("fp16,bf16,amp") == ("amp", "bf16")


def test_precisions_keeps_the_order_and_drops_repeats() -> None:
    assert values.precisions("bf16, fp32,bf16") == ("bf16", "fp32")
    with pytest.raises(ValueError, match="fp64"):
        values.precisions("bf16,fp64")


def test_a_choice_is_one_of_those_there_are() -> None:
    parse = values.one_of("linear", "sqrt")
    assert parse("sqrt") == "sqrt"
    with pytest.raises(ValueError, match="cube"):
        parse("cube")


def test_interval_wants_the_lower_first() -> None:
    assert values.interval("1e-4,1e-2") == (1e-4, 1e-2)
    for text in ("1e-2,1e-4", "1,1", "1", "1,2,3", "0,1"):
        with pytest.raises(ValueError):
            values.interval(text)


def test_option_splits_at_the_first_equals_sign() -> None:
    assert values.option("path=a=b") == ("path", "a=b")
    for text in ("width", "=8", "my width=8", "8=8", ""):
        with pytest.raises(ValueError):
            values.option(text)


def test_options_has_each_value_once() -> None:
    assert values.options("width=8, 4,8") == ("width", ("8", "4"))
    for text in ("width", "width=", "width=4,,8"):
        with pytest.raises(ValueError):
            values.options(text)


@pytest.mark.parametrize("text", ["cpu", "cuda", "cuda:1", "mps", "cuda:12"])
def test_device_reads(text: str) -> None:
    assert values.device(text) == text


@pytest.mark.parametrize("text", ["", "CPU", "cuda:", "cuda:x", ":0", "cuda:0 "])
def test_device_rejects(text: str) -> None:
    with pytest.raises(ValueError):
        values.device(text)


def test_study_names_have_no_slash() -> None:
    assert values.study_name("my study") == "my study"
    for text in ("", " ", "a/b", "a\nb", "x" * 501):
        with pytest.raises(ValueError):
            values.study_name(text)


def test_run_ids_are_words_and_dashes() -> None:
    assert values.run_id("3f_A-9") == "3f_A-9"
    for text in ("", "a b", "../x", "a/b"):
        with pytest.raises(ValueError):
            values.run_id(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_format_bytes_is_within_half_a_per_cent(size: int) -> None:
    number, unit = units.format_bytes(size).split()
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert abs(float(number) * factor - size) <= 0.005 * size + 0.5


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (1024, "1 KiB"), (-2048, "-2 KiB"), (999 * 2**20, "999 MiB"),
        (1000 * 2**20, "0.977 GiB"), (1536 * 2**20, "1.5 GiB"), (2**40, "1.02e+03 GiB"),
    ],
)  # fmt: skip
def test_format_bytes_has_three_digits_and_the_unit_that_keeps_them_below_1000(size: int, text: str) -> None:
    assert units.format_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "left_free"),
    [("5%", 50), ("0.15%", 2), ("512MiB", 512 * 2**20), ("300", 300), (" 10 % ", 100), ("99.5%", 995)],
)
def test_headroom_is_a_part_of_the_budget_or_a_size(text: str, left_free: int) -> None:
    assert values.headroom(text).of(1000) == left_free


@pytest.mark.parametrize("text", ["", "0%", "100%", "-5%", "nan%", "inf%", "x%", "much"])
def test_headroom_rejects(text: str) -> None:
    with pytest.raises(ValueError):
        values.headroom(text)


@pytest.mark.parametrize("text", ["5%", "0.15%", "512 MiB"])
def test_headroom_is_shown_as_it_was_given(text: str) -> None:
    assert str(values.headroom(text)) == text


def test_without_headroom_nothing_is_left_free() -> None:
    assert values.Headroom().of(1000) == 0
    assert str(values.Headroom()) == "0 B"


@pytest.mark.parametrize(
    ("text", "reference", "tolerance"), [("1%", -0.8, 0.008), (" 50% ", 4, 2), ("0.005", -0.8, 0.005)]
)
def test_margin_is_a_part_of_the_reference_or_a_number(text: str, reference: float, tolerance: float) -> None:
    found = values.tolerance(text)
    assert found.of(reference) == pytest.approx(tolerance)
    assert str(found) == text.strip()


@pytest.mark.parametrize("text", ["", "0", "0%", "-1%", "nan", "x%"])
def test_margin_rejects(text: str) -> None:
    with pytest.raises(ValueError):
        values.tolerance(text)


def test_no_margin_is_no_difference() -> None:
    assert values.Tolerance().of(0.9) == 0
