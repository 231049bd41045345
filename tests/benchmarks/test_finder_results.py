"""Ratios compare whole commands, exist only where Lightning answered, and trials add up to the command."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.finder_results import LIGHTNING, OURS, Row, Run, answers_table, seconds_each, several_table, summary
from benchmarks.trial_phases import TimedTrial, end_of_proof, seconds_by_part, seconds_by_phase

EXACT = {10: ("fits", "oom")}


def row(finder: str, *precisions: str, answer: int | None = 10, seconds: tuple[float, ...] = (4.0,)) -> Row:
    """Return a row whose commands take twice the seconds to the proof, or as long as a finder without one."""
    return Row(
        model="Cnn", budget_mib=512, precisions=precisions, finder=finder,
        runs=tuple(
            Run(
                answers=dict.fromkeys(precisions, answer), probes=dict.fromkeys(precisions, 3),
                errors={} if answer else dict.fromkeys(precisions, "oops"),
                command_seconds=each * 2 if finder == OURS else each, proof_seconds=each if finder == OURS else None,
            )
            for each in seconds
        ),
        checks=dict.fromkeys(precisions, EXACT),
    )  # fmt: skip


def trial(kind: str, started: float, ended: float, *, fits: bool = True) -> TimedTrial:
    return TimedTrial(
        precision="fp32",
        kind=kind,
        batch_size=8,
        fits=fits,
        started=started,
        ended=ended,
        job_seconds=0.5,
        train_seconds=0.25,
    )


def test_ratios_are_of_medians_and_of_each_precision_of_a_command() -> None:
    rows = [
        row(OURS, "fp32", seconds=(4.0, 5.0, 9.0)),
        row(LIGHTNING, "fp32", seconds=(10.0, 1.0, 30.0)),
        row(OURS, "fp32", "bf16", seconds=(8.0,)),
    ]
    found = summary(rows)
    assert found["one"]["ratios"] == {"Cnn fp32, 512 MiB: fp32": 0.5}
    assert found["several"]["ratios"] == {"Cnn fp32, bf16, 512 MiB: fp32": 0.4}  # bf16 has no run of Lightning
    assert (found["several"]["exact"], found["several"]["cases"]) == (2, 2)


def test_a_precision_counts_in_each_command_that_searched_it() -> None:
    rows = [row(LIGHTNING, "bf16"), row(OURS, "fp32", "bf16"), row(OURS, "fp32", "amp", "bf16")]
    assert len(summary(rows)["several"]["ratios"]) == 2


def test_without_an_answer_of_lightning_there_is_no_ratio_but_its_error() -> None:
    rows = [row(OURS, "fp32"), row(LIGHTNING, "fp32", answer=None, seconds=(7.0,))]
    found = summary(rows)
    assert found["one"]["ratio_median"] is None
    assert found["without_ratio"] == {"Cnn fp32, 512 MiB": ["oops", 7.0]}
    assert "failed after 7.0 s: oops" in answers_table(rows)


def test_a_precision_without_kernels_takes_no_share_and_is_no_case() -> None:
    run = Run(answers={"fp32": 10, "amp": None}, errors={"amp": "no kernel"}, probes={"fp32": 3},
              command_seconds=9.0, proof_seconds=6.0)  # fmt: skip
    both = Row(model="Lstm", budget_mib=128, precisions=("fp32", "amp"), finder=OURS, runs=(run, run),
               checks={"fp32": EXACT})  # fmt: skip
    assert seconds_each(both) == 6.0
    assert summary([both])["several"]["cases"] == 1
    assert "fp32 10 exact; amp not possible" in several_table([both])
    silent = dataclasses.replace(run, errors={})
    found = summary([dataclasses.replace(both, runs=(silent, silent))])["several"]
    assert (found["cases"], found["exact"]) == (2, 1)


def test_a_failed_command_is_a_case_that_is_not_exact() -> None:
    failed = (*row(OURS, "fp32").runs, Run(answers={}, errors={"fp32": "died"}, command_seconds=1.0))
    found = summary([Row(**vars(row(OURS, "fp32")) | {"runs": failed})])["one"]
    assert (found["cases"], found["exact"], found["runs"], found["exact_runs"]) == (1, 0, 2, 1)


def test_the_phases_add_up_and_timing_comes_after_the_proof() -> None:
    trials = [
        trial("probe", 1.0, 2.0), trial("confirm", 2.5, 4.0, fits=False), trial("confirm", 4.0, 6.0),
        trial("repeat", 6.0, 7.0), trial("timing", 7.0, 9.0),
    ]  # fmt: skip
    phases = seconds_by_phase(trials)
    assert phases == {"probes": 3.0, "confirmation": 2.0, "repeats": 1.0, "timing": 2.0}
    assert end_of_proof(trials) == 7.0
    parts = seconds_by_part(trials)
    assert sum(parts.values()) == pytest.approx(end_of_proof(trials) - trials[0].started)
    assert parts["failing trials"] == 2.0
    assert parts["steps"] == 0.75
