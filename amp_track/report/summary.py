"""The answer of a study in words: what to train with, the command for it, and what is to be kept in mind."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from amp_track.records.result import JobResult
from amp_track.report import compare, search
from amp_track.report import max_batch as max_batch_report
from amp_track.report.command_line import train_command
from amp_track.report.table import Table
from amp_track.report.text import UNKNOWN, speed_text
from amp_track.results.compare import REFERENCE, Cell, CompareResult, Speed, judge
from amp_track.results.equivalence import DIFFERENT, EQUIVALENT, Comparison
from amp_track.results.max_batch import NO_SLOWER, MaxBatchResult, PrecisionResult
from amp_track.results.recommendation import Choice, choose, choose_compared, has_diverged
from amp_track.results.search import SearchResult

Result = MaxBatchResult | SearchResult | CompareResult
"""The result of a study."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a study says to somebody who has a minute."""

    headline: str
    more: tuple[str, ...] = ()
    """Further sentences of the answer."""
    command: str | None = None
    """What to type to train so; None where nothing fits."""
    to_train: str = "To train with it"
    """What the command does."""
    caveats: tuple[str, ...] = ()
    """What is true of this study and might mislead."""


def answer(result: Result) -> Answer:
    """Return the answer of a study."""
    if isinstance(result, CompareResult):
        return _of_compare(result)
    choice = choose(result)
    found = result.limits if isinstance(result, SearchResult) else result
    notes = search.notes(result) if isinstance(result, SearchResult) else max_batch_report.max_batch_notes(result)
    if choice is None:
        return Answer(headline=_why_none(result, found), caveats=tuple(notes))
    return Answer(
        headline=_headline(result, choice),
        more=tuple(_more(found, choice)),
        command=train_command(choice.job),
        caveats=(*_caveats(found, choice), *notes),
    )


def _of_compare(result: CompareResult) -> Answer:
    caveats = tuple(compare.notes(result))
    chosen = choose_compared(result)
    if chosen is None:
        first, *more = result.answers or ("There is nothing to compare: one precision was trained",)
        return Answer(headline=first, more=tuple(more), caveats=caveats)
    job = dataclasses.replace(result.asked, precision=chosen.precision)
    if result.option is not None:
        others = [(option, text) for option, text in job.options if option != result.option]
        job = dataclasses.replace(job, options=(*others, (result.option, chosen.value)))
    at = f" at {result.at(chosen.value)}" if result.option is not None else ""
    return Answer(
        headline=f"{chosen.precision}{at}: {_compared(result, chosen)}",
        more=result.answers,
        command=train_command(job),
        to_train=f"To train with it{at}",
        caveats=caveats,
    )


def _compared(result: CompareResult, chosen: Cell) -> str:
    """Return how the chosen cell compares with fp32 at the same value."""
    if chosen.precision == REFERENCE:
        others = [name for name in result.precisions if name != REFERENCE]
        ratios = {name: result.ratio(result.cell(chosen.value, name), "samples_per_second") for name in others}
        faster = [name for name, ratio in ratios.items() if ratio is not None and judge(ratio) is Speed.FASTER]
        if faster:
            return f"{' and '.join(faster)} faster only where {result.metric_name} is worse than the margin allows"
        return f"no faster with {' or '.join(others)}" if others else "no other precision was trained"
    speed, memory = result.ratio(chosen, "samples_per_second"), result.ratio(chosen, "train_memory_bytes")
    parts = [_speed_words(speed)] if speed is not None else []
    if memory is not None:
        parts.append("as much memory" if judge(memory) is Speed.SAME else f"{_ratio(memory)} × its memory")
    if chosen.metric is not None:
        reference = result.cell(chosen.value, REFERENCE).metric
        of_fp32 = reference.mean if reference is not None else None
        seeds = result.seeds_at(chosen.value)
        against = seeds.comparison(chosen.precision) if result.seeds > 1 else None
        made = len(seeds.compared_seeds(chosen.precision) if against is not None else seeds.metrics(chosen.precision))
        vary = f"over {made} seeds" if made > 1 else "with one seed"
        parts.append(
            _status(result.metric_name, against, vary)
            if against is not None
            else _one_metric(result.metric_name, chosen.metric.mean, of_fp32, vary)
        )
    return ", ".join(parts) or f"it trains, and {REFERENCE} does not"


