"""The max batch of a transformers Trainer: it trains in fresh processes. And a callback to watch one."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from amp_track.records.errors import BadInput
from amp_track.targets import source

if TYPE_CHECKING:
    from transformers import Trainer

    from amp_track.results.max_batch import MaxBatchResult

MakeTrainer = Callable[[int, dict[str, Any]], "Trainer"]


def max_batch(make_trainer: str | MakeTrainer, **settings: Any) -> MaxBatchResult:
    """Find the max batch of a Trainer at every precision.

    Args:
        make_trainer: returns a Trainer for a batch size and keyword arguments of `TrainingArguments`; a function that a
            fresh process can import, or `module:name`. They are output_dir, use_cpu, fp16, bf16, auto_find_batch_size,
            save_strategy, load_best_model_at_end, logging_strategy, report_to and disable_tqdm:
            `TrainingArguments(**(mine | arguments))` overrides yours.
        **settings: those of `amp_track.max_batch`.

    Raises:
        BadInput: as `amp_track.max_batch`; or the function cannot be imported by a fresh process.
    """
    from amp_track import api

    if "set" in settings:
        raise BadInput("set: a Trainer takes no options here. Write them into the function that makes it.")
    return api.max_batch(f"{__name__}:train", set={"trainer": source.importable_name(make_trainer)}, **settings)


def __getattr__(name: str) -> Any:
    if name != "AmpTrackCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from amp_track.integrations.transformers_callback import AmpTrackCallback  # imports transformers

    return AmpTrackCallback


def train(batch_size: int, precision: str, device: str, trainer: str) -> None:
    """Train until amp_track ends the process: without checkpoints, reports and progress bars."""
    from transformers import EarlyStoppingCallback, PrinterCallback
    from transformers import logging as transformers_logging

    if device.startswith("cuda") and torch.cuda.device_count() > 1:
        raise BadInput(
            "transformers trains on all GPUs that it sees. Show it one, such as with CUDA_VISIBLE_DEVICES=0, and use "
            "--device cuda."
        )
    transformers_logging.set_verbosity(logging.ERROR)
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "output_dir": folder,
            "use_cpu": device == "cpu",
            "fp16": precision == "amp",
            "bf16": precision == "bf16",
            "auto_find_batch_size": False,  # it would go on with a smaller batch
            "save_strategy": "no",
            "load_best_model_at_end": False,  # which requires that save_strategy is eval_strategy
            "logging_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        written_as = "def make_trainer(batch_size, arguments)"
        made = source.called(trainer, batch_size=batch_size, arguments=arguments, written_as=written_as)
        made.remove_callback(PrinterCallback)  # it prints a line per probe
        stops_early = any(isinstance(each, EarlyStoppingCallback) for each in made.callback_handler.callbacks)
        if stops_early and made.args.metric_for_best_model is None:  # load_best_model_at_end would set it
            made.args.metric_for_best_model = "loss"
            made.args.greater_is_better = bool(made.args.greater_is_better)
        made.train()


train.library = "transformers"  # type: ignore[attr-defined]
train.references = ("trainer",)  # type: ignore[attr-defined]
train.recipe = "{transformers}"  # type: ignore[attr-defined]
