"""The recommended precision and batch size: the fastest whose metric is as good as the best."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from amp_track.batch_search.recommended_batch import NO_SLOWER
from amp_track.config.cli_params import Flag, flags_of
from amp_track.config.job import Job, library_of_model, steps_per_epoch
from amp_track.config.precisions import REFERENCE, Precision
from amp_track.config.values import Tolerance
from amp_track.records.result import JobResult
from amp_track.results.compare import Cell, CompareResult, as_numbers
from amp_track.results.equivalence import DIFFERENT, SeedsResult
from amp_track.results.max_batch import MaxBatchResult, PrecisionResult
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow

T = TypeVar("T")
_FEW_STEPS = 4
"""A training with this many times fewer optimizer steps than another one is undertrained beside it."""
_FEW_EPOCH_STEPS = 20
"""An epoch with fewer optimizer steps is short, if no other batch size is known to compare with."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The recommended training, compared with fp32."""

    job: Job
    """The job that the user gave, with the recommended precision, batch size and learning rate."""
    precision: str
    batch_size: int
    samples_per_second: float | None
    max_batch: int
    speed_ratio: float | None
    """Its speed over the best speed of fp32; None if one of the two is unknown, and for fp32 itself."""
    batch_ratio: float | None
    """Its max batch over that of fp32."""
    readings: int = 1
    """The number of readings that its speed is the median of."""
    epoch_steps: int | None = None
    """The optimizer steps of an epoch; None with `--steps`, or if the number of training samples is unknown."""
    workload_epoch_steps: int | None = None
    """The same at the workload's own batch size; None for a function or a command, too."""
    batches_per_step: int = 1
    """The batches that the training itself accumulates in each optimizer step; 1 with `--effective-batch-size`, which
    decides about them."""
    target_recipe: str = ""
    job_result: JobResult | None = None
    """The training that the recommendation is based on; None if only max batches are known."""
    metric_of_fp32: float | None = None
    """The metric of the fp32 training that it is compared with."""

    @property
    def command(self) -> str:
        """The command that trains with it; for a function, the call."""
        if self.job.command:
            return shlex.join(self.job.words(scratch="OUTPUT_FOLDER"))
        if self.target_recipe:
            return self.target_recipe.format(batch_size=self.batch_size, precision=self.precision, **self.in_tools)
        return train_command(self.job)

    @property
    def in_tools(self) -> dict[str, str]:
        """The same training in the words of other libraries, by library: precision, batch size and accumulation."""
        words, batch = Precision.named(self.precision).in_tools, self.batch_size
        accumulated = self.job.grad_accum * self.batches_per_step
        flag = words["transformers"].removeprefix("--").partition(" ")[0]
        is_tf32 = 'torch.set_float32_matmul_precision("high"); ' if self.precision == "tf32" else ""
        arguments = {
            "transformers": [f"per_device_train_batch_size={batch}", f"{flag}=True" if flag else ""],
            "lightning": [f'precision="{words["lightning"]}"'],
            "accelerate": [f'mixed_precision="{words["accelerate"]}"'],
            "timm": [f"--batch-size {batch}", words["timm"]],
        }
        if accumulated > 1:
            arguments["transformers"].append(f"gradient_accumulation_steps={accumulated}")
            arguments["lightning"].append(f"accumulate_grad_batches={accumulated}")
            arguments["accelerate"].append(f"gradient_accumulation_steps={accumulated}")
            arguments["timm"].append(f"--grad-accum-steps {accumulated}")
        listed = {name: ", ".join(filter(None, each)) for name, each in arguments.items()}
        return {
            "transformers": f"TrainingArguments({listed['transformers']})",
            "lightning": f"{is_tf32}Trainer({listed['lightning']})",
            "accelerate": f"{is_tf32}Accelerator({listed['accelerate']})",
            "timm": " ".join(["train.py", *filter(None, arguments["timm"])]),
        }

    @property
    def makes_few_steps(self) -> bool:
        """Whether an epoch is known to have so few optimizer steps that the model may stay undertrained."""
        if self.epoch_steps is None:
            return False
        if self.workload_epoch_steps is None:
            return self.epoch_steps < _FEW_EPOCH_STEPS
        return made_few_optimizer_steps(self.epoch_steps, self.workload_epoch_steps)

    def as_json(self) -> dict[str, Any]:
        return {
            "precision": self.precision,
            "batch_size": self.batch_size,
            "grad_accum": self.job.grad_accum,
            "batches_per_step": self.batches_per_step,
            "epoch_steps": self.epoch_steps,
            "workload_epoch_steps": self.workload_epoch_steps,
            "makes_few_steps": self.makes_few_steps,
            "samples_per_second": self.samples_per_second,
            "readings": self.readings,
            "command": self.command,
            "in_tools": self.in_tools,
        }


