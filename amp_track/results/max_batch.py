"""The result of `max-batch`: the max batch of each precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, mode
from typing import TYPE_CHECKING, Any

from amp_track.batch_search.recommended_batch import NO_SLOWER, is_timed
from amp_track.batch_search.search import MaxBatch
from amp_track.config.job import Job, micro_batch
from amp_track.records.hardware import Hardware
from amp_track.records.result import JobResult
from amp_track.results import Shown
from amp_track.results.trial_row import TrialRow

NOT_ASKED_FOR = "not asked for"
"""The reason for which a precision that was not requested has no max batch."""

if TYPE_CHECKING:
    from amp_track.results.recommendation import Recommendation


@dataclass(frozen=True, kw_only=True)
class PrecisionResult:
    """The max batch of one precision, with the memory and speed of training at it."""

    max_batch: MaxBatch
    probes: int
    """The number of probes and failed confirmation runs that led to the max batch."""
    at_max_batch: JobResult | None
    """The probe at the max batch; None if nothing fits."""
    run_id: str | None
    confirmation: JobResult | None = None
    """The confirmation run at the max batch; None if it was skipped."""
    runs_at_max_batch: int = 1
    """The number of fresh processes in which the max batch ran."""
    epoch_steps: int = 0
    """The steps of one epoch at the max batch."""
    failure: JobResult | None = None
    """The job result at one sample more; None if another limit ends the search."""
    max_multiple: int | None = None
    """The largest multiple of `--multiple-of` that ran; None if there is none."""
    readings: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """The readings of samples per second in every probe that fits, by batch size, in ascending order."""
    recommended_batch: int | None = None
    """The batch to train with at this precision; see `amp_track.batch_search.recommended_batch`. None if no batch is a
    multiple of `--multiple-of` and divides `--effective-batch-size`."""
    compared: tuple[int, ...] = ()
    """The batches of which the recommended one is chosen by their speed."""
    leaves_headroom: bool = False
    """Whether the recommended batch is known to leave the recommended headroom."""
    beyond: tuple[tuple[int, bool], ...] = ()
    """(batch size, whether it fits) of the batches tried above the first failing one."""
    size_ratio: float | None = None
    """The size of the largest samples relative to the mean; None if samples do not differ in size."""
    why_as_drawn: str = ""
    """Why batches stayed as they were drawn, although samples may differ in size."""
    typical_max_batch: MaxBatch | None = None
    """The max batch of batches as they are drawn, if samples differ in size: `max_batch` is that of the largest."""
    eval_max_batch: MaxBatch | None = None
    """The max batch of an evaluation after training at the max batch, if it was to be found."""
    bytes_needed: int | None = None
    """The memory that one sample needs, if not even one fits."""
    plan_error: float | None = None
    """The relative error of the memory plan at the first probe that fits; None without a plan."""

    @property
    def why_unsupported(self) -> str | None:
        """The reason why the device cannot train the model at this precision; None if it can."""
        return self.failure.message if self.failure is not None and self.max_batch.bound == "unsupported" else None

    @property
    def also_fits(self) -> list[int]:
        """The batches that fit above the first failing one: memory need not grow monotonically with the batch."""
        return [batch_size for batch_size, fits in self.beyond if fits]

    @property
    def throughput(self) -> tuple[tuple[int, float], ...]:
        """(batch size, median samples per second) of every batch that was timed, in ascending order."""
        return tuple((batch_size, median(own)) for batch_size, own in self.readings.items() if median(own))

    @property
    def best_speed(self) -> float:
        """The best samples per second of a timed batch, which one disturbed reading does not lower; 0 for none."""
        return max((speed for _, speed in self.throughput), default=0.0)

    @property
    def timed(self) -> dict[int, float]:
        """The median samples per second of each compared batch with repeated readings, by batch size."""
        return {
            batch_size: median(own)
            for batch_size, own in self.readings.items()
            if batch_size in self.compared and is_timed(own) and median(own)
        }

    @property
    def efficient_batch(self) -> tuple[int, float] | None:
        """The smallest batch within 3 % of the best samples/s, with its samples/s. Larger batches are not faster.

        Repeated readings count, if there are any.
        """
        speeds = self.timed or dict(self.throughput)
        best = max(speeds.values(), default=0.0)
        return next(((batch, speed) for batch, speed in speeds.items() if speed >= best * NO_SLOWER), None)

    @property
    def samples_per_second(self) -> float | None:
        """The median of the readings at the max batch, as for other batches; without one, that of its longest run.

        A run of a single step has none: it also starts up the device.
        """
        return dict(self.throughput).get(self.max_batch.batch_size) or self.speed_of_longest_run

    @property
    def speed_of_longest_run(self) -> float | None:
        """The samples per second of the longest run at the max batch, which may include the loading of data."""
        runs = [run for run in (self.confirmation, self.at_max_batch) if run is not None and run.steps != 1]
        return next((run.samples_per_second for run in runs), None)

    @property
    def peak_bytes(self) -> int | None:
        """The peak memory at the max batch, or the memory that one sample needs if nothing fits."""
        peak = self._peak(lambda job_result: job_result.peak_bytes)
        return peak if peak is not None else self.bytes_needed

    def _peak(self, meter: Callable[[JobResult], int | None]) -> int | None:
        """Return the larger peak of the probe and the confirmation run at the max batch; None if unknown."""
        peaks = [meter(job_result) for job_result in (self.at_max_batch, self.confirmation) if job_result is not None]
        return max((peak for peak in peaks if peak is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        efficient = self.efficient_batch
        return {
            "max_batch": self.max_batch.batch_size,
            "first_failing_batch": self.max_batch.first_failing_batch,
            "bound": self.max_batch.bound,
            "also_fits": self.also_fits,
            "why_unsupported": self.why_unsupported,
            "fails_in": self.failure.phase if self.failure else None,
            "probes": self.probes,
            "plan_error": self.plan_error,
            "runs_at_max_batch": self.runs_at_max_batch,
            "confirmed_steps": self.confirmation.steps if self.confirmation else 0,
            "epoch_steps": self.epoch_steps,
            "max_multiple": self.max_multiple,
            "typical_max_batch": self.typical_max_batch.batch_size if self.typical_max_batch else None,
            "eval_max_batch": self.eval_max_batch.batch_size if self.eval_max_batch else None,
            "size_ratio": self.size_ratio,
            "efficient_batch": efficient[0] if efficient else None,
            "recommended_batch": self.recommended_batch,
            "readings": {str(batch_size): list(own) for batch_size, own in self.readings.items()},
            "peak_bytes": self.peak_bytes,
            "peak_allocated_bytes": self._peak(lambda job_result: job_result.peak_allocated_bytes),
            "samples_per_second": self.samples_per_second,
            "run_id": self.run_id,
        }


@dataclass(frozen=True, kw_only=True)
class MaxBatchResult(Shown):
    """The max batch of each precision. `skipped` maps the other precisions to the reason."""

    study: str
    run_id: str
    experiment_id: str
    job: Job
    hardware: Hardware
    precisions: dict[str, PrecisionResult]
    skipped: dict[str, str]
    cautions: dict[str, str] = field(default_factory=dict)
    """A caution for each precision that the device emulates."""
    unproven: tuple[str, ...] = ()
    """The precisions whose search was interrupted; `skipped` holds what is known about them."""
    target_recipe: str = ""
    """How to call a function, with placeholders; empty for a workload or a command."""
    asked: Job = Job()
    """The job as the user gave it: None stands for the workload's own value."""
    probes: tuple[TrialRow, ...] = field(default=(), repr=False)
    """Every job of the search for the max batch, by trial number."""
    limit_bytes: int | None = None
    """The memory limit of a job: the budget, or the free memory, minus the headroom."""
    recommended_bytes: int | None = None
    """The memory that the recommended batch may take; None for the limit."""
    headroom_bytes: int = 0
    """The part of the budget that the max batch must leave free."""
    training_samples: int | None = None
    """The samples of an epoch; None if no job has shown them, and for synthetic batches."""
    drops_last: bool = False
    """Whether an epoch leaves out a last batch that is not full."""
    workload_batch_size: int | None = None
    """The workload's own batch size; None for a function or a command."""
    multiple_of: int = 1
    grad_accum: int = 1
    """The batches that a step of the probes and of the confirmation run accumulates."""
    effective_batch_size: int | None = None
    plan_seconds: float | None = field(default=None, compare=False)
    """The time that the memory plan took; None if none was needed."""
    report: str = ""
    """The path of the report page."""

    @property
    def limits(self) -> MaxBatchResult:
        """The result itself, as `SearchResult.limits`."""
        return self

    @property
    def max_batch(self) -> dict[str, int]:
        """The max batch by precision, for precisions at which at least one sample fits."""
        return {
            name: fitted.max_batch.batch_size for name, fitted in self.precisions.items() if fitted.max_batch.batch_size
        }

    @property
    def left_out(self) -> dict[str, str]:
        """The requested precisions without a max batch, with the reason."""
        return {name: reason for name, reason in self.skipped.items() if reason != NOT_ASKED_FOR}

    @property
    def recommended(self) -> Recommendation | None:
        """The recommended training; None if nothing fits."""
        from amp_track.results.recommendation import recommend  # which imports this module

        return recommend(self)

    def with_eval_batch_size(self, job: Job, *precisions: str) -> Job:
        """Return the job with a batch of its evaluation that fits at each of these precisions, in place of `auto`."""
        if job.eval_batch_size != "auto":
            return job
        known = [self.precisions[name].eval_max_batch for name in precisions]
        smallest = min((each.batch_size for each in known if each is not None and each.batch_size), default=None)
        return dataclasses.replace(job, eval_batch_size=smallest)

    def accumulation(self, precision: str) -> tuple[int, int] | None:
        """Return the recommended batch per process and the number of batches to accumulate for the effective batch.

        Returns None if no effective batch was requested or no batch that fits divides it.
        """
        if self.effective_batch_size is None:
            return None
        found = self.precisions[precision]
        of_each, largest = self.effective_batch_size // self.job.nproc, found.recommended_batch
        return micro_batch(of_each, largest or found.max_batch.batch_size, multiple_of=self.multiple_of)

    def batches_per_step(self, batch_size: int) -> int:
        """Return the batches of a step as the training itself accumulates them; 1 if none has shown them.

        The runs of this batch count, if they have: a training may keep the samples of a step.
        """
        known = [(probe.batch_size, own) for probe in self.probes if (own := probe.job_result.batches_per_step)]
        return mode([own for batch, own in known if batch == batch_size] or [own for _, own in known] or [1])

    def as_json(self) -> dict[str, Any]:
        return {
            "study": self.study,
            "run_id": self.run_id,
            "target": self.job.workload,
            "device": self.hardware.as_json(),
            "memory_budget_bytes": self.job.memory_budget_bytes,
            "headroom_bytes": self.headroom_bytes,
            "effective_batch_size": self.effective_batch_size,
            "plan_seconds": self.plan_seconds,
            "recommended": recommended.as_json() if (recommended := self.recommended) is not None else None,
            "precisions": {name: self._precision_as_json(name) for name in self.precisions}
            | {name: {"skipped": reason} for name, reason in self.skipped.items()},
            "report": self.report,
        }

    def _precision_as_json(self, name: str) -> dict[str, Any]:
        micro, grad_accum = self.accumulation(name) or (None, None)
        return self.precisions[name].as_json() | {
            "micro_batch": micro,
            "grad_accum": grad_accum,
            "caution": self.cautions.get(name),
        }
