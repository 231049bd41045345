"""Write the files of a finished training: its weights, and plots of the model's output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from amp_track.config.job import JobFolder
from amp_track.records.events import PLOTS, FileWritten
from amp_track.training.amp.step import TrainStep
from amp_track.training.amp.tensors import call, map_tensors, move
from amp_track.training.checkpoint import writing
from amp_track.workload import Workload


def write_artifacts(workload: Workload, step: TrainStep, folder: JobFolder) -> Iterator[FileWritten]:
    """Write the weights and the workload's plots into `folder`, and yield an event after each file.

    `weights.pt` is the model's state dict on the CPU, for `torch.load(weights_only=True)`; it is written only if
    `folder.keep_weights` is set. Each plot becomes a PNG file; its values from 0 to 1 are mapped to 0 to 255.
    """
    if folder.keep_weights:
        weights = Path(folder.path) / "weights.pt"
        with writing(weights), weights.open("wb") as stream:  # torch.save(path) would hide the OSError
            torch.save(map_tensors(Tensor.cpu, dict(step.model.state_dict())), stream)
        yield FileWritten(file=str(weights))
    step.model.eval()

    @torch.inference_mode()
    def predict(input: Any) -> Any:
        with step.precision.autocast(step.device.type):
            output = call(step.model, move(input, step.device))
        return map_tensors(lambda tensor: tensor.float().cpu(), output)

    for name, plot in workload.plots(predict).items():
        if not (plot.dim() == 2 and min(plot.shape) > 1) and not (plot.dim() == 3 and plot.shape[2] == 3):
            expected = "(height, width) or (height, width, 3)"
            raise ValueError(f"plots() returned {name} of shape {tuple(plot.shape)}; it must be {expected}")
        file = Path(folder.path) / f"{name.replace('/', '-')}.png"
        pixels = plot.detach().cpu().float().clamp(0, 1).mul(255).round().to(torch.uint8)
        with writing(file):
            Image.fromarray(pixels.numpy()).save(file)
        yield FileWritten(file=str(file), folder=PLOTS)