def made_few_optimizer_steps(optimizer_steps: int, best_optimizer_steps: int) -> bool:
    """Return whether a training made so few optimizer steps that its metric is not comparable to the best one."""
    return optimizer_steps * _FEW_STEPS <= best_optimizer_steps


def recommend(result: MaxBatchResult | SearchResult) -> Recommendation | None:
    """Return the recommended training; None if nothing fits or every training diverged."""
    if isinstance(result, SearchResult):
        return None if has_diverged(result) else _of_search(result) or _of_max_batch(result.limits)
    return _of_max_batch(result)


def _of_max_batch(fitted: MaxBatchResult) -> Recommendation | None:
    """Choose the fastest precision at its max batch; among equally fast ones, the largest max batch."""
    batches = {
        name: found.recommended_batch or found.max_multiple or found.max_batch.batch_size
        for name, found in fitted.precisions.items()
        if found.max_batch.batch_size
    }
    if not batches:
        return None
    parts = {name: each for name in batches if (each := fitted.accumulation(name)) is not None}
    batches |= {name: batch for name, (batch, _) in parts.items()}
    speeds = {name: _speed_at(fitted.precisions[name], batch_size) for name, batch_size in batches.items()}
    precision = max(_as_fast_as_any(speeds.items()), key=fitted.max_batch.__getitem__)
    # The time limit of a probe does not apply to the recommended training.
    chosen = {"precision": precision, "batch_size": batches[precision], "job_timeout_seconds": None}
    if precision in parts:
        chosen["grad_accum"] = parts[precision][1]
    speed = speeds[precision] or None
    choice = _recommended(fitted, chosen, speed=speed, speed_of_fp32=_speed_of_fp32(fitted, precision, speed))
    own = fitted.precisions[precision].readings.get(choice.batch_size, ())
    return dataclasses.replace(choice, readings=max(len(own), 1))


def _speed_at(found: PrecisionResult, batch_size: int) -> float:
    """Return the samples/s of the probe at a batch, or those at the max batch if the probe was too short."""
    return dict(found.throughput).get(batch_size) or found.samples_per_second or 0.0


def _speed_of_fp32(fitted: MaxBatchResult, precision: str, speed: float | None) -> float | None:
    """Return the best samples/s of fp32 to compare a speed at a precision with; None if it is unknown.

    If no batch of fp32 was timed, it is as much slower as its run at its max batch was: both of these load data.
    """
    if (of_fp32 := fitted.precisions.get(REFERENCE)) is None:
        return None
    run_speed, run_speed_of_fp32 = fitted.precisions[precision].speed_of_longest_run, of_fp32.speed_of_longest_run
    if not of_fp32.best_speed and speed and run_speed and run_speed_of_fp32:
        return speed * run_speed_of_fp32 / run_speed
    return of_fp32.best_speed or of_fp32.samples_per_second


