"""Watch a training loop that exists: what its GradScaler did, its speed and memory, in the MLflow run that it has.

Nothing waits for the device until somebody reads. An error of the watch never reaches the training: it is logged once,
and watching stops.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_track.records.errors import summary
from amp_track.records.events import StepsRecorded
from amp_track.records.metrics import NON_FINITE_LOSSES, SCALE, logged_metrics
from amp_track.records.result import JobResult, JobStatus, LayerGradients, NonFiniteLosses, ScaleReport
from amp_track.report import explain as explain_report
from amp_track.report.train import explain
from amp_track.stores import addresses
from amp_track.training.amp.diagnosis import GradientDiagnosis
from amp_track.training.amp.momentum import has_fused_momentum
from amp_track.training.amp.scalar_log import ScalarLog
from amp_track.training.amp.scale_history import ScaleHistory
from amp_track.training.amp.tensors import samples_in
from amp_track.training.devices.cpu import peak_resident_bytes
from amp_track.training.layers import ForwardHook
from amp_track.training.metrics_accumulator import DiagnosisTotals
from amp_track.training.timing import InputWait

if TYPE_CHECKING:
    from amp_track.integrations.out_of_memory import OutOfMemoryWatch
    from amp_track.report.curves import Curves
    from amp_track.results.explain import ExplainResult
    from amp_track.tracking import Run

T = TypeVar("T")
_log = logging.getLogger("amp_track")
_WARM_UP_STEPS = 3
"""Steps before the speed is measured: they allocate, tune and compile."""
_WITHOUT_QUEUE = ("cpu", "mps")
"""Devices on which time is measured by the host: a CPU has no queue, and the events of MPS no time."""
_FUSED_MOMENTUM = (
    "torch's fused SGD with momentum reads uninitialized memory if the GradScaler skips its first step. Leave "
    "fused=True out, or write zeros into its momentum before that step."
)
_FUSED_SHARDED = (
    "With a fused optimizer, ShardedGradScaler checks only the gradients of its own rank (torch 2.14), so ranks skip "
    "different steps. Leave fused=True out."
)
_NEVER_GROWS = (
    "The growth interval was set below the number of steps since the last overflow. GradScaler compares for equality, "
    "so the scale does not grow again before the next overflow."
)


def watch(
    scaler: GradScaler | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None = None,
    *,
    model: nn.Module | None = None,
    run_id: str | None = None,
    tracking_uri: str | None = None,
    log: bool = True,
    log_every_seconds: float = 10.0,
    diagnose_every: int | None = None,
    on_oom: Literal["explain"] | None = None,
    state: Mapping[str, Any] | None = None,
) -> Watch:
    """Watch a training loop, until the end of a `with` block or until `close`.

        with amp_track.watch(scaler, optimizer, model=model) as watched:
            for input, target in loader:
                ...  # as before
                scaler.step(optimizer)
                scaler.update()
        print(watched.skipped_steps, watched.scale_history)

    All arguments are optional. Without a scaler, as in bf16, steps are counted by torch's optimizer hooks.

    Args:
        scaler: the GradScaler of the loop; a disabled one counts as none.
        optimizers: one, several, or several by name. Others that the scaler steps are found by themselves.
        model: the module whose forward passes in training mode are counted for samples/s, by the first dimension of its
            first tensor; evaluations are left out. If it is compiled, give what `torch.compile` returned. If it runs
            several times for each batch, tell the samples to `Watch.step`, which then count instead.
        run_id: the MLflow run to log to. Default: the active run, or else a new one.
        tracking_uri: the store of that run. Default: MLflow's own, if it has been imported, or MLFLOW_TRACKING_URI, or
            the file mlflow.db.
        log: whether to log to MLflow at all; otherwise only the attributes of the Watch tell.
        log_every_seconds: how often the changes of the scale are logged on the way.
        diagnose_every: N; count overflow and underflow of the gradients in every layer of `model` at every N-th step,
            as `train --grad-stats-every` does. A diagnosed step waits for the device.
        on_oom: "explain"; if the training runs out of memory, log what held the memory, the max batch and
            the ways out, as `amp-track explain` does. It needs `model`, and one optimizer to predict the batch. On CUDA
            it records the history of the allocator, and writes a snapshot to the working folder.
        state: what `Watch.state_dict` returned when the checkpoint was saved from which this training resumes.

    Raises:
        ValueError: another watch, TrainStep or ScaleHistory has this scaler; `diagnose_every` or `on_oom` is given
            without a model; or the database has no such run.
    """
    watched = Watch(
        scaler,
        optimizers,
        model=model,
        log_every_seconds=log_every_seconds,
        diagnose_every=diagnose_every,
        on_oom=on_oom,
        state=state or {},
    )
    if log and _is_first_rank():
        watched.log_to(run_id, tracking_uri)
    return watched


def _safely(method: Callable[..., None]) -> Callable[..., None]:
    """Log the first error of a method of Watch, and stop watching, instead of failing the training."""

    @functools.wraps(method)
    def safe(self: Watch, *args: Any, **kwargs: Any) -> None:
        if self.is_watching:
            try:
                method(self, *args, **kwargs)
            except Exception as error:
                self.stop(error)

    return safe


class Watch:
    """A training that is watched. `watch` makes it."""

    def __init__(
        self,
        scaler: GradScaler | None,
        optimizers: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None,
        *,
        model: nn.Module | None,
        log_every_seconds: float,
        diagnose_every: int | None,
        on_oom: Literal["explain"] | None,
        state: Mapping[str, Any],
    ) -> None:
        if diagnose_every is not None and model is None:
            raise ValueError("diagnose_every needs the model whose layers to diagnose. Give model=.")
        if on_oom not in ("explain", None):
            raise ValueError(f"on_oom: got {on_oom!r}, expected 'explain' or None.")
        if on_oom is not None and model is None:
            raise ValueError("on_oom needs the model whose memory to explain. Give model=.")
        self.is_watching = True
        """False after `close`, and after an error of the watch itself."""
        self.explanation: ExplainResult | None = None
        """With on_oom="explain": the explanation of the error, after `close`."""
        named = _named(optimizers)
        parameters = [each for one in named.values() for group in one.param_groups for each in group["params"]]
        parameters += model.parameters() if model is not None else []
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.device = parameters[0].device if parameters else accelerator or torch.device("cpu")
        self._first_step: int = state.get("steps", 0)
        self._changes: list[tuple[int, float]] = [(step, scale) for step, scale in state.get("changes", [])]
        self._skipped: list[int] = list(state.get("skipped_steps", []))
        self._skipped_by: dict[str, list[int]] = {
            name: list(steps) for name, steps in state.get("skipped_by", {}).items()
        }
        self._logged = len(self._changes)
        self._calls: Counter[int] = Counter()
        self._losses = ScalarLog()
        self._loss_steps: list[int] = []
        self._non_finite: list[int] = []
        self._has_loss = self._is_told_samples = False
        self._samples, self._marks, self._previous = 0, 0, 0
        self._spans: list[tuple[Any, Any]] = []
        self._open: Any = None
        self._last: Any = None
        self._wait = InputWait(self.device if self.device.type not in _WITHOUT_QUEUE else None)
        self._began = self._last_logged = time.perf_counter()
        self._log_every_seconds = log_every_seconds
        self._stack = ExitStack()
        self._logged_to: tuple[Run, Curves] | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._result: JobResult | None = None
        self._diagnosis = (
            GradientDiagnosis(model, diagnose_every, outputs=not hasattr(model, "_orig_mod"))  # unless compiled
            if model is not None and diagnose_every is not None
            else None
        )
        self._diagnosed = DiagnosisTotals()
        self._looks: tuple[LayerGradients, ...] = ()
        self._looking: ExitStack | None = None
        """Open from the start of a step that is diagnosed until its gradients are unscaled."""
        self._own = {id(parameter) for parameter in model.parameters()} if model is not None else set()
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        stepped, look = _weakly(self._stepped), _weakly(self._look)
        self._history = (
            ScaleHistory(self._scaler, named, on_error=_weakly(self.stop), before_step=look)
            if self._scaler is not None
            else None
        )
        if self._history is not None and not self._changes:
            self._changes = [(self._first_step, self._history.scale)]
        self._has_fused_momentum = self._scaler is not None and any(map(has_fused_momentum, named.values()))
        if self._has_fused_momentum:
            _log.warning("%s", _FUSED_MOMENTUM)
        is_fused = any(getattr(each, "_step_supports_amp_scaling", False) for each in named.values())
        if is_fused and "ShardedGradScaler" in [kind.__name__ for kind in type(self._scaler).__mro__]:
            _log.warning("%s", _FUSED_SHARDED)
        self._hooks: list[Any] = [one.register_step_post_hook(stepped) for one in named.values()]
        self._hooks = self._hooks or [register_optimizer_step_post_hook(stepped)]
        if self._diagnosis is not None and self._scaler is None:
            self._hooks.append(register_optimizer_step_pre_hook(look))
        if model is not None:
            self._hooks.append(model.register_forward_pre_hook(_ForwardHook(self), with_kwargs=True))
        self._out_of_memory: OutOfMemoryWatch | None = None
        if on_oom is not None and model is not None:
            self._out_of_memory = _out_of_memory_watch(model, named, self.device)
        weakref.finalize(self, _remove, self._hooks)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    def log_to(self, run_id: str | None = None, tracking_uri: str | None = None) -> None:
        """Log to an MLflow run: the given one, the active one, or else a new one. A failure is only logged."""
        try:
            self._stack.enter_context(self._logging(run_id, tracking_uri))
        except _NoSuchRun:
            self.discard()
            raise
        except Exception as error:
            self._stop_logging(error)

    def _stop_logging(self, error: Exception) -> None:
        """Go on without MLflow."""
        if self._logged_to is not None or self._writer is None:
            _log.warning("amp_track.watch does not log to MLflow any more: %s", summary(error))
        self._logged_to = None

    @contextmanager
    def _logging(self, run_id: str | None, tracking_uri: str | None) -> Iterator[None]:
        from amp_track.session.publish import kept_curves
        from amp_track.tracking import Tracker

        mlflow = sys.modules.get("mlflow")
        if run_id is None and mlflow is not None and (active := mlflow.active_run()) is not None:
            run_id = active.info.run_id
        if tracking_uri is None and mlflow is not None:
            tracking_uri = mlflow.get_tracking_uri()
        address = addresses.tracking_address(tracking_uri)
        if address.kind not in ("sqlite", "http", "server"):
            raise ValueError(f"it needs a database or a tracking server, not {address.url}; set tracking_uri")
        tracker = Tracker(address.url, outbox_folder=address.outbox_folder, resumes=run_id is not None)
        if run_id is not None and address.kind == "sqlite" and not tracker.exists(run_id):
            raise _NoSuchRun(f"run_id: got {run_id!r}, expected a run in {address.url}")
        tags = {"amp_track.kind": "watch"}
        with tracker.attached_run(run_id) if run_id is not None else tracker.run("watched training", tags=tags) as run:
            run.tags(tags)
            with (
                kept_curves(run, "watched training", "", steps_per_epoch=1) as curves,
                ThreadPoolExecutor(1, "amp_track watch") as self._writer,  # a busy database must not delay the training
            ):
                curves.add(StepsRecorded(first_step=1, losses=(), scale_changes=tuple(self._changes[: self._logged])))
                self._logged_to = run, curves
                self._log_changes()
                self._began = time.perf_counter()  # opening the store is no part of the training
                yield

    @property
    def run_id(self) -> str | None:
        """The id of the MLflow run, if it logs to one."""
        return self._logged_to[0].run_id if self._logged_to is not None else None

    @property
    def scale_history(self) -> tuple[tuple[int, float], ...]:
        """(step, scale after it): first, and every change. Waits for the device."""
        self._read()
        return tuple(self._changes)

    @property
    def skipped_steps(self) -> tuple[int, ...]:
        """The steps at which an optimizer was skipped, counted from 1. Waits for the device."""
        self._read()
        return tuple(self._skipped)

    @property
    def skipped_by(self) -> dict[str, tuple[int, ...]]:
        """The skipped steps of each optimizer by its name. Waits for the device."""
        self._read()
        return {name: tuple(steps) for name, steps in self._skipped_by.items()}

    @property
    def steps(self) -> int:
        """Updates of the scaler; without one, the steps of the optimizer that has made the most."""
        own = self._history.updates if self._history is not None else max(self._calls.values(), default=0)
        return self._first_step + own

    def was_skipped(self) -> bool:
        """Return whether the last step of any optimizer was skipped. Waits for the device.

        False where nothing is known: without a scaler, and after an error of the watch.
        """
        return self.is_watching and self._history is not None and self._history.was_skipped()

    def applied_steps(self) -> Tensor | int:
        """Return the number of updates without an overflow since watching began.

        With a scaler, it is a tensor on the device, which counts on. The first call waits for the device, later ones do
        not.
        """
        return self._history.applied_steps() if self._history is not None else self.steps - self._first_step

    def state_dict(self) -> dict[str, Any]:
        """Return the history, for a checkpoint. Waits for the device."""
        self._read()
        return {
            "steps": self.steps,
            "changes": self._changes,
            "skipped_steps": self._skipped,
            "skipped_by": self._skipped_by,
        }

    @_safely
    def step(self, samples: int = 0, *, loss: Tensor | None = None) -> None:
        """Tell that a batch was trained on: its samples, for samples/s, and its loss, of which inf and NaN are counted.

        Call it after the optimizer step. The loss must not be changed in place afterwards.
        """
        if loss is not None:
            self._has_loss = True
            self._losses.append(loss.detach())
            self._loss_steps.append(self.steps)
        if samples:
            if not self._is_told_samples:  # what the forward passes have counted does not count
                self._is_told_samples, self._samples, self._marks, self._spans = True, 0, 0, []
                self._open = self._last = None
            self._mark(samples)
        self._log_now_and_then()

    def pause(self) -> None:
        """Leave out of samples/s what follows, such as an evaluation, until the next training batch."""
        if self._open is not None and self._last is not None:
            self._spans.append((self._open, self._last))
        self._open = self._last = None

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Return an iterator over the same batches that measures how long the device waits for them."""
        return self._wait.timed(iter(loader))

    def result(self) -> JobResult:
        """Return the measurements so far. Waits for the device."""
        if self._result is not None:
            return self._result
        self._read()
        self.pause()
        seconds = sum(_seconds_between(start, end) for start, end in self._spans)
        wall_seconds = time.perf_counter() - self._began
        allocated_bytes, reserved_bytes = _peaks(self.device)
        scale = None
        if self._history is not None:
            scale = ScaleReport.after(self.steps, self._changes, self._history.scale)
        return JobResult(
            status=JobStatus.FITS,
            steps=self.steps,
            skipped_steps=len(self._skipped),
            wall_seconds=wall_seconds,
            train_seconds=wall_seconds,
            waited_seconds=self._wait.seconds or None,
            samples_per_second=self._samples / seconds if seconds else None,
            train_peak_allocated_bytes=allocated_bytes,
            peak_bytes=reserved_bytes,
            peak_resident_bytes=peak_resident_bytes(),
            non_finite_losses=self._non_finite_losses(),
            scale=scale,
            diagnosis=self._diagnosed.diagnosis(self._diagnosis),
        )

    def advice(self) -> list[str]:
        """Return one line for each finding, such as why the scale fell. Waits for the device."""
        result = self.result()
        lines = [_FUSED_MOMENTUM] if self._has_fused_momentum and self._skipped[:1] == [self._first_step + 1] else []
        if self._history is not None and self._history.never_grows:
            lines.append(_NEVER_GROWS)
        return lines + explain(result, "amp" if self._scaler is not None else "fp32")

    def close(self, error: BaseException | None = None) -> JobResult:
        """Stop watching, log what is left, and return the measurements. Waits for the device.

        Args:
            error: the exception that ended the training, if any: a run that the watch has made ends as FAILED.
        """
        if self._result is not None:
            return self._result
        result = JobResult(status=JobStatus.FITS)
        self._explain(error)
        try:
            result = self.result()
            self._log_result(result)
        except Exception as failure:  # such as that of a device on which the training has failed
            self.stop(failure)
        self._result = result
        self._detach()
        self.is_watching = False
        try:
            self._stack.__exit__(type(error) if error else None, error, None)
        except Exception as failure:
            _log.warning("amp_track.watch could not log its result: %s", summary(failure))
        return result

    def _explain(self, error: BaseException | None) -> None:
        """Log the explanation of an out-of-memory error."""
        _remove(self._hooks)  # the plan steps optimizers, too
        try:
            if self._out_of_memory is None or (found := self._out_of_memory.explanation(error)) is None:
                return
            self.explanation = found
            _log.warning("%s", explain_report.text(found))
        except Exception as failure:
            _log.warning("amp_track.watch could not explain the out-of-memory error: %s", summary(failure))

    def discard(self) -> None:
        """Stop watching without logging a result: the training starts again."""
        self.is_watching = False
        self._detach()
        self._stack.close()

    def stop(self, error: Exception) -> None:
        """Stop watching because of an error of the watch itself. The training goes on."""
        if self.is_watching:
            self.is_watching = False
            self._detach()
            _log.warning("amp_track.watch has stopped, the training goes on: %s", summary(error))

    def _detach(self) -> None:
        if self._looking is not None:
            self._looking.close()
        _remove(self._hooks)
        if self._out_of_memory is not None:
            self._out_of_memory.close()
            self._out_of_memory = None  # it holds the model
        if self._history is not None and self._scaler is not None:
            self._history.close(self._scaler)

    @_safely
    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._calls[id(optimizer)] += 1
        if self._out_of_memory is not None:
            self._out_of_memory.updated(optimizer)
        self._wait.step_submitted()
        self._log_now_and_then()

    @_safely
    def begin_batch(self, *args: Any, method: str) -> None:
        """Tell that this method of the model makes the next forward pass, with these arguments."""
        if self._out_of_memory is not None:
            self._out_of_memory.began(args, {}, method=method, step=self.steps)

    @_safely
    def begin_step(self) -> None:
        """Begin the diagnosis of the next step, if it is due. The forward pass of the watched model does it, too."""
        if self._diagnosis is not None and self._looking is None and self._diagnosis.is_due(self.steps + 1):
            self._looking = ExitStack()
            self._looking.enter_context(self._diagnosis.watching())

    @_safely
    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training:
            self.pause()
            if self._out_of_memory is not None:
                self._out_of_memory.left()
        if not module.training or not torch.is_grad_enabled() or getattr(module, "_is_replica", False):
            return
        self.begin_step()
        if self._out_of_memory is not None:
            self._out_of_memory.began(args, kwargs, step=self.steps)
        if self._is_told_samples:
            return
        self._mark(self._previous)
        self._previous = samples_in((args, kwargs))

    @_safely
    def _look(self, optimizer: Optimizer, *_: Any) -> None:
        """Count the gradients of a step that is diagnosed, before they are unscaled."""
        if self._looking is None or self._diagnosis is None:
            return
        if any(id(parameter) in self._own for group in optimizer.param_groups for parameter in group["params"]):
            self._looking.close()
            self._looking = None
            self._diagnosis.look(self.steps + 1)

    def _mark(self, samples: int) -> None:
        """Note that `samples` were trained on since the last mark: the spans between marks are the training."""
        self._marks += 1
        if self._open is not None:
            self._samples += samples
            self._last = _now(self.device, self._last)
        elif self._marks > _WARM_UP_STEPS:
            self._open = _now(self.device)

    def _read(self, *, wait: bool = True) -> None:
        if self._history is not None:
            found = self._history.read(wait=wait)
            self._changes += [(self._first_step + step, scale) for step, scale in found.changes]
            self._skipped += [self._first_step + step for step in found.skipped_steps]
            for name, skipped in found.skipped_by.items():
                self._skipped_by.setdefault(name, []).extend(self._first_step + step for step in skipped)
        if self._diagnosis is not None and wait:
            looks = self._diagnosis.read()
            self._diagnosed.add(looks)
            self._looks += looks
        losses = self._losses.fetch(wait=wait)
        steps, self._loss_steps = self._loss_steps[: len(losses)], self._loss_steps[len(losses) :]
        self._non_finite += [step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)]

    def _non_finite_losses(self) -> NonFiniteLosses | None:
        if not self._non_finite:
            return None
        return NonFiniteLosses(batches=len(self._non_finite), first_step=self._non_finite[0], first_batch=1)

    def _log_now_and_then(self) -> None:
        now = time.perf_counter()
        if now - self._last_logged > self._log_every_seconds:
            self._last_logged = now
            self._read(wait=False)
            self._log_changes()

    def _log_changes(self) -> None:
        """Let the writer's thread log the changes that have arrived."""
        if self._logged_to is None or self._writer is None:
            return
        changes, self._logged = tuple(self._changes[self._logged :]), len(self._changes)

        def write(run: Run, curves: Curves) -> None:
            try:
                for step, scale in changes:
                    run.metric(SCALE, scale, step)
                curves.add(StepsRecorded(first_step=1, losses=(), scale_changes=changes))
                run.flush()
            except Exception as error:
                self._stop_logging(error)

        self._writer.submit(write, *self._logged_to)

    def _log_result(self, result: JobResult) -> None:
        self._log_changes()
        if self._writer is not None:
            self._writer.shutdown(wait=True)
        if self._logged_to is None:
            return
        run, curves = self._logged_to
        if result.scale is not None and self._changes[-1][0] != result.steps:
            run.metric(SCALE, result.scale.final, result.steps)
            curves.add(StepsRecorded(first_step=1, losses=(), scale_changes=((result.steps, result.scale.final),)))
        for name, value in logged_metrics(result).items():
            if name != NON_FINITE_LOSSES or self._has_loss:
                run.metric(name, value)
        if self._history is not None and len(self._history.names) > 1:
            for name in self._history.names:
                run.metric(f"amp/skipped_steps/{name}", len(self._skipped_by.get(name, ())))
        if self._looks:
            run.event(StepsRecorded(first_step=1, losses=(), diagnosed=self._looks), "")
            run.diagnosed()
        if self.explanation is not None:
            run.text("out-of-memory.txt", explain_report.text(self.explanation))
        if advice := self.advice():
            run.tags({"amp_track.advice": "\n".join(advice)})


