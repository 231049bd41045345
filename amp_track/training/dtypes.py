"""Record the dtype of each operation in one batch's forward pass, loss and backward pass.

An operation that is not on autocast's lists runs in the dtype of its inputs. Batch norm is one, on CPUs and GPUs: after
a float16 convolution it returns float16, while its weights and running statistics stay float32. Softmax and the losses
are on the lists, and run in float32.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from amp_track.config.job import Job
from amp_track.config.precisions import Precision
from amp_track.records.dtypes import CAST, LOSS, DtypesReport, OperationDtypes
from amp_track.records.result import MODEL
from amp_track.training.amp import random_state
from amp_track.training.amp.precision import float32_precision
from amp_track.training.amp.tensors import call, check_loss, move, tensors
from amp_track.training.data import example_batch
from amp_track.training.devices.base import Device
from amp_track.training.layers import LayerWatch, running_node_number
from amp_track.workload import Workload, new_model

_COPIES = {"_to_copy", "copy_"}
"""Operations that are casts if they change the dtype; otherwise they move a tensor or reorder its memory."""
_BOOKKEEPING = {
    "_reshape_alias", "_unsafe_view", "clone", "lift", "lift_fresh", "resize_", "select_backward", "set_",
    "slice_backward",
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like",
    "rand_like", "randn_like", "zeros_like", "fill_", "zero_",
}  # fmt: skip
"""Operations that compute nothing from the values of their inputs."""

_IMPLEMENTATION_PREFIX = re.compile(r"^_*((native|cudnn|miopen|mkldnn|mps|thnn|safe|unsafe)_)*")
_ATTENTION = re.compile(r"^scaled_dot_product_(\w+_)?attention\w*?(?=(_backward)?$)")


class DtypesWatch:
    """Records the dtypes of one batch of a resolved job."""

    def __init__(self, job: Job, workload: Workload, device: Device) -> None:
        self._job, self._workload, self._device = job, workload, device
        self.phase = "data"
        """The current phase, or the phase in which an exception was raised: data, model, forward, loss or backward."""

    def run(self) -> DtypesReport:
        """Record one batch of `workload.example` in training mode. Exceptions pass through unchanged.

        The loss is not scaled before its backward pass: scaling changes values, not dtypes.
        """
        job, workload, device = self._job, self._workload, self._device
        assert job.batch_size is not None, "resolve the job first"
        random_state.seed(job.seed)
        batch = example_batch(workload, job.batch_size)
        self.phase = "model"
        precision = Precision.named(job.precision)
        model = precision.prepare(new_model(workload)).train().to(device.torch_device)
        if job.channels_last:
            model = model.to(memory_format=torch.channels_last)
        input, target = move(batch, device.torch_device, channels_last=job.channels_last)
        layers = LayerWatch(model)
        recorder = _Recorder(model, layers)
        with float32_precision(precision), layers.watching(), recorder:
            with precision.autocast(device.kind):
                self.phase = recorder.in_pass
                output = call(model, input)
                self.phase = recorder.in_pass = "loss"
                layers.outside_of_layers(LOSS)
                loss = check_loss(workload.loss(output, target))
            self.phase = recorder.in_pass = "backward"
            layers.outside_of_layers(MODEL)
            loss.backward()  # type: ignore[no-untyped-call]
        return DtypesReport(
            workload=job.workload,
            precision=job.precision,
            batch_size=job.batch_size,
            hardware=device.hardware(),
            operations=tuple(dataclasses.replace(one, count=count) for one, count in recorder.counts.items()),
        )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every operation that runs while the mode is active, with its layer and dtypes.

    This includes operations that autocast and autograd add, and the backward pass, on any thread. Code compiled with
    `torch.compile` runs uncompiled. Relies on `TorchDispatchMode` and on attributes of `OpOverload`.
    """

    def __init__(self, model: nn.Module, layers: LayerWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_pass = "forward"
        self.counts: Counter[OperationDtypes] = Counter()
        self._layers = layers
        self._parameters = {id(parameter): name.rpartition(".")[2] for name, parameter in model.named_parameters()}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and torch.Tag.inplace_view not in func.tags:
            self._record(func.overloadpacket.__name__, list(tensors((args, kwargs))), list(tensors(result)))
        return result

    def _record(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Count an operation by its aten name, except one that computes nothing in floating point."""
        dtypes, of_outputs = _floating_dtypes(inputs), _floating_dtypes(outputs)
        if name in _BOOKKEEPING or not dtypes or not of_outputs:
            return
        is_copy = name in _COPIES
        if is_copy:
            dtypes = _floating_dtypes(inputs[-1:])  # copy_(destination, source): the last is the source
            if dtypes in ((), of_outputs[:1]):
                return
        one = OperationDtypes(
            layer=self._layers.layer(),
            in_pass="backward" if running_node_number() is not None else self.in_pass,
            operation=CAST if is_copy else readable_name(name),
            parameter=self._parameters.get(id(inputs[-1]), "") if is_copy else "",
            inputs=dtypes,
            output=of_outputs[0],
        )
        self.counts[one] += 1


def _floating_dtypes(values: list[Tensor]) -> tuple[str, ...]:
    floating = (value for value in values if value.is_floating_point() or value.is_complex())
    return tuple(str(value.dtype).removeprefix("torch.") for value in floating)


def readable_name(name: str) -> str:
    """Return an aten operation's name without its implementation: `cudnn_batch_norm` becomes `batch_norm`."""
    name = _IMPLEMENTATION_PREFIX.sub("", name).replace("_backward_data", "_backward").removesuffix("_forward")
    return _ATTENTION.sub("scaled_dot_product_attention", name)
