"""A simulated device: a job runner without processes.

Memory is `fixed + per_sample * batch`, plus an extra in a training that is longer than a probe. A job above its budget
runs out of memory. Everything that commands write (studies, runs, tables) is real.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support import MEBIBYTE

from amp_track.config.inspection import Inspection, Support
from amp_track.config.job import Job, JobFolder, steps_per_epoch, total_steps
from amp_track.config.precisions import PRECISIONS
from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import BadOption
from amp_track.records.events import EpochEnded, Event, Launched, Started, StepsRecorded
from amp_track.records.hardware import Hardware
from amp_track.records.plan import Forecast, Forecasts, ForecastTask
from amp_track.records.result import JobResult, JobStatus, ScaleReport
from amp_track.targets import source
from amp_track.workers import interrupts

SPEED = {"fp32": 1000.0, "tf32": 2000.0, "amp": 3000.0, "bf16": 3000.0}
METRIC = {"fp32": 0.9, "tf32": 0.9, "amp": 0.9, "bf16": 0.9}


@dataclass
class SimulatedRunner:
    """Runs the jobs of a made-up workload with the option `width`.

    Args:
        fixed_bytes: memory of a job, independent of its batch size.
        bytes_per_sample: by precision.
        longer_bytes: additional memory of a training, which a probe does not show.
        planned_bytes_per_sample: predicted memory per sample; None for no memory plan.
        free_bytes: free memory of the device.
        samples: size of the training data.
        fails: returns the result of a job that fails; None for a job that trains.
        metric: returns the metric that a job reaches.
        probe_seconds: the reported duration of a job.
    """

    fixed_bytes: int = 2 * MEBIBYTE
    bytes_per_sample: Mapping[str, int] = field(
        default_factory=lambda: {"fp32": 40_000, "tf32": 40_000, "amp": 21_000, "bf16": 20_000}
    )
    longer_bytes: int = 0
    planned_bytes_per_sample: Mapping[str, int] | None = None
    free_bytes: int = 64 * MEBIBYTE
    samples: int = 5000
    supported: tuple[str, ...] = ("fp32", "bf16", "amp")
    batch_size: int = 16
    fails: Callable[[Job], JobResult | None] = lambda job: None
    metric: Callable[[Job], float | None] = lambda job: METRIC[job.precision]
    probe_seconds: float = 1.0
    eval_bytes_per_sample: int = 0
    size_ratio: float | None = None
    """The size of the largest samples, of which the worst batch consists, relative to the mean."""
    epochs: int = 2
    streams: bool = False
    """Whether trainings send events by step and epoch, whose plot takes a third of a second."""
    kind: str = "simulated"
    """The kind of its hardware."""
    forecasts_asked: int = 0
    jobs: list[Job] = field(default_factory=list)
    """The jobs that ran, in order."""

    def start(self, *, inspects: bool) -> None:
        pass

    def forecast(self, job: Job, task: ForecastTask) -> Forecasts:
        self.forecasts_asked += 1
        if self.planned_bytes_per_sample is None:
            return Forecasts(reason="it is made up")
        found = {}
        for precision in task.precisions:
            slope = self.planned_bytes_per_sample[precision]
            batch_size = min(int((0.85 * task.budget_bytes - self.fixed_bytes) / slope), task.max_batch_size)
            found[precision] = Forecast(
                batch_size=batch_size, allocated_bytes=self.fixed_bytes + slope * batch_size, slope_bytes=float(slope)
            )
        return Forecasts(by_precision=tuple(found.items()))

    def inspect(self, job: Job) -> Inspection:
        for name, text in job.options:
            if name != "width":
                raise BadOption(name, f"got {text!r}, expected an option of {job.workload} (width)")
            if not text.isdigit():
                raise BadOption(name, f"got {text!r}, expected int")
        return Inspection(
            device="simulated:0",
            hardware=Hardware(kind=self.kind, name="Simulated 64 MiB"),
            free_bytes=self.free_bytes,
            budget_support=Support(supported=True, reason="it is made up"),
            precisions=tuple(
                (name, Support(supported=name in self.supported, reason=f"this device has {self.supported}"))
                for name in PRECISIONS
            ),
            workload_name="MadeUp",
            workload_digest=source.digest(Path(job.workload)) or "0123456789ab",
            batch_size=self.batch_size,
            epochs=self.epochs,
            learning_rate=1e-3,
            workload_imports=(),
            num_workers=0,
            options=(("width", str(int(dict(job.options).get("width", "8")))),),
            metric_name="accuracy",
            higher_is_better=True,
            training_samples=self.samples,
            evaluation_samples=self.samples // 10,
            dataset_digest="abcdef01",
            versions=(("amp_track", "0"), ("python", "3"), ("torch", "2"), ("cuda", "None"), ("cudnn", "None")),
        )

    def run(self, job: Job, on_event: Callable[[Event], None], *, folder: JobFolder | None = None) -> JobResult:
        interrupts.check()  # the real job runner waits for a process here
        self.jobs.append(job)
        on_event(Launched())
        if (failure := self.fails(job)) is not None:
            return failure
        assert job.batch_size is not None
        needed = self._needed(job)
        budget = job.memory_budget_bytes if job.memory_budget_bytes is not None else self.free_bytes
        if needed > budget:
            last = self.bytes_per_sample[job.precision]
            return JobResult(
                status=JobStatus.OOM,
                phase="backward",
                message="out of memory (in backward)",
                requested_bytes=last,
                train_peak_allocated_bytes=needed - last,
                peak_bytes=min(needed, budget),
                wall_seconds=0.1,
            )
        return self._trained(job, needed, on_event)

    def measure(self, job: Job) -> JobResult:
        probe = dataclasses.replace(job, probe=True)
        return self._trained(probe, self._needed(probe), lambda event: None)

    def dtypes(self, job: Job) -> DtypesReport:
        raise AssertionError("a simulated device has no operations")

    def _needed(self, job: Job) -> int:
        assert job.batch_size is not None
        longer = 0 if job.probe else self.longer_bytes
        ratio = self.size_ratio if self.size_ratio is not None and job.worst_batch else 1.0
        of_batch = int(ratio * self.bytes_per_sample[job.precision] * job.batch_size)
        return self.fixed_bytes + longer + max(of_batch, self._of_evaluation(job))

    def _of_evaluation(self, job: Job) -> int:
        return self.eval_bytes_per_sample * min(job.samples_per_evaluation_batch or 0, self.samples // 10)

    def _trained(self, job: Job, needed: int, on_event: Callable[[Event], None]) -> JobResult:
        per_epoch = steps_per_epoch(job, self.samples)
        steps = 2 if job.probe else total_steps(job, per_epoch)
        evaluates = not job.probe or job.probe_to_the_end or total_steps(job, per_epoch) > per_epoch
        is_timed = not job.probe or job.speed_readings > 0
        scale = ScaleReport(initial=65536.0, final=65536.0, history=((0, 65536.0), (steps, 65536.0)))
        on_event(Started(settings=(("fp32_precision.made_up", "ieee"),)))
        if self.streams and not job.probe:
            on_event(StepsRecorded(first_step=1, losses=tuple(1 / step for step in range(1, steps + 1))))
            on_event(EpochEnded(epoch=1, step=min(per_epoch, steps), train_loss=0.5, metric=self.metric(job)))
        return JobResult(
            status=JobStatus.FITS,
            wall_seconds=self.probe_seconds,
            train_seconds=0.9,
            size_ratio=self.size_ratio if job.worst_batch else None,
            samples_per_second=SPEED[job.precision] if is_timed else None,
            cold_samples_per_second=None if is_timed else SPEED[job.precision],
            eval_samples_per_second=2 * SPEED[job.precision] if evaluates else None,
            train_peak_allocated_bytes=needed,
            peak_bytes=needed,
            eval_peak_allocated_bytes=(
                self.fixed_bytes + self._of_evaluation(job) if self.eval_bytes_per_sample else needed // 2
            )
            if evaluates
            else None,
            train_loss=0.5,
            eval_loss=0.5,
            metric=None if job.probe else self.metric(job),
            steps=steps,
            scale=scale if job.precision == "amp" else None,
        )