def _of_search(result: SearchResult) -> Recommendation | None:
    """Choose the fastest training whose metric is within the tolerance; among equally fast ones, the best metric."""
    trained = [
        trial
        for trial in result.trials
        if trial.job_result.fits and trial.job_result.samples_per_second and trial.precision in result.max_batch
    ]
    good = _as_good_as_the_best(result, trained)
    chosen = _fastest(result, good)
    if chosen is None:
        return None
    of_fp32, good_of_fp32 = ([trial for trial in of if trial.precision == REFERENCE] for of in (trained, good))
    reference = _fastest(result, good_of_fp32 or of_fp32)
    changes: dict[str, Any] = {"precision": chosen.precision, "batch_size": chosen.batch_size}
    if chosen.learning_rate != result.limits.job.learning_rate:
        changes["learning_rate"] = chosen.learning_rate
    return _recommended(
        result.limits,
        changes,
        speed=chosen.job_result.samples_per_second,
        speed_of_fp32=reference.job_result.samples_per_second if reference is not None else None,
        job_result=chosen.job_result,
        metric_of_fp32=reference.job_result.metric if reference is not None else None,
    )


def _recommended(
    fitted: MaxBatchResult,
    changes: dict[str, Any],
    *,
    speed: float | None,
    speed_of_fp32: float | None,
    job_result: JobResult | None = None,
    metric_of_fp32: float | None = None,
) -> Recommendation:
    precision, of_fp32 = changes["precision"], fitted.max_batch.get(REFERENCE)
    is_reference, max_batch = precision == REFERENCE, fitted.max_batch[precision]
    job = fitted.with_eval_batch_size(dataclasses.replace(fitted.asked, **changes), precision)
    own = 1 if fitted.effective_batch_size is not None else fitted.batches_per_step(changes["batch_size"])
    return Recommendation(
        job=job,
        batches_per_step=own,
        epoch_steps=_epoch_steps(fitted, dataclasses.replace(job, grad_accum=job.grad_accum * own)),
        workload_epoch_steps=_epoch_steps(
            fitted, dataclasses.replace(fitted.asked, batch_size=fitted.workload_batch_size)
        ),
        target_recipe=fitted.target_recipe,
        precision=precision,
        batch_size=changes["batch_size"],
        samples_per_second=speed,
        max_batch=max_batch,
        speed_ratio=speed / speed_of_fp32 if speed and speed_of_fp32 and not is_reference else None,
        batch_ratio=max_batch / of_fp32 if of_fp32 and not is_reference else None,
        job_result=job_result,
        metric_of_fp32=metric_of_fp32,
    )


def _epoch_steps(fitted: MaxBatchResult, job: Job) -> int | None:
    """Return the optimizer steps of an epoch of a job; None if unknown, or if its number of steps is fixed."""
    if job.batch_size is None or job.steps is not None or fitted.training_samples is None:
        return None
    rest = fitted.training_samples % (job.batch_size * job.nproc) if fitted.drops_last else 0
    return steps_per_epoch(job, fitted.training_samples - rest)


def has_diverged(result: SearchResult) -> bool:
    """Return whether no training has a finite metric although the workload measures one."""
    rated = [trial for trial in result.trials if trial.job_result.fits and trial.job_result.metric is not None]
    return bool(rated) and all(trial.finite_metric is None for trial in rated)


def _as_good_as_the_best(result: SearchResult, trained: Sequence[TrialRow]) -> Sequence[TrialRow]:
    """Return the trainings whose metric is within the tolerance of the best; all if there is no metric.

    Precisions that are worse than fp32 over several seeds are excluded.
    """
    higher = result.higher_is_better
    rated = [(trial, _goodness(trial, higher)) for trial in trained if trial.finite_metric is not None]
    if not rated:
        return trained
    worse = {name for name in result.max_batch if _is_worse(result.seeds, name, higher_is_better=higher)}
    return _within(result.tolerance, [each for each in rated if each[0].precision not in worse] or rated)


def _goodness(trial: TrialRow, higher_is_better: bool) -> float:
    return (1 if higher_is_better else -1) * (trial.job_result.metric or 0.0)


def _within(tolerance: Tolerance, rated: Sequence[tuple[T, float]]) -> list[T]:
    best = max((goodness for _, goodness in rated), default=0.0)
    return [candidate for candidate, goodness in rated if goodness >= best - tolerance.of(abs(best))]


