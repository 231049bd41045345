"""The max batch of a Lightning training, whose own Trainer fits the module in fresh processes; a callback to watch it.

It has to be found inside the framework: Lightning's `autocast(cache_enabled=False)` alone lowers a max batch in bf16 by
6 % against the same loop without it (lightning 2.6, a small convolutional net).
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from amp_track.config.precisions import Precision
from amp_track.records.errors import BadInput
from amp_track.targets import source

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from amp_track.results.max_batch import MaxBatchResult


_MANY_EPOCHS = 10_000
"""More than a job trains. Schedules such as OneCycleLR need a finite number: `estimated_stepping_batches`."""


def max_batch(
    make_module: str | Callable[[], pl.LightningModule],
    make_data: str | Callable[[int], pl.LightningDataModule],
    *,
    trainer: Mapping[str, Any] | None = None,
    **settings: Any,
) -> MaxBatchResult:
    """Find the max batch of a Lightning training at every precision.

    Args:
        make_module: returns a new module; a function or class that a fresh process can import, or `module:name`. A
            function sets hyperparameters: `def make_net(): return Net(hidden=64)`.
        make_data: returns the data module for a batch size.
        trainer: more arguments of the Trainer, of JSON's types: `{"gradient_clip_val": 1.0}`.
        **settings: those of `amp_track.max_batch`.

    Raises:
        BadInput: as `amp_track.max_batch`; or a function cannot be imported by a fresh process; or `trainer` has an
            argument that amp_track sets.
    """
    from amp_track import api

    if "set" in settings:
        raise BadInput(
            "set: a module takes no options here. Pass a function that makes it, such as def make_net(): return "
            "Net(hidden=64), and arguments of the Trainer as trainer={…}."
        )
    try:
        flags = json.dumps(dict(trainer or {}))
    except (TypeError, ValueError):
        raise BadInput(f"trainer: got {trainer!r}, expected a dictionary of texts, numbers and booleans") from None
    names = {"module": source.importable_name(make_module), "data": source.importable_name(make_data)}
    return api.max_batch(f"{__name__}:fit", set=names | {"trainer": flags}, **settings)


def __getattr__(name: str) -> Any:
    if name != "AmpTrackCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from amp_track.integrations.lightning_callback import AmpTrackCallback  # imports lightning

    return AmpTrackCallback


def fit(batch_size: int, precision: str, device: str, module: str, data: str, trainer: str = "{}") -> None:
    """Fit the module until amp_track ends the process: without loggers, checkpoints and progress bars."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Unwritten(DummyLogger):
        """Modules may use a logger's experiment and folder, and LearningRateMonitor requires a logger."""

        @property
        def save_dir(self) -> str:
            return tempfile.gettempdir()  # the job's folder

    for name in ("lightning.pytorch", "lightning.fabric"):  # each probe would repeat their tips
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    kind, _, index = device.partition(":")
    settings: dict[str, Any] = {
        "accelerator": "gpu" if kind == "cuda" else kind,
        "devices": [int(index or 0)] if kind == "cuda" else 1,
        "precision": Precision.named(precision).in_tools["lightning"],
        "plugins": [],
        "max_epochs": _MANY_EPOCHS,
        "logger": Unwritten(),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    if kind == "cpu" and precision == "amp":  # Lightning would train in bf16-mixed, with a warning only
        scaler = torch.amp.GradScaler("cpu")
        settings |= {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    made = pl.Trainer(**settings, **_trainer_flags(trainer, settings))
    net = source.called(module, written_as="a class or a function without required arguments")
    _leave_checkpoints_out(net)
    made.fit(
        net,
        datamodule=source.called(data, batch_size=batch_size, written_as="def make_data(batch_size)"),
    )


def _leave_checkpoints_out(net: pl.LightningModule) -> None:
    """Remove ModelCheckpoints from a module's own callbacks, which `enable_checkpointing=False` does not affect."""
    from lightning.pytorch.callbacks import Callback, Checkpoint

    own_callbacks = net.configure_callbacks

    def others() -> list[Callback]:
        own = own_callbacks()
        listed = [own] if isinstance(own, Callback) else own or []
        return [each for each in listed if not isinstance(each, Checkpoint)]

    net.configure_callbacks = others  # type: ignore[method-assign]


def _trainer_flags(text: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's arguments of the Trainer. Raises BadInput if one is among the settings of amp_track."""
    try:
        flags = dict(json.loads(text))
    except (TypeError, ValueError):
        raise BadInput(f'trainer: got {text}, expected JSON such as {{"gradient_clip_val": 1.0}}') from None
    if taken := ", ".join(sorted(flags.keys() & settings)):
        raise BadInput(f"trainer: amp_track sets {taken} itself. Omit {taken}.")
    return flags


fit.library = "lightning"  # type: ignore[attr-defined]
fit.references = ("module", "data")  # type: ignore[attr-defined]
fit.recipe = "{lightning}  # with batches of {batch_size}"  # type: ignore[attr-defined]
