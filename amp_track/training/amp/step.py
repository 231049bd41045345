"""TrainStep is the AMP-aware optimizer step for every precision.

It never waits for the device between two reads: no `.item()`, no `get_scale()`. (With an optimizer that is not fused,
`GradScaler.step` waits once per step; use a fused one. A diagnosed step waits to time itself.)
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from amp_track.config.precisions import Precision
from amp_track.records.result import LayerGradients
from amp_track.training.amp import random_state
from amp_track.training.amp.diagnosis import GradientDiagnosis
from amp_track.training.amp.learning_rate import LearningRates, Schedule, check_schedule
from amp_track.training.amp.momentum import check_dampening, keep_momentum_written
from amp_track.training.amp.scalar_log import ScalarLog
from amp_track.training.amp.scale_history import ScaleHistory, skips_on_device
from amp_track.training.amp.tensors import batch_length, call, check_loss, move, sum_dtype, sum_of_scores

CAPACITY = 1024
"""Number of batches whose losses fit in the buffer on the device. When it is full, they are fetched without a read."""

_accumulating: weakref.WeakSet[TrainStep] = weakref.WeakSet()
"""Every TrainStep that has accumulated gradients: the others must not clear them before its optimizer step."""
_no_context = nullcontext()


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Totals of the optimizer steps completed since the last read. Steps are numbered from 1 over the training."""

    first_step: int
    step_losses: tuple[float, ...]
    """The mean loss over the samples of each step."""
    step_samples: tuple[int, ...]
    """The number of samples of each step."""
    score_sum: float | None
    """The sum of scores over samples; None if no `score` was given."""
    non_finite_losses: tuple[tuple[int, int], ...]
    """(step, batch within it, from 1) of each loss that was inf or NaN: divergence or a bug, not the overflow that a
    GradScaler handles."""
    skipped_steps: tuple[int, ...]
    """Steps that were skipped because their gradients overflowed."""
    scale_changes: tuple[tuple[int, float], ...]
    """(step, scale after it) for each step that changed the scale."""
    diagnosed: tuple[LayerGradients, ...]
    """The counts of each layer at each diagnosed step."""

    @property
    def steps(self) -> int:
        """The number of optimizer steps."""
        return len(self.step_losses)

    @property
    def samples(self) -> int:
        """The number of samples over all steps."""
        return sum(self.step_samples)

    @property
    def loss(self) -> float:
        """Mean loss over samples; NaN if there are none."""
        losses = zip(self.step_losses, self.step_samples, strict=True)
        return sum(loss * samples for loss, samples in losses) / self.samples if self.samples else math.nan

    @property
    def score(self) -> float | None:
        """Mean score over samples; None without samples, or if no `score` was given."""
        return self.score_sum / self.samples if self.score_sum is not None and self.samples else None


