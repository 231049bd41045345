"""Run a Job in this process: train, evaluate, measure, stream events, return a JobResult. It tracks nothing itself."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from amp_track.config.job import Job, JobFolder, scaled_learning_rate
from amp_track.config.precisions import Precision
from amp_track.records.errors import summary
from amp_track.records.events import EpochEnded, Event, Noted, Started, StepsDone, StepsRecorded
from amp_track.records.result import JobResult, JobStatus
from amp_track.training import artifacts
from amp_track.training.amp import random_state
from amp_track.training.amp.evaluation import EvalStep, EvalTotals
from amp_track.training.amp.precision import float32_precision
from amp_track.training.amp.step import TrainStep
from amp_track.training.amp.tensors import batch_length
from amp_track.training.checkpoint import Checkpoints
from amp_track.training.data import Batches, Part, Position, StreamTooShort
from amp_track.training.devices.base import Device
from amp_track.training.devices.cpu import peak_resident_bytes
from amp_track.training.metrics_accumulator import MetricsAccumulator
from amp_track.training.process_group import JSON, RankGroup
from amp_track.training.timing import InputWait, TrainingClock, make_full_steps
from amp_track.workload import Workload, new_model, new_optimizer, new_schedule

_WARM_UP_STEPS = 3
_PROGRESS_SECONDS = 0.2
_RECORD_SECONDS = 5.0
"""Interval at which the losses of a long epoch are fetched from the device and sent."""
_RECORD_STEPS_TOGETHER = 50
"""The same interval in optimizer steps for several ranks, which wait for each other to add up their losses."""
_MOST_SKIPPED_STEPS = 17
"""GradScaler halves its first scale of 2**16 with each overflow. After 16 it is 1: gradients overflow by themselves."""
_SEEDS_APART = 1_000_003
"""Distance between the seeds of ranks: larger than the differences between seeds that people compare."""


class Trainer:
    """Trains one resolved job on one device, and calls `send` with each event.

    `enforce_budget` limits memory to the job's budget, instead of only measuring it. `folder` is where checkpoints and
    artifacts are written, and the checkpoint to resume from.
    """

    _batches: Batches
    _step: TrainStep
    _accumulator: MetricsAccumulator
    _clock: TrainingClock

    def __init__(
        self,
        job: Job,
        workload: Workload,
        device: Device,
        send: Callable[[Event], None],
        *,
        group: RankGroup,
        enforce_budget: bool,
        folder: JobFolder | None,
    ) -> None:
        assert job.batch_size is not None and job.learning_rate is not None, "resolve the job first"
        self._job = job
        self._batch_size = job.batch_size
        self._workload = workload
        self._device = device
        self._group = group
        self._send = send
        self._enforce_budget = enforce_budget
        self._folder = folder
        self._checkpoints = Checkpoints(
            job.checkpoint_every,
            folder,
            higher_is_better=workload.metric.higher_is_better,
            send=send,
            writes=self._group.is_first,
        )
        self._precision = Precision.named(job.precision)
        self._phase = "data"
        self._input_wait = InputWait(device.torch_device if device.has_queue else None)
        self._evaluation_clock = TrainingClock(device, warm_up_steps=1)
        self._evaluation: EvalTotals | None = None
        """The last evaluation of a training."""
        self._non_finite_weights = ""
        self._seconds_before_resume = 0.0
        self._train_peak_allocated_bytes = self._eval_peak_allocated_bytes = 0
        self._resume_state: dict[str, Any] | None = None
        self._started = self._last_progress = self._last_record = time.perf_counter()

    @property
    def phase(self) -> str:
        """The current phase, or the phase in which an exception was raised: data, model, forward, evaluation, …"""
        return self._step.phase if self._phase == "training" else self._phase

    def run(self) -> JobResult:
        """Train, evaluate after every epoch, and measure. Exceptions pass through unchanged."""
        self._started = time.perf_counter()
        job, device, ranks = self._job, self._device, self._group.rank.count
        random_state.seed(job.seed)
        batches = self._batches = Batches(job, self._workload, self._group.rank, pin_memory=device.pins_memory)
        if self._batch_size * ranks > batches.training_samples:
            times = f" × {ranks} processes" if ranks > 1 else ""
            return JobResult(
                status=JobStatus.OVER_DATASET,
                message=f"batch size {self._batch_size}{times} exceeds the {batches.training_samples} training samples",
            )
        self._resume_state = self._checkpoints.load_resume_state(self._group)
        if self._resume_state is not None:
            self._started -= self._resume_state["wall_seconds"]
        self._phase = "model"
        device.begin(job.memory_budget_bytes, enforce=self._enforce_budget)
        learning_rate = scaled_learning_rate(job, self._workload.batch_size)
        step = self._step = self._build_step(learning_rate)
        self._accumulator = MetricsAccumulator(step, self._group.merge)
        with float32_precision(self._precision) as float32_settings:  # after the model's own code, which may set it too
            self._send(
                Started(settings=(*((f"fp32_precision.{name}", value) for name, value in float32_settings.items()),
                                  ("scaled_learning_rate", str(learning_rate)),
                                  ("memory_meter", device.meter)),
                        scale=step.history.scale if step.history is not None else None)
            )  # fmt: skip
            try:
                measured = self._probe() if job.probe else self._train()
            except StreamTooShort as error:
                each = " for each process" if ranks > 1 else ""
                message = f"batch size {self._batch_size} exceeds the {error.samples} samples of the data{each}"
                return JobResult(status=JobStatus.OVER_DATASET, message=message, training_samples=error.samples)
            wall_seconds = time.perf_counter() - self._started
        device.synchronize()
        job_result = JobResult(
            status=JobStatus.FITS,
            wall_seconds=wall_seconds,
            train_peak_allocated_bytes=self._train_peak_allocated_bytes or None,
            peak_resident_bytes=peak_resident_bytes(),
            peak_bytes=device.peak().reserved_bytes,
            eval_peak_allocated_bytes=self._eval_peak_allocated_bytes or None,
            first_step_peak_bytes=device.first_step_peak_bytes,
            waited_seconds=self._input_wait.seconds if not job.probe else None,  # it waits for every batch
            allocation_retries=device.allocation_retries(),
            size_ratio=batches.size_ratio,
            why_as_drawn=batches.why_as_drawn,
            eval_samples_per_second=self._evaluation_clock.samples_per_second,
            **self._accumulator.measured(),
            **measured,
        )
        self._write_artifacts()
        return job_result

    def _write_artifacts(self) -> None:
        """Write the artifacts after all measurements, without a memory limit. A failure is only noted in the log."""
        if self._folder is None or not self._folder.keep_plots or not self._group.is_first:
            return
        if self._job.probe or self._job.synthetic:
            return
        self._step.optimizer.state.clear()
        self._device.lift_budget()
        try:
            with float32_precision(self._precision):
                for written in artifacts.write_artifacts(self._workload, self._step, self._folder):
                    self._send(written)
        except Exception as error:
            self._send(Noted(text=f"the training is complete, but not all its files were written: {summary(error)}"))

    def _build_step(self, learning_rate: float) -> TrainStep:
        model = self._precision.prepare(new_model(self._workload)).to(self._device.torch_device)
        step = TrainStep(
            model,
            new_optimizer(self._workload, model, learning_rate),
            self._workload.loss,
            self._precision,
            schedule=new_schedule(self._workload, self._batches.total_steps),
            max_grad_norm=self._job.max_grad_norm,
            channels_last=self._job.channels_last,
            compile=self._job.compile,
            grad_stats_every=self._job.grad_stats_every,
            data_parallel=not self._group.is_alone,
        )
        if not self._group.is_first:
            # The same weights and sample order on each rank, but different dropout and augmentation.
            random_state.seed(self._job.seed + _SEEDS_APART * self._group.rank.index)
        return step

    def _train(self) -> dict[str, Any]:
        step, batches = self._step, self._batches
        self._clock = TrainingClock(self._device, min(_WARM_UP_STEPS, max(batches.total_steps // 3, 1)))
        for parts in batches.epochs(self._restore()):
            self._train_epoch(parts)
            self._non_finite_weights = self._non_finite_weights or step.non_finite_weights()
            self._evaluation = self._evaluate()
            after = batches.position_after_evaluation(step.steps)
            self._send(
                EpochEnded(
                    epoch=batches.position.epoch + 1,
                    step=step.steps,
                    train_loss=self._accumulator.end_epoch(is_complete=after.epoch > batches.position.epoch),
                    **self._evaluated(),
                )
            )
            self._checkpoints.after_epoch(
                step.steps,
                functools.partial(self._state, after),
                metric=self._evaluated()["metric"],
                is_over=step.steps == batches.total_steps,
            )
        return self._evaluated() | {
            "train_seconds": self._seconds_before_resume + self._clock.seconds,
            "samples_per_second": self._clock.samples_per_second,
            "non_finite_weights": self._non_finite_weights,
        }

    def _evaluated(self) -> dict[str, Any]:
        """Return loss and metric of the last evaluation; synthetic data has no metric."""
        evaluation = self._evaluation
        return {
            "eval_loss": evaluation.loss if evaluation else None,
            "metric": evaluation.metric if evaluation and not self._job.synthetic else None,
        }

    def _state(self, position: Position) -> dict[str, Any]:
        """Return the state from which `_restore` resumes the training at a position."""
        random_of_peers: list[dict[str, Any]] = []  # the state of one rank is part of the step's
        if not self._group.is_alone:
            own = random_state.to_json(random_state.capture(self._step.device))
            random_of_peers = [random_state.from_json(each) for each in self._group.gather(own, JSON)]
        return {
            "position": dataclasses.asdict(position),
            "step": self._step.state_dict(),
            "tally": self._accumulator.state_dict(),
            "evaluation": dataclasses.asdict(self._evaluation) if self._evaluation is not None else None,
            "non_finite_weights": self._non_finite_weights,
            "train_seconds": self._seconds_before_resume + self._clock.seconds,
            "waited_seconds": self._input_wait.seconds,
            "random_of_peers": random_of_peers,
            "wall_seconds": time.perf_counter() - self._started,
        }

    def _restore(self) -> Position | None:
        """Resume from the checkpoint, and drop its state, which holds a second copy of all weights."""
        state, self._resume_state = self._resume_state, None
        if state is None:
            return None
        self._step.load_state_dict(state["step"])
        self._accumulator.load_state_dict(state["tally"])
        self._evaluation = EvalTotals(**state["evaluation"]) if state["evaluation"] is not None else None
        self._non_finite_weights = state["non_finite_weights"]
        self._seconds_before_resume = state["train_seconds"]
        self._input_wait.seconds = state["waited_seconds"]
        if not self._group.is_alone:
            random_state.restore(state["random_of_peers"][self._group.rank.index], self._step.device)
        return Position(**state["position"])

    def _train_epoch(self, parts: Iterator[Part]) -> None:
        step, clock, batches = self._step, self._clock, self._batches
        self._begin_training()
        clock.start()
        for part in self._input_wait.timed(parts):
            samples, update = self._train_on(part), part.update
            del part  # before the next batch is loaded: two at once are not what fits
            clock.count(samples, step=update)
            if not update:
                continue
            now = time.perf_counter()
            if now - self._last_progress > _PROGRESS_SECONDS:
                self._last_progress = now
                peak_bytes = self._device.peak().reserved_bytes
                self._send(StepsDone(step=step.steps, total_steps=batches.total_steps, memory_bytes=peak_bytes))
            if self._is_time_to_record(now):
                self._last_record = now
                self._record()
            if self._checkpoints.is_due(step.steps):
                self._record()  # before the checkpoint, whose totals must already be recorded
                clock.stop()
                self._checkpoints.after_step(step.steps, self._state(batches.position_after(step.steps)))
                clock.start()
        self._record()
        clock.stop()
        self._note_peak_of_training()

    def _is_time_to_record(self, now: float) -> bool:
        """Return True if losses are due to be sent: by time, or by steps, so that several ranks agree."""
        if self._group.is_alone:
            return now - self._last_record > _RECORD_SECONDS
        return self._step.steps % _RECORD_STEPS_TOGETHER == 0

    def _record(self) -> None:
        """Send the losses and scale changes since the last record. Waits for the device."""
        totals = self._accumulator.read()
        if totals.steps:
            self._send(
                StepsRecorded(
                    first_step=totals.first_step,
                    losses=totals.step_losses,
                    scale_changes=totals.scale_changes,
                    diagnosed=totals.diagnosed,
                )
            )

    def _probe(self) -> dict[str, Any]:
        """Reproduce a training's peak memory cheaply: a smaller last batch, an evaluation, and a few full steps.

        The end of an epoch leaves optimizer state, kernels and workspaces in memory, so the full steps after it need
        the training's peak memory. A training of one epoch ends with the smaller batch and the evaluation instead.
        These rarely need more memory than the two full steps before them; `probe_to_the_end` decides whether the probe
        includes them.
        """
        batches = self._batches
        if batches.trains_after_an_evaluation:
            if self._job.compile:  # as a training does: for a full batch first, then for the smaller one
                self._begin_training()
                for part in next(batches.full_steps()):
                    self._train_on(part)
                self._note_peak_of_training()
            self._end_an_epoch()
        self._begin_training()
        # Steps that the training does not make may take more memory.
        most_steps = batches.full_step_count - (0 if batches.has_smaller_batch else self._step.steps)
        readings = min(self._job.speed_readings, max(most_steps - 1, 1))
        timing = make_full_steps(
            batches.full_steps(),
            self._train_on,
            self._device,
            agree=self._group.agree,
            needs_more=self._has_skipped_all_steps,
            readings=readings,
            most_steps=most_steps if readings <= 1 else sys.maxsize,
        )
        self._note_peak_of_training()
        makes_the_end = self._job.probe_to_the_end or not batches.has_a_second_full_step
        if makes_the_end and not batches.trains_after_an_evaluation:
            self._end_an_epoch()
        self._accumulator.read()
        self._accumulator.end_epoch()
        return dataclasses.asdict(timing)

    def _has_skipped_all_steps(self) -> bool:
        """Return whether amp has skipped every step so far: many optimizers have no state before the first update.

        GradScaler's first scale overflows in the first steps of many models.
        """
        most = min(_MOST_SKIPPED_STEPS, self._batches.total_steps)
        if self._step.history is None or self._step.steps >= most:
            return False
        self._accumulator.read()
        return self._accumulator.skipped_steps == self._step.steps

    def _end_an_epoch(self) -> None:
        """Train on the smaller last batch of an epoch, and evaluate."""
        batches = self._batches
        self._begin_training()
        # Without a smaller batch, a full one: an evaluation always follows a step, so optimizer state exists.
        has_last_step = batches.has_smaller_batch or self._step.steps
        for part in batches.last_step() if has_last_step else next(batches.full_steps()):
            self._train_on(part)
        self._note_peak_of_training()
        self._evaluate()

    def _begin_training(self) -> None:
        self._phase, self._step.phase = "training", "data"
        self._step.model.train()
        self._device.reset_peak()

    def _note_peak_of_training(self) -> None:
        self._device.synchronize()
        self._train_peak_allocated_bytes = max(self._train_peak_allocated_bytes, self._device.peak().allocated_bytes)

    def _evaluate(self) -> EvalTotals | None:
        """Return loss and metric over the evaluation data of all ranks; None without evaluation data."""
        step = self._step
        self._phase = "evaluation"
        step.model.eval()
        self._group.share_buffers(step.model)
        self._device.reset_peak()
        evaluate = EvalStep(
            step.forward,
            self._workload.loss,
            self._workload.score,
            self._precision,
            step.device,
            channels_last=self._job.channels_last,
        )
        self._evaluation_clock.start()
        for batch in self._batches.evaluation():
            evaluate(*batch)
            self._evaluation_clock.count(batch_length(batch) * self._group.rank.count)
            del batch
        own = evaluate.read()  # waits for the device
        self._evaluation_clock.stop()
        totals = self._mean_over_ranks(own)
        if not totals.samples:
            return None
        self._eval_peak_allocated_bytes = max(self._eval_peak_allocated_bytes, self._device.peak().allocated_bytes)
        return totals

    def _mean_over_ranks(self, own: EvalTotals) -> EvalTotals:
        if self._group.is_alone:
            return own
        loss, metric = (value * own.samples if own.samples else 0.0 for value in (own.loss, own.metric))
        loss, metric, samples = self._group.sum([loss, metric, own.samples])
        if not samples:
            return own
        return EvalTotals(samples=int(samples), loss=loss / samples, metric=metric / samples)

    def _train_on(self, part: Part) -> int:
        """Train on one batch, and return its number of samples over all ranks."""
        input, target = part.batch
        self._step(input, target, share=part.share, update=part.update)
        if self._step.steps == 1 and part.update and part.samples == self._batch_size * self._group.rank.count:
            self._device.note_first_step()
        self._step.phase = "data"
        self._input_wait.step_submitted()
        return part.samples
