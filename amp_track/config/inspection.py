"""The inspection of device and workload, made before any job runs and before anything is written."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from amp_track.config.job import Job, loads_in_its_own_process
from amp_track.config.precisions import AUTO, REFERENCE
from amp_track.records.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Support:
    """Whether a device supports a feature, and the reason for the user."""

    supported: bool
    reason: str
    has_caution: bool = False
    """Whether the reason is a caution: the device has no units for it, or the training does not compute in it."""


@dataclass(frozen=True, kw_only=True)
class TargetInspection:
    """The properties of a job's target. Only a workload has all of them."""

    kind: Literal["workload", "function", "command"] = "workload"
    workload_name: str
    workload_digest: str
    """The digest of the workload's source: a max batch that was proven for other code does not hold."""
    workload_imports: tuple[str, ...] | None = None
    """The imported files that the digest covers too, relative to the workload's folder; None if unknown."""
    batch_size: int
    """The workload's own batch size, for which its learning rate was chosen."""
    epochs: int = 1
    learning_rate: float = 0.0
    num_workers: int = 0
    options: tuple[tuple[str, str], ...] = ()
    """Every option of the workload with the value it has in this job."""
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The possible values of each option that has a known list: switches and named choices."""
    recipe: str = ""
    """How to train with the result: the call of a function, with placeholders; empty for a workload or a command."""
    unsupported: tuple[tuple[str, str], ...] = ()
    """The precisions in which it cannot train, each with the reason."""
    metric_name: str = "none"
    higher_is_better: bool = True
    training_samples: int = 0
    """0 if the data was not loaded: the job is synthetic, or the target is not a workload."""
    evaluation_samples: int = 0
    is_streamed: bool = False
    """Whether the training data is an iterable dataset, whose length is unknown."""
    dataset_digest: str = "unknown"
    libraries: tuple[tuple[str, str], ...] = ()
    """The versions of other libraries that it may train with, such as lightning."""

    def knows_samples(self, job: Job) -> bool:
        """Return whether the number of training samples is known and limits a job's batch."""
        return self.kind == "workload" and not job.synthetic and not self.is_streamed


@dataclass(frozen=True, kw_only=True)
class Inspection(TargetInspection):
    """The properties of a job's device and workload, found by a fresh process."""

    device: str
    """The name in torch: `cpu`, `cuda:0`."""
    hardware: Hardware
    free_bytes: int
    budget_support: Support
    precisions: tuple[tuple[str, Support], ...]
    versions: tuple[tuple[str, str], ...]
    local_processes: int = 1
    """The processes of a job on one machine; they share its data-loading processes."""

    def support(self, precision: str) -> Support:
        """Return whether the device supports a precision, and the reason."""
        return dict(self.precisions)[precision]

    @property
    def native_precision(self) -> str:
        """bf16 if the device has units for it, else fp32."""
        bf16 = self.support("bf16")
        return "bf16" if bf16.supported and not bf16.has_caution else REFERENCE

    @property
    def cautions(self) -> dict[str, str]:
        """The warnings of emulated precisions, and of those that a training ignores."""
        return {name: found.reason for name, found in self.precisions if found.supported and found.has_caution}


def resolve(job: Job, inspection: Inspection) -> Job:
    """Return the job with the workload's defaults for unset fields, and the device's full name and native precision."""
    learning_rate = job.learning_rate if job.learning_rate is not None else inspection.learning_rate
    epochs = job.epochs if job.epochs is not None or job.steps is not None else inspection.epochs
    num_workers = job.num_workers
    if num_workers is None:
        num_workers = inspection.num_workers // inspection.local_processes
    if loads_in_its_own_process(inspection.hardware.kind, job.memory_budget_bytes):
        num_workers = 0
    return dataclasses.replace(
        job,
        precision=inspection.native_precision if job.precision == AUTO else job.precision,
        device=inspection.device,
        batch_size=job.batch_size if job.batch_size is not None else inspection.batch_size,
        epochs=epochs,
        learning_rate=learning_rate,
        num_workers=num_workers,
        options=inspection.options,
    )