class TrainStep:
    """One training step in any precision: forward, scaled backward, unscale, clip, optimizer step.

        model = Net().cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        step = TrainStep(model, optimizer, cross_entropy, "amp")
        with float32_precision(step.precision):  # without this block, cuDNN may still use TF32 in "fp32" mode
            for epoch in range(epochs):
                for input, target in loader:
                    step(input, target)
                totals = step.read()  # the only wait for the device
                print(totals.loss, totals.skipped_steps, totals.scale_changes)
                torch.save(step.state_dict(), "checkpoint.pt")

    Gradients that another step's backward pass has left in this model, as a generator's does in its discriminator, are
    cleared before the first batch of a step. A step that raises is dropped, with its gradients and losses: the next
    batch starts it again.

    Args:
        model: the model, on its device and in float32; autocast chooses the dtypes.
        optimizer: an optimizer of the model's parameters: fused, foreach or plain. A fused one needs no host sync under
            amp. An optimizer whose step requires a closure, such as LBFGS, is rejected; if it only asserts the closure,
            as the usual SAM does, its first step raises.
        loss: (output, target) -> scalar tensor, the mean over the batch.
        precision: the mode, or its name: fp32, tf32, amp (or fp16), bf16.
        score: (output, target) -> one number per sample, shape (N,), added up on the device beside the loss.
        schedule: number of applied optimizer steps -> factor of the learning rate, 0 or more. Steps that amp skips do
            not count.
        max_grad_norm: the norm to clip gradients to, after unscaling, once per optimizer step.
        channels_last: give the model and four-dimensional inputs that memory order.
        compile: torch.compile the forward pass, with a backward pass without autocast (a setting of the whole process).
        grad_stats_every: N; count overflow and underflow in every layer at every N-th step, see
            `amp_track.training.amp.diagnosis`.
        scaler: the GradScaler for amp, on the parameters' device; by default a new one with torch's default settings.
            Use one for the entire training, and not for another TrainStep.
        data_parallel: average gradients over the ranks of torch.distributed's default group. Losses stay those of this
            rank.

    Raises:
        ValueError: the optimizer has no parameters, needs a closure, or is a fused SGD with dampening under amp; the
            precision does not exist; the scaler belongs to another TrainStep or device; the schedule is not a function,
            or its first factor is not a number, negative, inf or NaN. The optimizer and scaler are not changed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any], Tensor],
        precision: Precision | str,
        *,
        score: Callable[[Any, Any], Tensor] | None = None,
        schedule: Schedule | None = None,
        max_grad_norm: float | None = None,
        channels_last: bool = False,
        compile: bool = False,
        grad_stats_every: int | None = None,
        scaler: GradScaler | None = None,
        data_parallel: bool = False,
    ) -> None:
        self.optimizer = optimizer
        parameters = self._own_parameters()
        if not parameters:
            raise ValueError("The optimizer has no parameters. Give it the model's.")
        _check_needs_no_closure(optimizer)
        self._others = set(model.parameters()).difference(parameters)  # not in the optimizer
        self.device = parameters[0].device
        self.precision = Precision.named(precision)
        self.scaler = scaler or GradScaler(self.device.type, enabled=self.precision.grad_scaler)
        if self.scaler.is_enabled() or self.precision.grad_scaler:
            _check_device(self.scaler, self.device)
        if schedule is not None:
            check_schedule(schedule)
        if is_scaled := self.scaler.is_enabled():
            check_dampening(optimizer)
        self.history = ScaleHistory(self.scaler, optimizer) if is_scaled else None
        # All checks are done: from here on the caller's model and optimizer are changed.
        optimizer.zero_grad()  # timm's Lookahead, whose `step` the history hooks into, calls hooks only from now on
        self.model = model.to(memory_format=torch.channels_last) if channels_last else model
        self.forward = compiled(model) if compile else model
        """The compiled model, or the model."""
        # Gradients stay in their communication buckets (and are zeroed, not freed): otherwise each needs twice the
        # memory.
        self._parallel = DistributedDataParallel(self.forward, gradient_as_bucket_view=True) if data_parallel else None
        if is_scaled:
            keep_momentum_written(optimizer)
        self.diagnosis = (
            GradientDiagnosis(model, grad_stats_every, outputs=not compile) if grad_stats_every is not None else None
        )
        self.steps = 0
        """Optimizer steps attempted since the start of training."""
        self.phase = "model"
        """The current or last phase: `model`, `data`, `forward`, `backward`, `optimizer`."""
        self._loss = loss
        self._score = score
        self._max_grad_norm = max_grad_norm
        self._channels_last = channels_last
        on_device = is_scaled and skips_on_device(optimizer)
        self._rates = (
            LearningRates(optimizer, schedule, on_device=on_device, capacity=CAPACITY) if schedule is not None else None
        )
        self._losses = ScalarLog()
        self._score_sum = torch.zeros((), dtype=sum_dtype(self.device), device=self.device)
        self._unfetched: list[tuple[int, bool]] = []
        self._batches = 0
        """Batches of the incomplete step."""
        self._scores: list[Tensor] = []
        self._is_updating = False
        """True during an optimizer step, and after one that raised."""
        self._clear_fetched()

    def _clear_fetched(self) -> None:
        self._parts: list[tuple[float, int, bool]] = []
        self._scale_changes: list[tuple[int, float]] = []
        self._skipped: list[int] = []

    def __call__(self, input: Any, target: Any, *, share: float = 1.0, update: bool = True) -> Tensor:
        """Train on one batch and return its loss: a scalar, detached, on the device.

        `read` fetches the same tensor later: do not change it in place.

        Args:
            input: the model's input: a tensor, or tuples, lists and mappings of tensors, first dimension N. A mapping
                whose names are all parameters of the model's `forward` is passed as keyword arguments. It is moved to
                the device asynchronously; the host does not wait for copies from pinned memory.
            target: the loss's target, first dimension N.
            share: this batch's fraction of the samples of its optimizer step, if several batches make one step, times
                the number of ranks. With 0 its samples do not count.
            update: make the optimizer step now; False only accumulates gradients.

        Raises:
            TargetFailed, a ValueError too: the loss is not a scalar tensor, the score is not one number per sample, or
                the schedule's factor is not a number, negative, inf or NaN.
        """
        if not self._batches:
            self._begin_step()
        if len(self._unfetched) == CAPACITY:
            self._fetch()
        try:
            return self._train_on(input, target, share=share, update=update)
        except BaseException:
            self.zero_grad()
            raise

    def zero_grad(self) -> None:
        """Drop the gradients and losses of an incomplete step: the next batch starts it again.

        A call that raises does this automatically. Call it if your code fails between the batches of one step.
        """
        unfetched = min(self._batches, len(self._unfetched))
        del self._unfetched[len(self._unfetched) - unfetched :]
        del self._parts[len(self._parts) - (self._batches - unfetched) :]
        self._losses.truncate(len(self._unfetched))
        self._batches = 0
        self._scores = []
        if self.diagnosis is not None:
            self.diagnosis.drop_after(self.steps)
        if self._parallel is None:
            self._free_gradients()

    def _begin_step(self) -> None:
        """Clear the gradients left in the model, except those that another TrainStep accumulates.

        Waits for the device only after a failed optimizer step.
        """
        others = self._others
        if others:
            others = others.difference(*(step._own_parameters() for step in _accumulating if step._batches))
        if self._parallel is None:
            self._free_gradients()
            for parameter in others:
                parameter.grad = None
        else:
            self.optimizer.zero_grad(set_to_none=False)
            for parameter in others:
                if parameter.grad is not None:
                    parameter.grad.zero_()
        if self._is_updating and self.history is not None:
            self.history.reset(self.scaler)
        self._is_updating = False

    def _own_parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _free_gradients(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _train_on(self, input: Any, target: Any, *, share: float, update: bool) -> Tensor:
        diagnosis = self.diagnosis if update and self.diagnosis and self.diagnosis.is_due(self.steps + 1) else None
        sending = self._parallel.no_sync() if self._parallel is not None and not update else _no_context
        with diagnosis.watching() if diagnosis else _no_context, sending:
            loss, samples = self._forward_and_backward(input, target, share)
        if diagnosis:
            diagnosis.look(self.steps + 1)
        self._losses.append(loss)
        self._unfetched.append((samples, update))
        self._batches += 1
        if update:
            self.phase = "optimizer"
            self._update()
        else:
            _accumulating.add(self)
        return loss

    def _forward_and_backward(self, input: Any, target: Any, share: float) -> tuple[Tensor, int]:
        self.phase = "forward"
        input = move(input, self.device, channels_last=self._channels_last)
        target = move(target, self.device, channels_last=self._channels_last)
        with self.precision.autocast(self.device.type):
            output = call(self._parallel or self.forward, input)
            loss = check_loss(self._loss(output, target))
        if self._score is not None and share:
            with torch.no_grad():
                scores = self._score(output, target)
                self._scores.append(sum_of_scores(scores, batch_length(input), self._score_sum.dtype))
        self.phase = "backward"
        self.scaler.scale(loss * share if share != 1.0 else loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), batch_length(input) if share else 0

    def _update(self) -> None:
        if self._rates is not None:
            self._rates.check()
        self._is_updating = True
        if self._max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self._own_parameters(), self._max_grad_norm)
        skipped: Tensor | bool = False
        if self.history is not None:
            skipped = self.history.step(self.scaler, self.optimizer)
        else:
            self.optimizer.step()
        self._is_updating = False
        self.steps += 1
        self._batches = 0
        for score in self._scores:
            self._score_sum.add_(score)
        self._scores = []
        if self._parallel is None:  # otherwise they are zeroed when the next step begins
            self._free_gradients()
        if self._rates is not None:
            self._rates.after_step(skipped)

    def _fetch(self) -> None:
        """Fetch losses and overflows from the device. Waits for the device."""
        fetched = zip(self._losses.fetch(), self._unfetched, strict=True)
        self._parts += [(loss, *part) for loss, part in fetched]
        self._unfetched = []
        if self.history is not None:
            changes = self.history.read()
            self._scale_changes += changes.changes
            self._skipped += changes.skipped_steps
            if self._rates is not None:
                self._rates.set_optimizer_steps(self.history.optimizer_steps)

    def read(self) -> StepTotals:
        """Return the totals of every optimizer step completed since the last read. Waits for the device."""
        self._fetch()
        losses, samples, updates = numpy.array(self._parts, dtype=float).reshape(-1, 3).T
        ends = numpy.flatnonzero(updates) + 1  # of each step
        complete = int(ends[-1]) if len(ends) else 0
        starts = numpy.append(0, ends)[:-1]
        step_samples = numpy.add.reduceat(samples[:complete], starts)
        with numpy.errstate(invalid="ignore", over="ignore"):  # inf and -inf in one step
            loss_sums = numpy.add.reduceat(numpy.where(samples, losses, 0.0)[:complete] * samples[:complete], starts)
        first_step = self.steps - len(ends) + 1
        non_finite = numpy.flatnonzero(~numpy.isfinite(losses[:complete]))
        step_of = numpy.searchsorted(ends, non_finite, side="right")
        totals = StepTotals(
            first_step=first_step,
            step_losses=tuple((loss_sums / numpy.maximum(step_samples, 1)).tolist()),
            step_samples=tuple(step_samples.astype(int).tolist()),
            score_sum=float(self._score_sum) if self._score is not None else None,
            non_finite_losses=tuple(
                zip((first_step + step_of).tolist(), (non_finite - starts[step_of] + 1).tolist(), strict=True)
            ),
            skipped_steps=tuple(self._skipped),
            scale_changes=tuple(self._scale_changes),
            diagnosed=self.diagnosis.read() if self.diagnosis is not None else (),
        )
        of_next_step = self._parts[complete:]
        self._clear_fetched()
        self._parts = of_next_step
        self._score_sum.zero_()
        return totals

    def non_finite_weights(self) -> str:
        """Return the name of the first parameter that holds inf or NaN, or "" if none does. Waits for the device."""
        largest = nn.utils.get_total_norm(self._own_parameters(), norm_type=math.inf)  # keeps NaN
        if math.isfinite(float(largest)):
            return ""
        named = self.model.named_parameters()
        return next((name for name, parameter in named if not bool(torch.isfinite(parameter).all())), "(optimizer)")

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume, in types that `torch.load(weights_only=True)` reads.

        It contains the states of model, optimizer, scaler, schedule and random generators, the counters, and the unread
        totals (except for a diagnosis). Waits for the device.

        Raises:
            ValueError: called between the batches of one optimizer step, whose gradients are not part of the state.
        """
        self._fetch()
        if self._batches:
            raise ValueError(
                "state_dict() was called in the middle of an optimizer step. Call it after the last batch."
            )
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "history": self.history.state_dict() if self.history is not None else {},
            "schedule": self._rates.state_dict() if self._rates is not None else {},
            "steps": self.steps,
            "unread": {
                "parts": self._parts,
                "score_sum": self._score_sum,
                "scale_changes": self._scale_changes,
                "skipped": self._skipped,
            },
            "random": random_state.capture(self.device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state: exact to the bit on a CPU with the same model, optimizer, precision and schedule."""
        self.zero_grad()
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.history is not None:
            self.scaler.load_state_dict(state["scaler"])
            self.history.load_state_dict(state["history"], self.scaler)
        if self._rates is not None:
            self._rates.load_state_dict(state["schedule"])
        self.steps = state["steps"]
        self._losses.clear()
        self._unfetched = []
        unread = state["unread"]
        self._parts = list(unread["parts"])
        self._scale_changes = list(unread["scale_changes"])
        self._skipped = list(unread["skipped"])
        self._score_sum.copy_(unread["score_sum"])
        random_state.restore(state["random"], self.device)


def compiled(model: nn.Module) -> nn.Module:
    """Compile the model with `torch.compile`, with a backward pass that does not inherit the forward's autocast.

    An inherited autocast can overflow silently (pytorch#153044). Only this function uses the private setting for it,
    which applies to the process; if torch removes it, torch.compile keeps its default.
    """
    from torch._functorch import config

    if hasattr(config, "backward_pass_autocast"):
        config.backward_pass_autocast = "off"
    return torch.compile(model)  # type: ignore[return-value]


def _check_needs_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the optimizer's step needs a closure that computes the loss again."""
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()  # the first one is self
    needed = [
        argument.name
        for argument in arguments
        if argument.default is argument.empty and argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
    ]
    if needed:
        raise ValueError(
            f"{type(optimizer).__name__}.step needs {' and '.join(needed)}, but TrainStep computes the loss once per "
            "batch. Use an optimizer whose step needs no closure, such as Adam."
        )


def _check_device(scaler: GradScaler, device: torch.device) -> None:
    """Raise ValueError if the scaler is for another kind of device.

    Relies on a private attribute of GradScaler, which has no public one. If torch renames it, nothing is checked.
    """
    made_for = getattr(scaler, "_device", device.type)
    if torch.device(made_for).type != device.type:
        raise ValueError(
            f"The GradScaler is for {made_for}, but the parameters are on {device.type}. Create it with "
            f'torch.amp.GradScaler("{device.type}").'
        )