def name(result: Result) -> str:
    """Return the name of a result's study."""
    return result.limits.study if isinstance(result, SearchResult) else result.study


def tables(result: Result) -> list[Table]:
    """Return the tables that a command prints of a study."""
    if isinstance(result, CompareResult):
        return compare.tables(result)
    return (
        search.search_tables(result) if isinstance(result, SearchResult) else [max_batch_report.max_batch_table(result)]
    )


def _why_none(result: MaxBatchResult | SearchResult, found: MaxBatchResult) -> str:
    if isinstance(result, SearchResult) and has_diverged(result):
        return f"No training has a finite {result.metric_name}: every one has diverged; try a lower --lr"
    if found.unproven:
        return f"No edge is proven yet ({', '.join(found.unproven)}): give the same command again"
    return "Nothing fits: not even one sample, at any precision"


def _headline(result: MaxBatchResult | SearchResult, choice: Choice) -> str:
    parts = [_largest(choice), _speed(choice), _metric(result, choice)]
    if choice.precision == REFERENCE:
        parts.insert(0, _nothing_is_faster(result))
    said = ", ".join(part for part in parts if part)
    return f"{choice.precision} at batch {choice.batch_size:,}" + (f": {said}" if said else "")


def _largest(choice: Choice) -> str:
    """Return how the largest batch compares with fp32's, where that is the one to train with."""
    ratio = choice.batch_ratio
    if ratio is None or judge(ratio) is Speed.SAME or choice.max_batch != choice.batch_size:
        return ""
    return f"{_ratio(ratio)} × {REFERENCE}'s largest batch"


def _speed(choice: Choice) -> str:
    if choice.speed_ratio is None:
        return f"{speed_text(choice.samples_per_second)} samples/s" if choice.samples_per_second else ""
    return _speed_words(choice.speed_ratio)


def _speed_words(ratio: float) -> str:
    return (
        f"as fast as {REFERENCE} (within 3 %)"
        if judge(ratio) is Speed.SAME
        else f"{_ratio(ratio)} × {REFERENCE}'s speed"
    )


def _ratio(number: float) -> str:
    """Return a ratio with two digits or so: 1.04, 1.9, 31."""
    return f"{number:.2f}" if number < 1.1 else f"{number:.1f}" if number < 10 else f"{number:.0f}"


def _metric(result: MaxBatchResult | SearchResult, choice: Choice) -> str:
    if not isinstance(result, SearchResult) or choice.job_result is None or choice.job_result.metric is None:
        return ""
    name, metric = result.metric_name, choice.job_result.metric
    if choice.precision == REFERENCE:
        return f"{name} {metric:.4f}"
    against = result.seeds.comparison(choice.precision) if result.seeds is not None else None
    if result.seeds is None or against is None:
        return _one_metric(name, metric, choice.metric_of_fp32, "with one seed")
    vary = f"over {len(result.seeds.compared_seeds(choice.precision))} seeds"
    if result.seeds.job.batch_size != choice.batch_size:
        vary += f" at batch {result.seeds.job.batch_size}"
    return _status(name, against, vary)


def _one_metric(name: str, metric: float, of_fp32: float | None, vary: str) -> str:
    return f"{name} {metric:.4f}" + (f" against {of_fp32:.4f}" if of_fp32 is not None else "") + f" {vary}"


def _status(name: str, against: Comparison, vary: str) -> str:
    if against.conclusion == EQUIVALENT:
        return f"{name} equivalent {vary}"
    if against.conclusion == DIFFERENT:
        return f"{name} differs by {against.difference:+.4f} {vary}"
    return f"{name} neither equivalent nor different {vary}"


def _nothing_is_faster(result: MaxBatchResult | SearchResult) -> str:
    """Say why fp32 is chosen: which others were tried, and whether one of them is faster but worse."""
    found = result.limits if isinstance(result, SearchResult) else result
    tried = [name for name in found.precisions if name != REFERENCE and found.precisions[name].max_batch.batch_size]
    if isinstance(result, SearchResult) and result.trials:
        trained = {trial.precision for trial in result.trials if trial.job_result.fits}
        reference = _fastest_training(result, REFERENCE)
        faster = [name for name in tried if name in trained and _fastest_training(result, name) > reference / NO_SLOWER]
        if faster:
            return f"{' and '.join(faster)} faster only where {result.metric_name} is worse than the margin allows"
        tried = [name for name in tried if name in trained]
    return f"no faster with {' or '.join(tried)} on this device" if tried else "no other precision was trained with"


