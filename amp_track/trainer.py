"""Run a Job in this process: epochs, evaluation, measurements -> Outcome. Streams events; tracks nothing itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from amp_track.data import Batches, Part, batch_length, move
from amp_track.device import Device, peak_resident_bytes
from amp_track.events import EpochEnded, Event, Started, StepsDone
from amp_track.job import Job
from amp_track.outcome import Outcome, ScaleReport, Verdict
from amp_track.precision import Precision, float32_precision
from amp_track.schedule import scaled_learning_rate
from amp_track.step import StepTotals, TrainStep, sum_dtype
from amp_track.workload import Workload

PROBE_STEPS = 2
"""The fewest full steps of a probe. The second takes more than the first even where optimizer state is there already:
16 MB of 323 on a ResNet-18 on a CPU."""
_PROBE_SECONDS, _MOST_PROBE_STEPS = 0.2, 50
"""How long a probe times its full steps, to know samples/s within a few per cent, and how many it takes at most."""
_WARM_UP_STEPS = 3
_PROGRESS_SECONDS = 0.2


@dataclass(frozen=True)
class _Evaluation:
    loss: float
    quality: float


class Trainer:
    """One resolved job on one device. `phase` says what it was doing when an exception came through."""

    def __init__(
        self,
        job: Job,
        workload: Workload,
        device: Device,
        send: Callable[[Event], None],
        *,
        enforce_budget: bool = True,
    ) -> None:
        assert job.batch_size is not None and job.learning_rate is not None, "resolve the job first"
        self._job = job
        self._batch_size = job.batch_size
        self._workload = workload
        self._device = device
        self._send = send
        self._enforce_budget = enforce_budget
        self._precision = Precision.named(job.precision)
        self._step: TrainStep | None = None
        self._phase = "data"
        self._evaluated_samples = 0
        self._evaluation_seconds = 0.0
        self._eval_max_allocated_bytes = 0
        self._max_allocated_bytes = 0

    @property
    def phase(self) -> str:
        return self._step.phase if self._phase == "training" and self._step is not None else self._phase

    def run(self) -> Outcome:
        """Train, evaluate after every epoch, and measure. Exceptions come through as they are."""
        started = time.perf_counter()
        torch.manual_seed(self._job.seed)
        batches = Batches(self._job, self._workload)
        if self._batch_size > batches.training_samples:
            return Outcome(
                verdict=Verdict.OVER_DATASET,
                message=f"batch size {self._batch_size} is above the {batches.training_samples} training samples",
            )
        self._phase = "model"
        self._device.begin(self._job.memory_budget_bytes, enforce=self._enforce_budget)
        with float32_precision(self._precision) as float32_settings:
            learning_rate = scaled_learning_rate(self._job, self._workload.batch_size)
            step = self._build_step(learning_rate)
            self._send(
                Started(settings=(*((f"fp32_precision.{name}", value) for name, value in float32_settings.items()),
                                  ("scaled_learning_rate", str(learning_rate))))
            )  # fmt: skip
            measured = self._probe(step, batches) if self._job.probe else self._train(step, batches)
        self._device.synchronize()
        peak = self._device.peak()
        return Outcome(
            verdict=Verdict.FITS,
            wall_seconds=time.perf_counter() - started,
            max_allocated_bytes=self._max_allocated_bytes,
            max_resident_bytes=peak_resident_bytes(),
            max_memory_bytes=peak.reserved_bytes,
            eval_max_allocated_bytes=self._eval_max_allocated_bytes or None,
            eval_samples_per_second=(
                self._evaluated_samples / self._evaluation_seconds if self._evaluation_seconds else None
            ),
            **measured,
        )

    def _build_step(self, learning_rate: float) -> TrainStep:
        device = self._device.torch_device
        model = self._workload.model()
        if self._job.channels_last:
            model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        else:
            model = model.to(device)
        optimizer = self._workload.optimizer(model.parameters(), learning_rate)
        if self._job.compile:
            _compile_backward_without_autocast()
            model = torch.compile(model)  # type: ignore[assignment]
        self._step = TrainStep(model, optimizer, self._workload.loss, self._precision, clip_norm=self._job.clip_norm)
        return self._step

    def _train(self, step: TrainStep, batches: Batches) -> dict[str, Any]:
        total_steps = batches.total_steps
        clock = _TrainingClock(self._device, min(_WARM_UP_STEPS, total_steps // 3))
        tally = _Tally(step)
        evaluation: _Evaluation | None = None
        last_progress = 0.0
        for epoch, parts in enumerate(batches.epochs(), start=1):
            self._begin_training(step)
            clock.start()
            for part in parts:
                samples, update = self._train_on(step, part), part[2]
                del part  # before the next batch is loaded: two at once are not what fits
                tally.steps += update
                clock.count(samples, tally.steps)
                now = time.perf_counter()
                if update and now - last_progress > _PROGRESS_SECONDS:
                    last_progress = now
                    self._send(StepsDone(step=tally.steps, total_steps=total_steps))
            totals = tally.read()
            clock.stop()
            self._note_peak_of_training()
            evaluation = self._evaluate(step, batches)
            self._send(
                EpochEnded(
                    epoch=epoch,
                    step=tally.steps,
                    train_loss=totals.loss,
                    eval_loss=evaluation.loss if evaluation else None,
                    quality=evaluation.quality if evaluation and not self._job.synthetic else None,
                    scale_changes=totals.scale_changes,
                )
            )
        return tally.measured(clock) | {
            "eval_loss": evaluation.loss if evaluation else None,
            "quality": evaluation.quality if evaluation and not self._job.synthetic else None,
        }

    def _probe(self, step: TrainStep, batches: Batches) -> dict[str, Any]:
        """The training with the middle of its epochs left out, as it stands once it has come through one: the smaller
        last batch and an evaluation leave optimizer state, kernels and workspaces behind, so that the full steps after
        them take the most that the training will. A training of one epoch ends with those two instead."""
        tally = _Tally(step)
        if batches.go_on_after_an_evaluation:
            self._end_of_an_epoch(step, batches, tally)
        clock = self._full_steps(step, batches, tally)
        if not batches.go_on_after_an_evaluation:
            self._end_of_an_epoch(step, batches, tally)
        tally.read()
        return tally.measured(clock)

    def _full_steps(self, step: TrainStep, batches: Batches, tally: _Tally) -> _TrainingClock:
        """At least two, if the training has as many, and as many as time them well."""
        clock = _TrainingClock(self._device, warm_up_steps=1)
        self._begin_training(step)
        clock.start()
        for full_steps, parts in enumerate(batches.full_steps(), start=1):
            samples = sum(self._train_on(step, part) for part in parts)
            tally.steps += 1
            clock.count(samples, full_steps)
            if full_steps >= PROBE_STEPS and (clock.is_over(_PROBE_SECONDS) or full_steps >= _MOST_PROBE_STEPS):
                break
        self._note_peak_of_training()
        clock.stop()
        return clock

    def _end_of_an_epoch(self, step: TrainStep, batches: Batches, tally: _Tally) -> None:
        self._begin_training(step)
        # Where there is no smaller batch, a full one: an evaluation comes after a step, with optimizer state.
        parts = batches.last_step() if batches.has_smaller_batch or tally.steps else next(batches.full_steps())
        for part in parts:
            self._train_on(step, part)
            tally.steps += part[2]
        self._note_peak_of_training()
        self._evaluate(step, batches)

    def _begin_training(self, step: TrainStep) -> None:
        self._phase = "training"
        step.model.train()
        self._device.reset_peak()

    def _note_peak_of_training(self) -> None:
        self._device.synchronize()
        self._max_allocated_bytes = max(self._max_allocated_bytes, self._device.peak().allocated_bytes)

    def _evaluate(self, step: TrainStep, batches: Batches) -> _Evaluation | None:
        """Loss and score over the evaluation data, in an autocast region of its own: autocast caches weights inside one
        region, and those of the training step are stale."""
        self._phase = "evaluation"
        model = step.model
        model.eval()
        self._device.reset_peak()
        self._device.synchronize()
        started = time.perf_counter()
        device = self._device.torch_device
        sums = torch.zeros(2, dtype=sum_dtype(device), device=device)
        samples = 0
        with torch.inference_mode():
            for batch in batches.evaluation():
                samples += self._evaluate_on(model, batch, sums)
                del batch
        if not samples:
            return None
        loss_sum, score_sum = sums.tolist()  # waits for the device
        self._evaluated_samples += samples
        self._evaluation_seconds += time.perf_counter() - started
        self._eval_max_allocated_bytes = max(self._eval_max_allocated_bytes, self._device.peak().allocated_bytes)
        return _Evaluation(loss=loss_sum / samples, quality=score_sum / samples)

    def _train_on(self, step: TrainStep, part: Part) -> int:
        batch, share, update = part
        input, target = self._to_device(batch)
        step(input, target, share=share, update=update)
        return batch_length(input)

    def _evaluate_on(self, model: nn.Module, batch: Any, sums: torch.Tensor) -> int:
        input, target = self._to_device(batch)
        with self._precision.autocast(self._device.torch_device.type):
            output = model(input)
            loss = self._workload.loss(output, target)
        count = batch_length(input)
        sums[0].add_(loss, alpha=count)
        sums[1].add_(self._workload.score(output, target).sum())
        return count

    def _to_device(self, batch: Any) -> tuple[Any, Any]:
        input, target = move(batch, self._device.torch_device, channels_last=self._job.channels_last)
        return input, target


class _Tally:
    """What the step counts, added up over a job. Reading waits for the device."""

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self._history = [(0, step.history.scale)] if step.history is not None else []
        self._skipped_steps = 0
        self._non_finite_losses = 0
        self._loss = 0.0
        self.steps = 0

    def read(self) -> StepTotals:
        """What came since the last reading."""
        totals = self._step.read()
        self._skipped_steps += totals.skipped_steps
        self._non_finite_losses += totals.non_finite_losses
        self._history.extend(totals.scale_changes)
        self._loss = totals.loss
        return totals

    def measured(self, clock: _TrainingClock) -> dict[str, Any]:
        """For the Outcome."""
        scale = None
        if self._step.history is not None:
            final = self._step.history.scale
            if self._history[-1][0] != self.steps:
                self._history.append((self.steps, final))
            scale = ScaleReport(initial=self._history[0][1], final=final, history=tuple(self._history))
        return {
            "train_seconds": clock.seconds,
            "samples_per_second": clock.samples_per_second,
            "train_loss": self._loss,
            "steps": self.steps,
            "skipped_steps": self._skipped_steps,
            "non_finite_losses": self._non_finite_losses,
            "scale": scale,
        }


class _TrainingClock:
    """Seconds of training, and samples per second once warm: the first steps allocate, tune and compile."""

    def __init__(self, device: Device, warm_up_steps: int) -> None:
        self._device = device
        self._warm_up_steps = warm_up_steps
        self._samples = 0
        self._started = 0.0
        self._warm_at: tuple[int, float] | None = (0, 0.0) if warm_up_steps == 0 else None
        self.seconds = 0.0

    def start(self) -> None:
        self._device.synchronize()
        self._started = time.perf_counter()

    def count(self, samples: int, steps_done: int) -> None:
        self._samples += samples
        if self._warm_at is None and steps_done >= self._warm_up_steps:
            self._device.synchronize()  # once per job
            self._warm_at = (self._samples, self.seconds + time.perf_counter() - self._started)

    def is_over(self, seconds: float) -> bool:
        """Whether that long has been timed since the warm-up, by a clock that waits for the device."""
        self._device.synchronize()
        return self._warm_at is not None and time.perf_counter() - self._started - self._warm_at[1] > seconds

    def stop(self) -> None:
        """Call it when the device has nothing left to do."""
        self.seconds += time.perf_counter() - self._started

    @property
    def samples_per_second(self) -> float:
        """After the warm-up; of all there was, where there was no more."""
        cold_samples, cold_seconds = self._warm_at or (0, 0.0)
        if cold_samples == self._samples:
            cold_samples, cold_seconds = 0, 0.0
        return (self._samples - cold_samples) / max(self.seconds - cold_seconds, 1e-9)


def _compile_backward_without_autocast() -> None:
    """torch.compile of a forward under autocast compiles a backward that inherits autocast, which can overflow without
    a word (pytorch#153044). The one place that touches this private setting; without it compile keeps its default."""
    from torch._functorch import config

    config.backward_pass_autocast = "off"
