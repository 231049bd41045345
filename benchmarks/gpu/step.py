"""TrainStep against the bare loop: images/s of ResNet-50 at 224 pixels in channels-last order, at every precision.

Both train in one process, in turns, on a batch that lies on the device already. Afterwards TrainStep trains again while
torch raises an error wherever the host waits for the device.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.jobs import precisions
from benchmarks.gpu.parts import Machine, Part, Planned, Reporter, Request
from benchmarks.gpu.rows import Row

_LIMIT_SECONDS, _COMPILED_LIMIT_SECONDS = 120.0, 300.0


@dataclass(frozen=True)
class Size:
    """What is trained, and how long."""

    workload: str
    batch_size: int
    warm_up_steps: int
    rounds: int
    steps: int
    """Of each round."""


SIZE = Size("benchmarks.models:ResNet50", 256, 10, 5, 20)
_TINY = Size("benchmarks.models:Cnn", 4, 1, 2, 2)


@dataclass(frozen=True)
class Case:
    """One row."""

    precision: str
    compile: bool

    @property
    def key(self) -> str:
        return f"{self.precision} compiled" if self.compile else self.precision


def cases(*, tiny: bool) -> list[Case]:
    """Compiling takes a minute, so what is compiled comes last; small, one of them is enough."""
    asked = precisions(("amp", "bf16"))
    compiled = ("bf16",) if tiny else asked
    return [*(Case(name, False) for name in asked), *(Case(name, True) for name in compiled)]


def parts(machine: Machine, kept: Mapping[str, Row]) -> list[Part]:
    """A process for each: an error of the device would stay with it."""
    found = []
    for case in cases(tiny=machine.tiny):
        limit = _COMPILED_LIMIT_SECONDS if case.compile else _LIMIT_SECONDS
        row = Planned(
            key=case.key,
            limit_seconds=limit,
            impossible=machine.precisions[case.precision],
            missing="no C compiler, which torch.compile needs" if case.compile and not _has_compiler() else "",
        )
        found.append(Part(name=case.key, rows=[row]))
    return found


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name)


def measure(request: Request, report: Reporter) -> None:
    size = _TINY if request.tiny else SIZE
    for case in cases(tiny=request.tiny):
        if case.key in request.keys:
            report.row(case.key, lambda one=case: _compare(one, size, request), n=size.rounds)


def _compare(case: Case, size: Size, request: Request) -> dict[str, Any]:
    """Rounds of both in turns, each round's images/s, and what the host waited for."""
    import torch

    from amp_track import Precision, TrainStep, float32_precision, load_workload
    from benchmarks.bare import BareStep

    device = request.device
    workload = load_workload(size.workload)

    def model() -> Any:
        torch.manual_seed(0)
        return workload.model().to(device).to(memory_format=torch.channels_last)

    inputs, targets = (part.to(device) for part in workload.example(size.batch_size))
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    with float32_precision(Precision.named(case.precision)):
        own = model()
        ours = TrainStep(
            own, workload.optimizer(own.parameters(), workload.learning_rate), workload.loss, case.precision,
            channels_last=True, compile=case.compile,
        )  # fmt: skip
        other: Any = torch.compile(model()) if case.compile else model()
        bare = BareStep(workload, other, case.precision, device, channels_last=True)
        contenders: dict[str, Callable[..., Any]] = {"bare": bare, "amp_track": ours}
        for step in contenders.values():
            _seconds(step, inputs, targets, size.warm_up_steps, is_gpu=request.kind != "cpu")
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(size.rounds):
            for name in list(contenders)[:: 1 if turn % 2 == 0 else -1]:
                seconds = _seconds(contenders[name], inputs, targets, size.steps, is_gpu=request.kind != "cpu")
                speeds[name].append(size.steps * size.batch_size / seconds)
        ours.read()
        waits = _waits(ours, inputs, targets, request.kind)
    return {"images_per_second": speeds, "ratio": ratio(speeds), "batch_size": size.batch_size, "waits": waits}


def ratio(speeds: Mapping[str, list[float]]) -> float:
    """Of medians, over the bare loop's."""
    return statistics.median(speeds["amp_track"]) / statistics.median(speeds["bare"])


def _seconds(step: Callable[..., Any], inputs: Any, targets: Any, count: int, *, is_gpu: bool) -> float:
    import torch

    started = time.perf_counter()
    for _ in range(count):
        step(inputs, targets)
    if is_gpu:
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def _waits(step: Callable[..., Any], inputs: Any, targets: Any, kind: str) -> str:
    """Say where the host waits for the device within steps; "none" is proven, by an error that does not come."""
    import torch

    if kind != "cuda":
        return f"not possible on this device: torch tells only on CUDA, this is {kind}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(4):
            step(inputs, targets)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"
