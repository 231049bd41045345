"""Rows of benchmarks.finders, and their figures and tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from benchmarks import markdown
from benchmarks.peers import PEERS
from benchmarks.trial_phases import PARTS, PHASES

OURS, LIGHTNING = "amp-track", PEERS[0]
AIM_OF_ONE, AIM_OF_SEVERAL, NEVER_ABOVE = 0.6, 0.5, 1.0
"""Medians of the seconds to the proven answer over those of Lightning's binary search, for one precision in a command
and for each of several, and the limit of every case."""
_FAILS = ("oom", "kernel_limit", "over_dataset")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One command. Its answer is None at a precision at which it found none, for the reason in `errors`."""

    answers: dict[str, int | None]
    errors: dict[str, str] = field(default_factory=dict)
    probes: dict[str, int] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)
    """In how many fresh processes the answer ran."""
    command_seconds: float
    proof_seconds: float | None = None
    """From the start of the command to the proof of its last answer; None for a finder that proves nothing."""
    plan_seconds: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    trials: list[tuple[str, str, int, bool]] = field(default_factory=list)
    """The precision, kind and batch size of each trial, and whether it fit."""

    @property
    def answer_seconds(self) -> float:
        """The seconds from the start of the command to its answer."""
        return self.command_seconds if self.proof_seconds is None else self.proof_seconds

    @property
    def has_answer(self) -> bool:
        return any(self.answers.values())

    def has_no_kernel(self, precision: str) -> bool:
        """Return whether the command has ended without an answer at a precision, and said why."""
        return precision in self.errors and precision in self.answers and self.answers[precision] is None


@dataclass(frozen=True, kw_only=True)
class Row:
    """The runs of one finder on one model, at one or several precisions in a command."""

    model: str
    budget_mib: int
    precisions: tuple[str, ...]
    finder: str
    runs: tuple[Run, ...]
    checks: dict[str, dict[int, tuple[str, str]]] = field(default_factory=dict)
    """By precision and answer: how an epoch in a fresh process ended at the answer, and at one more."""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.model, self.budget_mib, self.precisions, self.finder

    @property
    def title(self) -> str:
        return f"{self.model} {', '.join(self.precisions)}, {self.budget_mib} MiB"

    @property
    def answering(self) -> list[Run]:
        """The runs with an answer."""
        return [run for run in self.runs if run.has_answer]

    @property
    def answered(self) -> list[str]:
        """The precisions at which every run with an answer has one."""
        return [name for name in self.precisions if self.answering and all(run.answers[name] for run in self.answering)]

    @property
    def possible(self) -> list[str]:
        """The precisions without those at which every run of amp-track reports that the device has no kernel."""
        return [name for name in self.precisions if not all(run.has_no_kernel(name) for run in self.runs)]

    def answers(self, precision: str) -> list[int]:
        """Return the different answers at a precision, in ascending order."""
        return sorted({answer for run in self.runs if (answer := run.answers.get(precision))})

    def median(self, seconds: Callable[[Run], float]) -> float:
        """Return the median over the runs with an answer, or over all if none has one."""
        return statistics.median(seconds(run) for run in self.answering or self.runs)

    def is_exact(self, answer: int | None, precision: str) -> bool:
        if answer is None:
            return False
        at_the_answer, at_one_more = self.checks[precision][answer]
        return at_the_answer == "fits" and at_one_more in _FAILS


ROWS = TypeAdapter(list[Row])


def seconds_each(row: Row) -> float:
    """Return the seconds to the proven answers for each precision that has one."""
    return row.median(lambda run: run.answer_seconds) / max(len(row.answered), 1)


