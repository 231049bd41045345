"""Results with everything that a page draws, and a search of any number of trials."""

from __future__ import annotations

import dataclasses

from table_samples import COMPARE, FIT, SEARCH, training

from amp_track.records.result import Outcome, Verdict
from amp_track.results.max_batch import ProbeResult
from amp_track.results.search import SearchResult, TrialResult

MEBIBYTE = 2**20


def probe(trial: int, batch_size: int, *, fits: bool) -> ProbeResult:
    outcome = dataclasses.replace(training("fp32"), max_memory_bytes=batch_size * MEBIBYTE, max_allocated_bytes=None)
    if not fits:
        outcome = Outcome(verdict=Verdict.OOM, phase="forward", max_allocated_bytes=batch_size * MEBIBYTE)
    return ProbeResult(
        trial=trial, precision="fp32", batch_size=batch_size, kind="probe", reason="to see", outcome=outcome,
        predicted_bytes=batch_size * MEBIBYTE, run_id=f"probe{trial}",
    )  # fmt: skip


PROBED = dataclasses.replace(
    FIT, limit_bytes=100 * MEBIBYTE,
    probes=(probe(0, 16, fits=True), probe(1, 90, fits=True), probe(2, 101, fits=False)),
)  # fmt: skip
SEARCHED = dataclasses.replace(SEARCH, fit=PROBED)
RESULTS = {"fit": PROBED, "search": SEARCHED, "compare": dataclasses.replace(COMPARE, answers=("it pays",))}


def search_of(trials: int) -> SearchResult:
    """Return a search that has made so many trainings."""
    made = tuple(
        TrialResult(
            number=number, precision=("fp32", "amp")[number % 2], batch_size=16 + number, learning_rate=0.1,
            outcome=dataclasses.replace(training("amp"), wall_seconds=number / 7), run_id=f"{number:032x}",
        )
        for number in range(trials)
    )  # fmt: skip
    return dataclasses.replace(SEARCHED, trials=made)
