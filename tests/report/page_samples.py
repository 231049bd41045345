"""Results with everything that a page draws, a search of any number of trials, and a reader of HTML."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

from table_samples import COMPARE, FIT, SEARCH, training

from amp_track.records.result import JobResult, JobStatus
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow

MEBIBYTE = 2**20


class Reader(HTMLParser):
    """Collects the tags, text and tables of HTML, and insists that every tag is closed in its place."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.feed(fragment)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "input", "br", "link"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def probe(trial: int, batch_size: int, *, fits: bool) -> TrialRow:
    job_result = dataclasses.replace(
        training("fp32"), peak_bytes=batch_size * MEBIBYTE, train_peak_allocated_bytes=None
    )
    if not fits:
        job_result = JobResult(status=JobStatus.OOM, phase="forward", train_peak_allocated_bytes=batch_size * MEBIBYTE)
    return TrialRow(
        number=trial, precision="fp32", batch_size=batch_size, kind="probe", reason="to see", job_result=job_result,
        predicted_bytes=batch_size * MEBIBYTE, run_id=f"probe{trial}",
    )  # fmt: skip


PROBED = dataclasses.replace(
    FIT, limit_bytes=100 * MEBIBYTE,
    probes=(probe(0, 16, fits=True), probe(1, 90, fits=True), probe(2, 101, fits=False)),
)  # fmt: skip
SEARCHED = dataclasses.replace(SEARCH, limits=PROBED)
RESULTS = {"max-batch": PROBED, "search": SEARCHED, "compare": dataclasses.replace(COMPARE, answers=("it pays",))}


def search_of(trials: int) -> SearchResult:
    """Return a search that has made so many trainings."""
    made = tuple(
        TrialRow(
            number=number, precision=("fp32", "amp")[number % 2], batch_size=16 + number, learning_rate=0.1,
            job_result=dataclasses.replace(training("amp"), wall_seconds=number / 7), run_id=f"{number:032x}",
        )
        for number in range(trials)
    )  # fmt: skip
    return dataclasses.replace(SEARCHED, trials=made)
