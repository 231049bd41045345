"""Watch a loop that accelerate runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_track.integrations import watch as watching

if TYPE_CHECKING:
    from accelerate import Accelerator

    from amp_track.integrations.watch import Watch


def watch(accelerator: Accelerator, optimizers: Any = None, **settings: Any) -> Watch:
    """Watch a loop, as `amp_track.watch` does, with the scaler of an Accelerator. Call it after `prepare`.

    `accelerator.optimizer_step_was_skipped` is wrong with fused optimizers (accelerate#4242): use `skipped_steps`.

    Args:
        accelerator: its scaler is None in bf16 and fp32, and in fp16 on a CPU, where accelerate trains in fp32.
        optimizers: as for `amp_track.watch`, prepared or not.
        **settings: those of `amp_track.watch`.
    """
    return watching.watch(accelerator.scaler, optimizers, **settings)
