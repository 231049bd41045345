"""The recommendation of a study in words: what to train with, the command for it, and caveats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from amp_track.batch_search.recommended_batch import MULTIPLE_OF, NO_SLOWER
from amp_track.config.precisions import REFERENCE
from amp_track.report import compare, search
from amp_track.report import max_batch as max_batch_report
from amp_track.report.table import Table
from amp_track.report.wording import UNKNOWN, counted, has_cpu_budget, metric_text, speed_text
from amp_track.results.compare import Cell, CompareResult, Speed, judge
from amp_track.results.equivalence import DIFFERENT, EQUIVALENT, NOTHING_LEARNED, Comparison, SeedsResult
from amp_track.results.max_batch import MaxBatchResult, PrecisionResult
from amp_track.results.recommendation import Recommendation, choose_compared, has_diverged, train_command
from amp_track.results.search import SearchResult

IN_TOOLS = "The same in other libraries"
_TOOLS = {"transformers": "transformers", "lightning": "Lightning", "accelerate": "accelerate", "timm": "timm"}
Result = MaxBatchResult | SearchResult | CompareResult
"""The result of a study."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    headline: str
    more: tuple[str, ...] = ()
    """Further sentences below the headline."""
    command: str | None = None
    """The command that trains with the recommendation; None if nothing fits."""
    to_train: str = "To train with it"
    """The text that introduces the command."""
    in_tools: tuple[str, ...] = ()
    """The same training in the words of other libraries, one line each."""
    caveats: tuple[str, ...] = ()
    """Limits of this study that readers should know."""


def tables(result: Result) -> list[Table]:
    match result:
        case CompareResult():
            return compare.tables(result)
        case SearchResult():
            return search.search_tables(result)
    return [max_batch_report.max_batch_table(result)]


def notes(result: Result) -> list[str]:
    match result:
        case CompareResult():
            return compare.notes(result)
        case SearchResult():
            return search.notes(result)
    return max_batch_report.max_batch_notes(result)


def answer(result: Result) -> Answer:
    if isinstance(result, CompareResult):
        return _of_compare(result)
    choice = result.recommended
    if choice is None:
        return Answer(headline=_why_none(result), caveats=tuple(notes(result)))
    parts = [_largest(choice), _speed(choice), _metric(result, choice), _steps(result, choice)]
    if choice.precision == REFERENCE:
        parts.insert(0, _nothing_is_faster(result))
    said = ", ".join(part for part in parts if part)
    return Answer(
        headline=f"{choice.precision} at batch {choice.batch_size:,}" + (f": {said}" if said else ""),
        more=tuple(_more(result.limits, choice)),
        command=choice.command,
        in_tools=tuple(f"{_TOOLS[name]}: {words}" for name, words in choice.in_tools.items()),
        caveats=(*_caveats(result.limits, choice), *notes(result)),
    )


def answer_lines(said: Answer, command: str | None) -> list[str]:
    """Return the answer as the last lines of an output, with the command as the caller completes it."""
    lines = [said.headline, *said.more]
    lines += [f"{said.to_train}:", f"  {command}"] if command is not None else []
    lines += [f"{IN_TOOLS}:"] if said.in_tools else []
    return lines + [f"  {line}" for line in said.in_tools]


def _of_compare(result: CompareResult) -> Answer:
    caveats = tuple(notes(result))
    chosen = choose_compared(result)
    if chosen is None:
        first, *more = result.answers or ("Nothing to compare: only one precision was trained",)
        return Answer(headline=first, more=tuple(more), caveats=caveats)
    job = dataclasses.replace(result.asked, precision=chosen.precision)
    at = ""
    if result.option is not None:
        others = [(option, text) for option, text in job.options if option != result.option]
        job = dataclasses.replace(job, options=(*others, (result.option, chosen.value)))
        at = f" at {result.at(chosen.value)}"
    return Answer(
        headline=f"{chosen.precision}{at}: {_compared(result, chosen)}",
        more=result.answers,
        command=train_command(job),
        to_train=f"To train with it{at}",
        caveats=caveats,
    )


