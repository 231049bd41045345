"""The words of other libraries for a recommendation are valid in the installed versions of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_track.config.job import Job
from amp_track.config.precisions import PRECISIONS
from amp_track.results.recommendation import Recommendation

pytestmark = pytest.mark.slow
"""Importing these libraries takes seconds."""


def words(precision: str, library: str) -> str:
    recommended = Recommendation(
        job=Job(grad_accum=4), precision=precision, batch_size=24, samples_per_second=None, max_batch=24,
        speed_ratio=None, batch_ratio=None,
    )  # fmt: skip
    return recommended.in_tools[library]


def made(text: str, **names: Any) -> Any:
    """Return the value of the last statement of a text that a user would paste."""
    *before, last = text.split("; ")
    known = {"torch": torch, **names}
    kept = torch.get_float32_matmul_precision()
    try:
        for statement in before:
            exec(statement, known)
        assert torch.get_float32_matmul_precision() == ("high" if before else kept)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a CPU's mixed precision
            return eval(last, known)
    finally:
        torch.set_float32_matmul_precision(kept)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_transformers(precision: str, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    def on_cpu(**arguments: Any) -> Any:
        return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **arguments)

    text = words(precision, "transformers")
    if precision == "tf32" and not torch.cuda.is_available():
        with pytest.raises(ValueError, match="tf32 requires Ampere"):
            made(text, TrainingArguments=on_cpu)
        return
    arguments = made(text, TrainingArguments=on_cpu)
    assert (arguments.fp16, arguments.bf16) == (precision == "amp", precision == "bf16")
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (24, 4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_lightning(precision: str) -> None:
    import lightning.pytorch as pl

    trainer = made(words(precision, "lightning"), Trainer=lambda **each: pl.Trainer(logger=False, **each))
    dtypes = {"amp": torch.bfloat16 if trainer.accelerator.name() == "cpu" else torch.float16, "bf16": torch.bfloat16}
    with trainer.precision_plugin.forward_context():
        device = "cpu" if trainer.accelerator.name() == "cpu" else "cuda"
        assert torch.is_autocast_enabled(device) is (precision in dtypes)
        if precision in dtypes:
            assert torch.get_autocast_dtype(device) == dtypes[precision]
    assert trainer.accumulate_grad_batches == 4


@pytest.mark.parametrize("precision", PRECISIONS)
def test_accelerate(precision: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = made(words(precision, "accelerate"), Accelerator=lambda **each: Accelerator(**each))
    assert accelerator.mixed_precision == {"amp": "fp16", "bf16": "bf16"}.get(precision, "no")
    assert accelerator.gradient_accumulation_steps == 4
    AcceleratorState._reset_state(reset_partial_state=True)