def _fastest_training(result: SearchResult, precision: str) -> float:
    own = (trial for trial in result.trials if trial.precision == precision and trial.job_result.fits)
    return max((trial.job_result.samples_per_second or 0.0 for trial in own), default=0.0)


def _more(found: MaxBatchResult, choice: Choice) -> list[str]:
    """Return how the edge is proven, and where a larger batch buys no speed."""
    fitted = found.precisions[choice.precision]
    lines = []
    if choice.max_batch != choice.batch_size:
        ratio = ""
        if choice.batch_ratio is not None:
            is_same = judge(choice.batch_ratio) is Speed.SAME
            ratio = f", as at {REFERENCE}" if is_same else f", {_ratio(choice.batch_ratio)} × {REFERENCE}'s"
        lines.append(f"The largest batch that fits at {choice.precision} is {choice.max_batch:,}{ratio}.")
    lines.append(proof(choice.precision, fitted))
    efficient = fitted.efficient_batch
    if efficient is not None and efficient[0] < choice.batch_size:
        lines.append(
            f"Batch {efficient[0]:,} trains as fast ({efficient[1]:,.0f} samples/s when probed): a larger one buys no "
            "speed."
        )
    return lines


def proof(precision: str, fitted: PrecisionResult) -> str:
    """Return how the largest batch of a precision is proven, in one sentence."""
    max_batch = fitted.max_batch
    if not max_batch.batch_size:
        return f"{precision}: {max_batch_report.max_batch_cells(fitted)[1]}."
    ran = f"{precision} ran at batch {max_batch.batch_size:,} in {_processes(fitted.runs_at_max_batch)}"
    if fitted.confirmation is not None:
        which = "one of them a" if fitted.runs_at_max_batch > 1 else "a"
        steps = fitted.confirmation.steps
        ran += f", {which} training of {steps:,} {'step' if steps == 1 else 'steps'}"
    _, why, memory, _ = max_batch_report.max_batch_cells(fitted)
    peak = f", and took {memory}" if memory != UNKNOWN else ""
    if max_batch.first_failing_batch is None:
        return f"{ran}{peak}; no larger one was tried: {why}."
    where = f" in {fitted.failure.phase}" if fitted.failure is not None and fitted.failure.phase else ""
    fails = "ran out of memory" if max_batch.bound == "memory" else "is more than a kernel takes"
    return f"{ran}{peak}; batch {max_batch.first_failing_batch:,} {fails}{where}."


def _processes(count: int) -> str:
    return "one fresh process" if count == 1 else f"{count} fresh processes"


def _caveats(found: MaxBatchResult, choice: Choice) -> list[str]:
    """Return what is true of the choice alone; the notes beside the tables say the rest."""
    lines = []
    if found.job.memory_budget_bytes is not None and found.hardware.kind == "cpu":
        lines.append(
            "The memory budget is one that amp_track enforces on a CPU: a GPU with as much memory has other edges."
        )
    if choice.is_emulated:
        lines.append(f"{choice.precision} is emulated on this device: it saves memory, and time is lost.")
    if choice.speed_ratio is not None and judge(choice.speed_ratio) is Speed.SLOWER:
        lines.append(f"{choice.precision} is slower than {REFERENCE} on this device.")
    lines += _slower_than_fp32(found, choice)
    if choice.job_result is not None and choice.job_result.waits_for_data:
        lines.append(_waits(choice.job_result))
    return lines


def _slower_than_fp32(found: MaxBatchResult, choice: Choice) -> list[str]:
    reference = found.precisions.get(REFERENCE)
    of_fp32 = max((speed for _, speed in reference.throughput), default=0.0) if reference is not None else 0.0
    slower = []
    for name, fitted in found.precisions.items():
        best = max((speed for _, speed in fitted.throughput), default=0.0)
        if name not in (REFERENCE, choice.precision) and of_fp32 and best and judge(best / of_fp32) is Speed.SLOWER:
            slower.append(f"{name} {best / of_fp32:.2g} ×")
    return [f"Slower than {REFERENCE} on this device, when probed: {', '.join(slower)}."] if slower else []


def _waits(job_result: JobResult) -> str:
    return (
        f"This training waited for data {job_result.waited_fraction:.0%} of its time: its speed is that of loading; "
        "give more --num-workers."
    )