def ratios(rows: Sequence[Row], of: Iterable[Row]) -> dict[str, float]:
    """Return by case the seconds to the proven answer over those of Lightning's binary search, where that answered."""
    lightning = {row.key: row for row in rows if row.finder == LIGHTNING and row.answering}
    found = {}
    for row in of:
        for precision in row.answered:
            peer = lightning.get((row.model, row.budget_mib, (precision,), LIGHTNING))
            if peer is not None:
                found[f"{row.title}: {precision}"] = seconds_each(row) / peer.median(lambda run: run.answer_seconds)
    return found


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of amp-track over all cases, for one precision in a command and for several."""
    ours = [row for row in rows if row.finder == OURS]
    kinds = {"one": [row for row in ours if len(row.precisions) == 1]}
    kinds["several"] = [row for row in ours if len(row.precisions) > 1]
    aims = {"one": AIM_OF_ONE, "several": AIM_OF_SEVERAL}
    return {name: _figures(rows, kind, aims[name]) for name, kind in kinds.items() if kind} | {
        "without_ratio": {
            row.title: [next(iter(row.runs[0].errors.values()), ""), row.median(lambda run: run.command_seconds)]
            for row in rows
            if row.finder == LIGHTNING and not row.answering
        }
    }


def _figures(rows: Sequence[Row], ours: Sequence[Row], aim: float) -> dict[str, Any]:
    cases = [(row, name) for row in ours for name in row.possible]
    answers = [[row.is_exact(run.answers.get(name), name) for run in row.runs] for row, name in cases]
    agreeing = [len({run.answers.get(name) for run in row.runs}) == 1 for row, name in cases]
    probes = [run.probes[name] for row, name in cases for run in row.answering if name in run.probes]
    found = ratios(rows, ours)
    return {
        "cases": len(cases),
        "exact": sum(all(case) for case in answers),
        "agreeing": sum(agreeing),
        "runs": sum(len(case) for case in answers),
        "exact_runs": sum(sum(case) for case in answers),
        "probes_median": statistics.median(probes) if probes else None,
        "probes_most": max(probes, default=None),
        "failed": {row.title: run.errors for row in ours for run in row.runs if not run.has_answer},
        "ratios": found,
        "ratio_median": statistics.median(found.values()) if found else None,
        "ratio_largest": max(found.values(), default=None),
        "processes": sorted({count for row in ours for run in row.answering for count in run.processes.values()}),
        "aim_median": aim,
        "never_above": NEVER_ABOVE,
    }


def _aim(aim: float, ratio: float) -> str:
    return markdown.aim(f"aim ≤ {aim}", round(ratio, 2) > aim)


def sentences(figures: dict[str, Any]) -> str:
    """Format the figures of one kind of command: `exact in 10 of 10 cases …`."""
    if not figures["probes_median"]:
        return "no answer."
    text = (
        f"exact in {figures['exact']} of {figures['cases']} cases ({figures['exact_runs']} of {figures['runs']} runs), "
        f"and in {figures['agreeing']} the same in all runs; {figures['probes_median']:g} probes in the median, "
        f"{figures['probes_most']} at most; each max batch ran in {_distinct(figures['processes'])} fresh processes."
    )
    if figures["ratios"]:
        text += (
            f" Its seconds to the proven answer are {figures['ratio_median']:.2f} × those of Lightning's binary search "
            f"in the median of the cases that it answered, {len(figures['ratios'])} "
            f"({_aim(figures['aim_median'], figures['ratio_median'])}), {figures['ratio_largest']:.2f} × at most "
            f"({_aim(figures['never_above'], figures['ratio_largest'])})."
        )
    return text


def runs_in_words(rows: Sequence[Row]) -> str:
    """Return the number of runs of each finder: `amp-track n=1/3, lightning binsearch n=3`."""
    counts = {name: [len(row.runs) for row in rows if row.finder == name] for name in (OURS, *PEERS)}
    return ", ".join(f"{name} n={_distinct(found)}" for name, found in counts.items() if found)


def answers_table(rows: Sequence[Row]) -> str:
    """Return the answers and seconds of all finders, for one precision in a command."""
    single = {row.key: row for row in rows if len(row.precisions) == 1}
    finders = [name for name in (OURS, *PEERS) if any(key[-1] == name for key in single)]
    lines = []
    for case in dict.fromkeys(key[:-1] for key in single):
        row_of = {name: single[*case, name] for name in finders if (*case, name) in single}
        lines.append([next(iter(row_of.values())).title, *(_cell(row_of[n]) if n in row_of else "" for n in finders)])
    return markdown.table(["model, precision", *finders], lines)


def _cell(row: Row) -> str:
    """Return `401 exact, 3 probes, 17.2 s (28.0 s)`, or the failure."""
    seconds = f"{row.median(lambda run: run.answer_seconds):.1f} s"
    if not row.answering:
        return f"failed after {seconds}: {next(iter(row.runs[0].errors.values()), 'no answer')}"
    (precision,) = row.precisions
    cell = f"{_answers(row, precision)}, {_distinct(run.probes[precision] for run in row.answering)} probes, {seconds}"
    if row.finder == OURS:
        cell += f" ({row.median(lambda run: run.command_seconds):.1f} s)"
    failing = len(row.runs) - len(row.answering)
    return cell + (f", failed in {failing} of {len(row.runs)} runs" if failing else "")


def _answers(row: Row, precision: str) -> str:
    """Return `401 exact`, `288/372 more fit`, or `401 **fails**`."""
    answers = row.answers(precision)
    if not answers:
        return "not possible"
    if all(row.is_exact(answer, precision) for answer in answers):
        mark = "exact"
    elif all(row.checks[precision][answer][0] == "fits" for answer in answers):
        mark = "more fit"
    else:
        mark = "**fails**"
    return f"{_distinct(answers)} {mark}"


def several_table(rows: Sequence[Row]) -> str:
    """Return the answers and seconds of commands with several precisions."""
    lines = []
    for row in rows:
        if len(row.precisions) == 1 or row.finder != OURS:
            continue
        answers = "; ".join(f"{name} {_answers(row, name)}" for name in row.precisions)
        proof, command = row.median(lambda run: run.answer_seconds), row.median(lambda run: run.command_seconds)
        compared = ratios(rows, [row]).items()
        cells = [f"{proof:.1f} s ({command:.1f} s)", f"{seconds_each(row):.1f} s"]
        lines.append(
            [
                row.model,
                answers,
                *cells,
                ", ".join(f"{name.rpartition(' ')[2]} {ratio:.2f} ×" for name, ratio in compared),
            ]
        )
    heading = ["model", "max batches", "proven after (whole command)", "for each precision", "of Lightning's binsearch"]
    return markdown.table(heading, lines)


def seconds_table(rows: Sequence[Row]) -> str:
    """Return where the time of amp-track's commands goes: medians over the models and precisions."""
    ours = [row for row in rows if row.finder == OURS and row.answering]
    by_kind = {
        "one": [row for row in ours if len(row.precisions) == 1],
        "several": [row for row in ours if len(row.precisions) > 1],
    }
    kinds = {name: kind for name, kind in by_kind.items() if kind}

    def median(kind: Sequence[Row], seconds: Callable[[Run], float]) -> float:
        return statistics.median(row.median(seconds) for row in kind)

    def phase(name: str) -> tuple[str, Callable[[Run], float]]:
        return name, lambda run: run.phases[name]

    def part(name: str) -> Callable[[Run], float]:
        return lambda run: run.parts[name]

    start, *others = (phase(name) for name in PHASES)
    columns = [start, ("of it the plan", lambda run: run.plan_seconds or 0.0), *others]
    columns += [("to the answer", lambda run: run.answer_seconds), ("in all", lambda run: run.command_seconds)]
    lines = [[name, *(f"{median(kind, seconds):.2f}" for _, seconds in columns)] for name, kind in kinds.items()]
    trials = (
        f"for {name}, " + ", ".join(f"{each} {median(kind, part(each)):.1f} s" for each in PARTS)
        for name, kind in kinds.items()
    )
    table = markdown.table(["precisions", *(heading for heading, _ in columns)], lines)
    return f"{table}\n\nOf it the trials to the proof: {'; '.join(trials)}."


def _distinct(values: Iterable[int]) -> str:
    return "/".join(str(value) for value in sorted(set(values)))
