"""What `ui` prints."""

from __future__ import annotations

from amp_track.report.pages import lines
from amp_track.results.pages import Page, Pages


def test_the_addresses_of_a_study_stand_in_one_column() -> None:
    shown = Pages("a", (Page("a in MLflow", "http://x/1"), Page("a/max-batch", "http://y/2")), ("one", "the other"))
    assert lines(shown) == [
        "study a", "  a in MLflow  http://x/1", "  a/max-batch  http://y/2", "Press Ctrl-C to stop one and the other",
    ]  # fmt: skip


def test_without_a_study_those_there_are_are_named_twenty_at_most() -> None:
    page = (Page("all runs", "http://x/1"),)
    assert lines(Pages(None, page, ("one",)))[1:] == [
        "No study yet. Create one with amp-track max-batch.",
        "Press Ctrl-C to stop one",
    ]
    names = tuple(f"s{number}" for number in range(22))
    assert lines(Pages(None, page, ("one",), names))[1].endswith(": " + ", ".join(names[:20]) + " and 2 more")
