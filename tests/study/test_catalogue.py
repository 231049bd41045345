"""Which studies a storage holds, told by the names of Optuna's studies."""

from __future__ import annotations

import pytest

from amp_track.records.errors import BadInput
from amp_track.study.storage import known_study, parts_by_study

STORAGE = "sqlite:///optuna.db"


def test_the_parts_of_a_study_are_found_in_the_order_in_which_they_are_made() -> None:
    names = ["a/seeds", "b/compare", "a/train", "a/max-batch", "somebody else's", "c/other", "a/max-batch/bf16"]
    assert parts_by_study(names) == {"a": ["a/max-batch", "a/max-batch/bf16", "a/train", "a/seeds"], "b": ["b/compare"]}


@pytest.mark.parametrize("asked", ["digits", "digits/max-batch"])
def test_a_study_is_known_by_its_name_and_by_a_part_of_it(asked: str) -> None:
    assert known_study(asked, ["mlp", "digits"], storage=STORAGE) == "digits"


def test_an_unknown_study_names_the_nearest_ones() -> None:
    known = ["digits-cpu-64MiB-43995c", "zzz", "digits-cpu-1GiB-1b2c3d", "digits", "digit"]
    with pytest.raises(BadInput) as told:
        known_study("digitz", known, storage=STORAGE)
    (line,) = str(told.value).splitlines()
    assert line.startswith(f"STUDY: got digitz, expected a study in {STORAGE}, such as digit, digits, digits-cpu-")
    assert "zzz" not in line


def test_a_storage_without_studies_says_so() -> None:
    with pytest.raises(BadInput, match="--study: got a, but here holds no studies"):
        known_study("a", [], storage="here", flag="--study")