def _out_of_memory_watch(
    model: nn.Module, optimizers: Mapping[str, Optimizer], device: torch.device
) -> OutOfMemoryWatch | None:
    """Return what explains an out-of-memory error. Warn and return None if the device or torch does not support it."""
    if device.type not in ("cpu", "cuda"):
        _log.warning("amp_track.watch cannot explain an out-of-memory error on %s, only on CUDA and CPUs.", device.type)
        return None
    from amp_track.integrations.out_of_memory import OutOfMemoryWatch  # seldom needed

    try:
        return OutOfMemoryWatch(model, optimizers, device)
    except Exception as error:  # such as that of an allocator without a history
        _log.warning("amp_track.watch cannot explain an out-of-memory error here: %s", summary(error))
        return None


class _NoSuchRun(ValueError):
    """The given run is not in the database."""


def _weakly(method: Any) -> Callable[..., None]:
    """Return a function that calls a bound method as long as its object lives."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if (alive := weak()) is not None:
            alive(*arguments)

    return call


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


class _ForwardHook(ForwardHook):
    """Tells a Watch of each forward pass, unless it was compiled before. It does not keep the Watch alive."""

    def __init__(self, watch: Watch) -> None:
        self._watch = weakref.ref(watch)

    def run(self, module: nn.Module, *arguments: Any) -> None:
        if (watch := self._watch()) is not None:
            watch._forward(module, *arguments)


def _named(optimizers: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None) -> dict[str, Optimizer]:
    """Return torch's optimizers by name, without the wrappers of accelerate and Lightning."""
    if not isinstance(optimizers, Mapping):
        listed = [] if optimizers is None else list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
        names = ["optimizer"] if len(listed) == 1 else [f"optimizer{index}" for index in range(len(listed))]
        optimizers = dict(zip(names, listed, strict=True))
    named = {name: _without_wrapper(each) for name, each in optimizers.items()}
    if strange := [type(each).__name__ for each in named.values() if not isinstance(each, Optimizer)]:
        _log.warning("amp_track.watch does not watch %s, which is no torch.optim.Optimizer.", ", ".join(strange))
    return {name: each for name, each in named.items() if isinstance(each, Optimizer)}


def _without_wrapper(optimizer: Any) -> Any:
    while type(optimizer).__name__ in ("AcceleratedOptimizer", "LightningOptimizer", "DeepSpeedOptimizerWrapper"):
        optimizer = optimizer.optimizer
    return optimizer


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _now(device: torch.device, event: Any = None) -> Any:
    """Return the time on the device: an event, `event` again if given, or seconds where there is no queue."""
    if device.type in _WITHOUT_QUEUE:
        return time.perf_counter()
    event = event or torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def _seconds_between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end) - start
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _peaks(device: torch.device) -> tuple[int | None, int | None]:
    """Return the peaks of allocated and reserved bytes of this process; None on a CPU. They may come from before."""
    if device.type in _WITHOUT_QUEUE:
        return None, None
    return torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(device)