def _compared(result: CompareResult, chosen: Cell) -> str:
    if chosen.precision == REFERENCE:
        others = [name for name in result.precisions if name != REFERENCE]
        faster = [name for name in others if result.verdict(result.cell(chosen.value, name)) is Speed.FASTER]
        failed = [name for name in faster if result.cell(chosen.value, name).failure is not None]
        parts = [f"faster with {' and '.join(failed)}, but not all of these trainings completed"] * bool(failed)
        if worse := [name for name in faster if name not in failed]:
            parts.append(_faster_but_worse(worse, result.metric_name))
        return "; ".join(parts) or _no_faster(others, "")
    speed, memory = result.ratio(chosen, "samples_per_second"), result.ratio(chosen, "train_memory_bytes")
    parts = []
    if speed is not None:
        is_unclear = result.verdict(chosen) is Speed.UNCLEAR
        parts.append(f"{Speed.UNCLEAR} than {REFERENCE} ({speed:.2f} ×)" if is_unclear else _speed_words(speed))
    if memory is not None:
        parts.append("the same memory" if judge(memory) is Speed.SAME else f"{_ratio(memory)} × {REFERENCE}'s memory")
    if chosen.metric is not None:
        reference, seeds = result.cell(chosen.value, REFERENCE).metric, result.seeds_at(chosen.value)
        against = seeds.comparison(chosen.precision) if result.seeds > 1 else None
        made = len(seeds.metrics(chosen.precision))
        parts.append(
            _status(result.metric_name, seeds, chosen.precision, against)
            if against is not None
            else _one_metric(result.metric_name, chosen.metric.mean, reference.mean if reference else None)
            + (f"over {made} seeds" if made > 1 else "with one seed")
        )
    return ", ".join(parts) or f"trains, but {REFERENCE} does not"


def _why_none(result: MaxBatchResult | SearchResult) -> str:
    if isinstance(result, SearchResult) and has_diverged(result):
        return f"Every training diverged, so no {result.metric_name} is finite: use a lower --lr"
    if result.limits.unproven:
        return f"No max batch is proven yet ({', '.join(result.limits.unproven)}): run the same command again"
    return "Nothing fits: not even one sample, at any precision"


def _largest(choice: Recommendation) -> str:
    """Return how the max batch compares with fp32's, if it is the recommended batch."""
    ratio = choice.batch_ratio
    if ratio is None or judge(ratio) is Speed.SAME or choice.max_batch != choice.batch_size:
        return ""
    return f"{_ratio(ratio)} × {REFERENCE}'s max batch"


def _speed(choice: Recommendation) -> str:
    if choice.speed_ratio is None:
        return f"{speed_text(choice.samples_per_second)} samples/s" if choice.samples_per_second else ""
    return _speed_words(choice.speed_ratio)


def _speed_words(ratio: float) -> str:
    is_same = judge(ratio) is Speed.SAME
    return f"as fast as {REFERENCE} (within 3 %)" if is_same else f"{_ratio(ratio)} × {REFERENCE}'s speed"


def _ratio(number: float) -> str:
    """Return a ratio with two or three digits: 1.04, 1.9, 31."""
    return f"{number:.2f}" if number < 1.1 else f"{number:.1f}" if number < 10 else f"{number:.0f}"


def _metric(result: MaxBatchResult | SearchResult, choice: Recommendation) -> str:
    if not isinstance(result, SearchResult) or choice.job_result is None or choice.job_result.metric is None:
        return ""
    name, metric, seeds = result.metric_name, choice.job_result.metric, result.seeds
    if choice.precision == REFERENCE:
        return f"{name} {metric_text(metric)}"
    against = seeds.comparison(choice.precision) if seeds is not None else None
    if seeds is None or against is None:
        return _one_metric(name, metric, choice.metric_of_fp32) + "with one seed"
    at = f" at batch {seeds.job.batch_size}" if seeds.job.batch_size != choice.batch_size else ""
    return _status(name, seeds, choice.precision, against) + at


def _one_metric(name: str, metric: float, of_fp32: float | None) -> str:
    return f"{name} {metric_text(metric)} " + (f"(fp32: {metric_text(of_fp32)}) " if of_fp32 is not None else "")


def _steps(result: MaxBatchResult | SearchResult, choice: Recommendation) -> str:
    """Return that an epoch has few optimizer steps, unless trainings were compared or the user set a step's samples."""
    if not choice.makes_few_steps or choice.job_result is not None or result.limits.effective_batch_size is not None:
        return ""
    return f"but only {counted(choice.epoch_steps or 0, 'optimizer step')} per epoch"


def _status(name: str, seeds: SeedsResult, precision: str, against: Comparison) -> str:
    made, interval = len(seeds.compared_seeds(precision)), seeds.interval(precision)
    moved = metric_text(against.difference, of=interval.mean if interval is not None else None, sign="+")
    words = {
        EQUIVALENT: "equivalent", DIFFERENT: f"differs by {moved}",
        NOTHING_LEARNED: "not comparable (nothing learned)",
    }  # fmt: skip
    vary = f"over {made} seeds" if made > 1 else "with one seed"
    return f"{name} {words.get(against.conclusion, 'inconclusive')} {vary}"


def _nothing_is_faster(result: MaxBatchResult | SearchResult) -> str:
    """Return why fp32 is recommended: which precisions were tried, and whether one is faster but worse."""
    tried = [name for name in result.max_batch if name != REFERENCE]
    if isinstance(result, SearchResult) and result.trials:
        tried = [name for name in tried if result.trained(name)]
        reference = _fastest_training(result, REFERENCE)
        if faster := [name for name in tried if _fastest_training(result, name) > reference / NO_SLOWER]:
            return _faster_but_worse(faster, result.metric_name)
    return _no_faster(tried, " on this device")


