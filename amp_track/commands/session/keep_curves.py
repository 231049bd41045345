"""Keep the picture of a training's curves with its MLflow run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from amp_track.report.curves import FILE, Curves
from amp_track.workers import processes

if TYPE_CHECKING:
    from amp_track.tracking import Run

_log = logging.getLogger("amp_track.commands")


@contextmanager
def kept_curves(run: Run, title: str, quality_name: str, *, steps_per_epoch: int) -> Iterator[Curves]:
    """Collect the curves of a training and store their picture when the block ends, however it does.

    Args:
        run: the training's run; what a resumed one has on record is drawn too.
        title: the title of the picture.
        quality_name: the label of the quality's axis.
        steps_per_epoch: how many optimizer steps an epoch has.
    """
    curves = Curves(title, quality_name)
    curves.restore(run.on_record, steps_per_epoch=steps_per_epoch)
    try:
        yield curves
    finally:
        try:
            with processes.scratch_folder() as folder:
                if curves.draw(folder / FILE):
                    run.artifact(folder / FILE)
        except Exception as error:  # a missing picture is no reason for a training to fail
            _log.warning("%s of run %s is missing: %s: %s", FILE, run.run_id, type(error).__name__, error)