def _is_worse(seeds: SeedsResult | None, precision: str, *, higher_is_better: bool) -> bool:
    against = seeds.comparison(precision) if seeds is not None else None
    if against is None or against.conclusion != DIFFERENT:
        return False
    return (against.difference < 0) == higher_is_better


def _fastest(result: SearchResult, trials: Sequence[TrialRow]) -> TrialRow | None:
    def rank(trial: TrialRow) -> tuple[float, float, int]:
        goodness = _goodness(trial, result.higher_is_better)
        return goodness, _speed(trial.job_result), result.max_batch.get(trial.precision, 0)

    return max(_as_fast_as_any([(trial, _speed(trial.job_result)) for trial in trials]), key=rank, default=None)


def choose_compared(result: CompareResult) -> Cell | None:
    """Return the fastest cell of a comparison whose metric is as good as the best.

    Only the largest value of the option with a completed training counts; among equally fast cells, the one with the
    least memory wins. Returns None if nothing trained, if every training at that value diverged, or if the values are
    not numbers: a comparison of precisions cannot tell which of them the user wants.
    """
    if len(result.values) > 1 and as_numbers(result.values) is None:
        return None
    trained = [cell for cell in result.cells if cell.failure is None and cell.samples_per_second]
    values = [value for value in result.values if any(cell.value == value for cell in trained)]
    good = _as_good_cells(result, [cell for cell in trained if cell.value == values[-1]]) if values else []
    return min(
        _as_fast_as_any([(cell, _speed(cell)) for cell in good]),
        key=lambda cell: (cell.train_memory_bytes or math.inf, -_speed(cell)),
        default=None,
    )


def _as_good_cells(result: CompareResult, cells: Sequence[Cell]) -> Sequence[Cell]:
    """Return the cells of one value whose mean metric is within the tolerance of the best; all without a metric.

    A precision is excluded if one of its seeds diverged, or if it is worse than fp32 over several seeds.
    """
    if not any(training.job_result.metric is not None for cell in cells for training in cell.trainings):
        return cells
    higher = result.higher_is_better
    rated = []
    for cell in cells:
        seeds = result.seeds_at(cell.value)
        is_worse = _is_worse(seeds, cell.precision, higher_is_better=higher)
        if cell.metric is not None and not seeds.without_metric(cell.precision) and not is_worse:
            rated.append((cell, cell.metric.mean if higher else -cell.metric.mean))
    return _within(result.tolerance, rated)


def _as_fast_as_any(candidates: Iterable[tuple[T, float]]) -> list[T]:
    """Return the candidates within 3 % of the best samples/s."""
    speeds = list(candidates)
    best = max((speed for _, speed in speeds), default=0.0)
    return [candidate for candidate, speed in speeds if speed >= NO_SLOWER * best]


def _speed(measured: JobResult | Cell) -> float:
    return measured.samples_per_second or 0.0


def train_command(job: Job) -> str:
    """Return `amp-track train WORKLOAD …` with a flag for each setting that is not the default.

    `--synthetic` is dropped, because the user wants to train, except for a model by name, which has no data.
    """
    words = ["amp-track", "train", job.workload]
    for flag in flags_of(Job, without=() if library_of_model(job.workload) is not None else ("synthetic",)):
        value = getattr(job, flag.field.name)
        if value != flag.field.default or flag.field.name == "precision":  # always named: it is the recommendation
            words += _words(flag, value)
    return shlex.join(words)


def _words(flag: Flag, value: Any) -> list[str]:
    if flag.is_switch:
        return [flag.name]
    if flag.setting.repeatable:
        return [word for name, text in value for word in (flag.name, f"{name}={text}")]
    if flag.field.name.endswith("_bytes"):  # an integer in the largest unit that divides it
        units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, ""))
        return [flag.name, next(f"{value // size}{unit}" for size, unit in units if value % size == 0)]
    is_short = isinstance(value, float) and float(f"{value:g}") == value
    return [flag.name, f"{value:g}" if is_short else str(value)]
