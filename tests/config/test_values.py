from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.config import values
from amp_track.records import units

READ = [
    (values.byte_size, {
        "64MiB": 64 * 2**20, "6GiB": 6 * 2**30, "6GB": 6 * 10**9, "1.5 GiB": 3 * 2**29, "4096": 4096, " 1 ": 1,
    }),
    (values.memory_budget, {"1MiB": 2**20, "1048576": 2**20}),
    (values.positive_integer, {"1": 1, "1000000000000000": 10**15}),
    (values.natural_number, {"0": 0, " 7 ": 7, "007": 7}),
    (values.precision, {"fp16": "amp"}),
    (values.precisions, {"fp16,bf16,amp": ("amp", "bf16"), "bf16, fp32,bf16": ("fp32", "bf16")}),
    (values.one_of("linear", "sqrt"), {"sqrt": "sqrt"}),
    (values.interval, {"1e-4,1e-2": (1e-4, 1e-2)}),
    (values.option, {"path=a=b": ("path", "a=b")}),
    (values.options, {"width=8, 4,8": ("width", ("8", "4"))}),
    (values.device, {text: text for text in ("cpu", "cuda", "cuda:1", "mps", "cuda:12")}),
    (values.study_name, {"my study": "my study"}),
    (values.run_id, {"3f_A-9": "3f_A-9"}),
]  # fmt: skip
REJECTED = [
    (values.byte_size, ["", "lots", "0", "1.5", "1.0", "-5MiB", "5%", "MiB", "5 MiB!", "8EiB", "9" * 400]),
    (values.memory_budget, ["300", "1048575", "512KiB"]),
    (values.memory_budget_text, ["300"]),
    (values.positive_integer, ["0", "-1", "1.5", "abc", "", "1e3"]),
    (values.positive_number, ["0", "-1e-3", "nan", "inf", "abc"]),
    (values.natural_number, ["-1", "1.5", "abc", "", "1_000", "+1"]),
    (values.precisions, ["bf16,fp64"]),
    (values.one_of("linear", "sqrt"), ["cube"]),
    (values.interval, ["1e-2,1e-4", "1,1", "1", "1,2,3", "0,1"]),
    (values.option, ["width", "=8", "my width=8", "8=8", ""]),
    (values.options, ["width", "width=", "width=4,,8"]),
    (values.device, ["", "CPU", "cuda:", "cuda:x", ":0", "cuda:0 "]),
    (values.study_name, ["", " ", "a/b", "a\nb", "x" * 501]),
    (values.run_id, ["", "a b", "../x", "a/b"]),
    (values.headroom, ["", "0%", "100%", "-5%", "nan%", "inf%", "x%", "much"]),
    (values.tolerance, ["", "0", "0%", "-1%", "nan", "x%"]),
]


@pytest.mark.parametrize(
    ("parse", "text", "value"), [(parse, text, value) for parse, texts in READ for text, value in texts.items()]
)
def test_texts_are_read(parse: Callable[[str], object], text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(("parse", "text"), [(parse, text) for parse, texts in REJECTED for text in texts])
def test_texts_are_rejected(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_format_bytes_is_within_half_a_per_cent(size: int) -> None:
    number, unit = units.format_bytes(size).split()
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert abs(float(number) * factor - size) <= 0.005 * size + 0.5


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (1024, "1 KiB"), (-2048, "-2 KiB"), (999 * 2**20, "999 MiB"),
        (1000 * 2**20, "0.977 GiB"), (1536 * 2**20, "1.5 GiB"), (1023 * 2**30, "0.999 TiB"), (3 * 2**40, "3 TiB"),
    ],
)  # fmt: skip
def test_format_bytes_has_three_digits_and_the_unit_that_keeps_them_below_1000(size: int, text: str) -> None:
    assert units.format_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "free_bytes", "shown"),
    [
        ("5%", 50, "5%"), ("0.15%", 2, "0.15%"), ("512MiB", 512 * 2**20, "512 MiB"), ("300", 300, "300 B"),
        (" 10 % ", 100, "10%"), ("99.5%", 995, "99.5%"),
    ],
)  # fmt: skip
def test_headroom_is_a_fraction_of_the_budget_or_a_size(text: str, free_bytes: int, shown: str) -> None:
    found = values.headroom(text)
    assert (found.of(1000), str(found)) == (free_bytes, shown)


def test_no_headroom_leaves_nothing_free_and_no_tolerance_is_no_difference() -> None:
    assert (values.Headroom().of(1000), str(values.Headroom())) == (0, "0 B")
    assert values.Tolerance().of(0.9) == 0


@pytest.mark.parametrize(
    ("text", "reference", "tolerance"), [("1%", -0.8, 0.008), (" 50% ", 4, 2), ("0.005", -0.8, 0.005)]
)
def test_tolerance_is_a_fraction_of_the_reference_or_a_number(text: str, reference: float, tolerance: float) -> None:
    found = values.tolerance(text)
    assert found.of(reference) == pytest.approx(tolerance)
    assert str(found) == text.strip()
