"""The result of `fit`: the edge of each precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from amp_track.batch_search.search import MaxBatch
from amp_track.config.job import Job
from amp_track.config.steps import micro_batch
from amp_track.records.hardware import Hardware
from amp_track.records.result import JobResult
from amp_track.results.notebook import Shown

NO_SLOWER = 0.97
"""The fraction of the best throughput that counts as the best: within 3 % there is no difference."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """One job of a fit study: what was tried, why, and what it took."""

    trial: int
    precision: str
    batch_size: int
    kind: str
    """`probe`, `multiple`, `beyond`, `confirm` or `repeat`; see `amp_track.study.batch_sampler.Task`."""
    reason: str
    predicted_bytes: int | None
    job_result: JobResult
    run_id: str

    @property
    def measured_bytes(self) -> int | None:
        """The peak by the finest meter, which is what was predicted; of a failure, about what it needs."""
        if not self.job_result.fits:
            return self.job_result.wanted_bytes
        return self.job_result.peak_allocated_bytes or self.job_result.peak_bytes

    def as_row(self) -> dict[str, Any]:
        """Return the job as a row of MLflow's table."""
        return {
            "trial": self.trial,
            "precision": self.precision,
            "batch_size": self.batch_size,
            "kind": self.kind,
            "status": str(self.job_result.status),
            "phase": self.job_result.phase,
            "predicted_bytes": self.predicted_bytes,
            "train_peak_allocated_bytes": self.job_result.peak_allocated_bytes,
            "peak_reserved_bytes": self.job_result.peak_bytes,
            "wanted_bytes": self.job_result.wanted_bytes,
            "samples_per_second": self.job_result.samples_per_second,
            "wall_seconds": self.job_result.wall_seconds,
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True)
class PrecisionResult:
    """The edge of one precision, with the cost of training there."""

    max_batch: MaxBatch
    probes: int
    """How many probes proved the edge; those of the multiple and the confirmation are not counted."""
    at_max_batch: JobResult | None
    """The probe at the largest batch; None where nothing fits."""
    run_id: str | None
    confirmation: JobResult | None = None
    """The longer training at the largest batch; None where it was left out."""
    runs_at_max_batch: int = 1
    """In how many fresh processes the largest batch ran."""
    epoch_steps: int = 0
    """The steps of a whole epoch at the largest batch."""
    failure: JobResult | None = None
    """The outcome at one sample more; None where a limit ends the search."""
    max_multiple: int | None = None
    """The largest multiple of `--multiple-of` that ran; None where there is none."""
    throughput: tuple[tuple[int, float], ...] = ()
    """(batch size, samples per second) of every batch that ran, in ascending order."""
    beyond: tuple[tuple[int, bool], ...] = ()
    """(batch size, whether it fits) of the batches above the first that fails which were tried too."""
    bytes_needed: int | None = None
    """The memory that one sample takes, where not even that fits."""
    plan_error: float | None = None
    """By which fraction the first probe took more than a plan had predicted; None without a plan, or if it failed."""

    @property
    def why_unsupported(self) -> str | None:
        """Why the device cannot train the model at this precision at all; None where it can."""
        return self.failure.message if self.failure is not None and self.max_batch.bound == "unsupported" else None

    @property
    def also_fits(self) -> list[int]:
        """Batches that fit above the first that does not: fitting need not be monotone in the batch."""
        return [batch_size for batch_size, fits in self.beyond if fits]

    @property
    def efficient_batch(self) -> tuple[int, float] | None:
        """The smallest batch within 3 % of the best samples/s, with its samples/s: larger ones are no faster."""
        best = max((speed for _, speed in self.throughput), default=0.0)
        return next(((batch, speed) for batch, speed in self.throughput if speed >= best * NO_SLOWER), None)

    @property
    def samples_per_second(self) -> float | None:
        """The throughput at the largest batch; from the longer training where there was one."""
        measured = self.confirmation or self.at_max_batch
        return measured.samples_per_second if measured else None

    @property
    def peak_bytes(self) -> int | None:
        """The peak of memory at the largest batch, or the memory that one sample takes where nothing fits."""
        peak = self._peak(lambda job_result: job_result.peak_bytes)
        return peak if peak is not None else self.bytes_needed

    def _peak(self, meter: Callable[[JobResult], int | None]) -> int | None:
        """Return the larger of what the probe and the longer training at the largest batch took; None if unknown."""
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
            "efficient_batch": efficient[0] if efficient else None,
            "peak_bytes": self.peak_bytes,
            "train_peak_allocated_bytes": self._peak(lambda job_result: job_result.peak_allocated_bytes),
            "samples_per_second": self.samples_per_second,
            "run_id": self.run_id,
        }


@dataclass(frozen=True, kw_only=True)
class MaxBatchResult(Shown):
    """The edge of every precision. `skipped` maps the other precisions to the reason."""

    study: str
    run_id: str
    experiment_id: str
    job: Job
    hardware: Hardware
    precisions: dict[str, PrecisionResult]
    skipped: dict[str, str]
    cautions: dict[str, str] = field(default_factory=dict)
    """By precision that the device emulates, what to expect of it."""
    unproven: tuple[str, ...] = ()
    """The precisions whose search was interrupted; what is known of them is among `skipped`."""
    asked: Job = Job()
    """The job as it was given: what is None is the workload's own."""
    probes: tuple[ProbeResult, ...] = field(default=(), repr=False)
    """Every job that has looked for an edge, in the order of the trials."""
    limit_bytes: int | None = None
    """The memory that a job of the study may take: the budget, or what was free, less the headroom."""
    headroom_bytes: int = 0
    """The part of the budget that is left free at the edges."""
    multiple_of: int = 1
    effective_batch_size: int | None = None
    plan_seconds: float | None = field(default=None, compare=False)
    """How long it took to predict where memory ends; None if that was not needed."""
    report: str = ""
    """Where its page is."""

    @property
    def max_batches(self) -> dict[str, int]:
        """The largest batch by precision, for those at which at least one sample fits."""
        return {
            name: fitted.max_batch.batch_size for name, fitted in self.precisions.items() if fitted.max_batch.batch_size
        }

    def accumulation(self, precision: str) -> tuple[int, int] | None:
        """Return the batch of each process and how many of it make the effective batch.

        None where no effective batch was asked for or no batch divides it.
        """
        if self.effective_batch_size is None:
            return None
        largest = self.precisions[precision].max_batch.batch_size
        of_each = self.effective_batch_size // self.job.nproc
        return micro_batch(of_each, largest, multiple_of=self.multiple_of)

    def as_json(self) -> dict[str, Any]:
        return {
            "study": self.study,
            "run_id": self.run_id,
            "workload": self.job.workload,
            "device": self.hardware.as_json(),
            "memory_budget_bytes": self.job.memory_budget_bytes,
            "headroom_bytes": self.headroom_bytes,
            "effective_batch_size": self.effective_batch_size,
            "plan_seconds": self.plan_seconds,
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
