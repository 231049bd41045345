"""EvalStep computes loss and metric over evaluation batches, in the precision of the training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amp_track.config.precisions import Precision
from amp_track.training.amp.tensors import batch_length, call, check_loss, move, sum_dtype, sum_of_scores


@dataclass(frozen=True, kw_only=True)
class EvalTotals:
    """Mean loss and metric over evaluation samples; NaN without samples."""

    samples: int
    loss: float
    metric: float


class EvalStep:
    """Adds up loss and score on the device, batch by batch; `read` fetches their means.

    Each batch has a separate autocast region: autocast caches weights within a region, and those of a training step are
    stale.

    Args:
        model: the model, on its device. Call its `eval()` before.
        loss: (output, target) -> scalar tensor, the mean over the batch.
        score: (output, target) -> one number per sample, shape (N,).
        precision: the mode of the training, or its name: fp32, tf32, amp (or fp16), bf16.
        device: the model's device, or its name.
        channels_last: give four-dimensional inputs that memory order.

    Raises:
        ValueError: the precision does not exist.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        score: Callable[[Any, Any], Tensor],
        precision: Precision | str,
        device: torch.device | str,
        *,
        channels_last: bool = False,
    ) -> None:
        self._model = model
        self._loss = loss
        self._score = score
        self._precision = Precision.named(precision)
        self._device = torch.device(device)
        self._channels_last = channels_last
        self._loss_sum, self._score_sum = torch.zeros(2, dtype=sum_dtype(self._device), device=self._device).unbind()
        self._samples = 0

    @torch.inference_mode()
    def __call__(self, input: Any, target: Any) -> None:
        """Evaluate one batch, first dimension N.

        Raises:
            TargetFailed, a ValueError too: the loss is not a scalar tensor, or the score is not one number per sample.
        """
        input = move(input, self._device, channels_last=self._channels_last)
        target = move(target, self._device, channels_last=self._channels_last)
        with self._precision.autocast(self._device.type):
            output = call(self._model, input)
            loss = check_loss(self._loss(output, target))
        count = batch_length(input)
        score_sum = sum_of_scores(self._score(output, target), count, self._score_sum.dtype)
        self._loss_sum.add_(loss, alpha=count)
        self._score_sum.add_(score_sum)
        self._samples += count

    def read(self) -> EvalTotals:
        """Return the means since the last read. Waits for the device."""
        loss_sum, score_sum = torch.stack([self._loss_sum, self._score_sum]).tolist()
        samples, self._samples = self._samples, 0
        self._loss_sum.zero_()
        self._score_sum.zero_()
        if not samples:
            return EvalTotals(samples=0, loss=math.nan, metric=math.nan)
        return EvalTotals(samples=samples, loss=loss_sum / samples, metric=score_sum / samples)