def _no_faster(tried: Sequence[str], where: str) -> str:
    return f"no faster with {' or '.join(tried)}{where}" if tried else "no other precision was trained"


def _faster_but_worse(faster: Sequence[str], metric_name: str) -> str:
    return f"faster with {' and '.join(faster)}, but at a worse {metric_name} than --tolerance allows"


def _fastest_training(result: SearchResult, precision: str) -> float:
    return max((trial.job_result.samples_per_second or 0.0 for trial in result.trained(precision)), default=0.0)


def _more(found: MaxBatchResult, choice: Recommendation) -> list[str]:
    """Return the proof of the max batch, and the batch above which training is not faster."""
    fitted = found.precisions[choice.precision]
    lines = []
    if choice.max_batch != choice.batch_size:
        ratio = ""
        if choice.batch_ratio is not None:
            is_same = judge(choice.batch_ratio) is Speed.SAME
            ratio = f", the same as at {REFERENCE}" if is_same else f", {_ratio(choice.batch_ratio)} × {REFERENCE}'s"
        lines.append(f"The max batch at {choice.precision} is {choice.max_batch:,}{ratio}.")
    lines.append(proof(choice.precision, fitted))
    if choice.job_result is None and choice.batch_size == fitted.recommended_batch:
        lines += _reason(found, fitted, choice)
    return lines


def _reason(found: MaxBatchResult, fitted: PrecisionResult, choice: Recommendation) -> list[str]:
    """Return the reason for a recommended batch below the max batch, in one line."""
    batch_size, timed, parts = choice.batch_size, fitted.timed, []
    if found.recommended_bytes is not None and found.limit_bytes and fitted.leaves_headroom:
        parts.append(f"leaves at least {1 - found.recommended_bytes / found.limit_bytes:.0%} of the memory free")
    multiple_of = found.multiple_of if found.multiple_of > 1 else MULTIPLE_OF
    if batch_size % multiple_of == 0 and batch_size != choice.max_batch and found.effective_batch_size is None:
        parts.append(f"is a multiple of {multiple_of}")
    if batch_size in timed and len(timed) > 1:
        speeds = ", ".join(
            f"{batch:,}: {speed_text(speed)} samples/s in {len(fitted.readings[batch])} readings"
            for batch, speed in timed.items()
        )
        parts.append(f"is the smallest timed one within 3 % of the best speed (median; {speeds})")
    return [f"Batch {batch_size:,} {' and '.join(parts)}."] if parts else []


def proof(precision: str, fitted: PrecisionResult) -> str:
    """Return the proof of the max batch of a precision in one sentence."""
    max_batch, runs = fitted.max_batch, fitted.runs_at_max_batch
    _, limit, memory, _ = max_batch_report.max_batch_cells(fitted)
    if not max_batch.batch_size:
        return f"{precision}: {limit}."
    ran = f"{precision}: batch {max_batch.batch_size:,} ran in {counted(runs, 'fresh process', 'fresh processes')}"
    if fitted.confirmation is not None:
        which = "including a" if runs > 1 else "a"
        ran += f" ({which} confirmation run of {counted(fitted.confirmation.steps, 'step')})"
    if memory != UNKNOWN:
        ran += f" with a peak of {memory}"
    if max_batch.first_failing_batch is None:
        has_limit = "exceed the training set" if max_batch.bound == "dataset" else f"were not tried (limit: {limit})"
        return f"{ran}; larger batches {has_limit}."
    where = f" in {fitted.failure.phase}" if fitted.failure is not None and fitted.failure.phase else ""
    fails = "ran out of memory" if max_batch.bound == "memory" else "is too large for a kernel"
    return f"{ran}; batch {max_batch.first_failing_batch:,} {fails}{where}."


def _caveats(found: MaxBatchResult, choice: Recommendation) -> list[str]:
    """Return the caveats of the recommendation; the notes of the tables hold the others."""
    lines = []
    if has_cpu_budget(found):
        lines.append(
            "amp_track enforces this memory budget on a CPU. A GPU with the same memory has a different max batch."
        )
    if choice.speed_ratio is not None and judge(choice.speed_ratio) is Speed.SLOWER:
        lines.append(f"{choice.precision} is slower than {REFERENCE} on this device.")
    best = {name: fit.best_speed for name, fit in found.precisions.items()}
    of_fp32 = best.get(REFERENCE)
    slower = [
        f"{name} {speed / of_fp32:.2g} ×"
        for name, speed in best.items()
        if name not in (REFERENCE, choice.precision) and of_fp32 and speed and judge(speed / of_fp32) is Speed.SLOWER
    ]
    if slower:
        lines.append(f"Slower than {REFERENCE} in the probes on this device: {', '.join(slower)}.")
    if choice.job_result is not None and choice.job_result.waits_for_data:
        waited = f"{choice.job_result.waited_fraction:.0%}"
        lines.append(
            f"This training waited for data {waited} of its time, so its speed is that of data loading. Use more "
            "--num-workers."
        )
    return lines
