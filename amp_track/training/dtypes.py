"""Record the dtype of each operation in one batch's forward pass, loss and backward pass.

An operation that is not on autocast's lists runs in the dtype of its inputs. Batch norm is one, on CPUs and GPUs: after
a float16 convolution it returns float16, while its weights and running statistics stay float32. Softmax and the losses
are on the lists, and run in float32.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from amp_track.config.job import Job
from amp_track.config.precisions import Precision
from amp_track.records.diagnosis import MODEL
from amp_track.records.dtypes import CAST, LOSS, DtypesReport, OperationDtypes
from amp_track.training.amp import random_state
from amp_track.training.amp.precision import float32_precision
from amp_track.training.amp.tensors import check_loss, move
from amp_track.training.devices.base import Device
from amp_track.training.layers import LayerWatch, Operation, running_node_number, watching_operations
from amp_track.workload import Workload, example_batch, new_model

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
        self._phase = "data"
        self._recorder: _Recorder | None = None

    @property
    def phase(self) -> str:
        """The current phase, or the phase in which an exception was raised: data, model, forward, loss or backward."""
        return self._recorder.in_pass if self._recorder is not None else self._phase

    def run(self) -> DtypesReport:
        """Record one batch of `workload.example` in training mode. Exceptions pass through unchanged.

        The loss is not scaled before its backward pass: scaling changes values, not dtypes.
        """
        job, workload, device = self._job, self._workload, self._device
        assert job.batch_size is not None, "resolve the job first"
        random_state.seed(job.seed)
        batch = example_batch(workload, job.batch_size)
        self._phase = "model"
        precision = Precision.named(job.precision)
        model = precision.prepare(new_model(workload)).train().to(device.torch_device)
        if job.channels_last:
            model = model.to(memory_format=torch.channels_last)
        input, target = move(batch, device.torch_device, channels_last=job.channels_last)
        self._recorder = _Recorder(model)
        with float32_precision(precision), self._recorder.recording():
            with precision.autocast(device.kind):
                output = model(input)
                self._recorder.begin("loss")
                loss = check_loss(workload.loss(output, target))
            self._recorder.begin("backward")
            loss.backward()  # type: ignore[no-untyped-call]
        return DtypesReport(
            workload=job.workload,
            precision=job.precision,
            batch_size=job.batch_size,
            hardware=device.hardware(),
            operations=self._recorder.operations,
        )


class _Recorder:
    """Counts every operation, with its layer and dtypes."""

    def __init__(self, model: nn.Module) -> None:
        self.in_pass = "forward"
        self._layers = LayerWatch(model)
        self._parameters = {id(parameter): name.rpartition(".")[2] for name, parameter in model.named_parameters()}
        self._counts: Counter[OperationDtypes] = Counter()

    @property
    def operations(self) -> tuple[OperationDtypes, ...]:
        """Every distinct operation, with its count."""
        return tuple(dataclasses.replace(one, count=count) for one, count in self._counts.items())

    def begin(self, in_pass: str) -> None:
        """Begin the next pass: `loss` or `backward`."""
        self.in_pass = in_pass
        self._layers.outside_of_layers(LOSS if in_pass == "loss" else MODEL)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record every operation that runs within the block."""
        with self._layers.watching(), watching_operations(self._record):
            yield

    def _record(self, operation: Operation) -> None:
        dtypes = _dtypes_of(operation)
        if dtypes is None:
            return
        name, inputs, output = dtypes
        in_backward = running_node_number() is not None
        one = OperationDtypes(
            layer=self._layers.layer(),
            in_pass="backward" if in_backward else self.in_pass,
            operation=name,
            parameter=self._parameters.get(id(operation.inputs[-1]), "") if name == CAST else "",
            inputs=inputs,
            output=output,
        )
        self._counts[one] += 1


def _dtypes_of(operation: Operation) -> tuple[str, tuple[str, ...], str] | None:
    """Return an operation's name, its floating-point inputs' dtypes and its result's dtype.

    None if it computes nothing in floating point.
    """
    inputs, outputs = _floating_dtypes(operation.inputs), _floating_dtypes(operation.outputs)
    if operation.is_view or operation.name in _BOOKKEEPING or not inputs or not outputs:
        return None
    if operation.name not in _COPIES:
        return readable_name(operation.name), inputs, outputs[0]
    source = _floating_dtypes(operation.inputs[-1:])  # copy_(destination, source): the last is the source
    return (CAST, source, outputs[0]) if source and source[0] != outputs[0] else None


def _floating_dtypes(tensors: tuple[Tensor, ...]) -> tuple[str, ...]:
    return tuple(
        str(tensor.dtype).removeprefix("torch.")
        for tensor in tensors
        if tensor.is_floating_point() or tensor.is_complex()
    )


def readable_name(name: str) -> str:
    """Return an aten operation's name without the parts that name its implementation.

    `native_batch_norm` and `cudnn_batch_norm` become `batch_norm`, `_log_softmax_backward_data` becomes
    `log_softmax_backward`.
    """
    name = _IMPLEMENTATION_PREFIX.sub("", name).replace("_backward_data", "_backward").removesuffix("_forward")
    return _ATTENTION.sub("scaled_dot_product_attention", name)
