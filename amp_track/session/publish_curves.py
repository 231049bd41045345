"""Keep the picture of each training's curves with its MLflow run, drawn beside the next job where there is one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from amp_track.records.events import CURVES_PLOT
from amp_track.report.curves import Curves
from amp_track.workers import processes

if TYPE_CHECKING:
    from amp_track.tracking import Run

_log = logging.getLogger("amp_track.commands")


class LatePlots:
    """The pictures of a study's trainings: each is drawn while the next job starts. Make it with `late_plots`.

    A picture takes 0.15 s of a processor, and a job's process at first loads its data with one, so the study does not
    wait for pictures. They are drawn by a thread that lives no longer than that job, and are stored from there. It has
    the priority of the process, which is below the job's: a lower one would hold Python's lock for long, and with it
    the reading of the job's events.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Run, Curves]] = []

    def add(self, run: Run, curves: Curves) -> None:
        """Draw this picture later."""
        self._waiting.append((run, curves))

    @contextmanager
    def drawn_beside(self) -> Iterator[None]:
        """Draw what waits beside the block, which runs a job."""
        thread = threading.Thread(target=self._draw, args=(warnings := list[str](),), name="amp_track curves")
        if self._waiting:
            thread.start()
        try:
            yield
        finally:
            if thread.ident is not None:
                thread.join()
            _warn(warnings)

    def finish(self) -> None:
        """Draw what still waits."""
        warnings: list[str] = []
        self._draw(warnings)
        _warn(warnings)

    def _draw(self, warnings: list[str]) -> None:
        while self._waiting:
            warnings += _drawn(*self._waiting.pop(0))


@contextmanager
def late_plots() -> Iterator[LatePlots]:
    """Let pictures be drawn beside the jobs within the block, and the last of them at its end, however it ends."""
    plots = LatePlots()
    try:
        yield plots
    finally:
        plots.finish()


@contextmanager
def kept_curves(
    run: Run, title: str, metric_name: str, *, steps_per_epoch: int, later: LatePlots | None = None
) -> Iterator[Curves]:
    """Collect the curves of a training and store their picture when the block ends, however it does.

    Args:
        run: the training's run; what a resumed one has on record is drawn too.
        title: the title of the picture.
        metric_name: the label of the quality's axis.
        steps_per_epoch: how many optimizer steps an epoch has.
        later: draws the picture beside the next job; None to draw it when the block ends.
    """
    curves = Curves(title, metric_name)
    curves.restore(run.on_record, steps_per_epoch=steps_per_epoch)
    try:
        yield curves
    finally:
        if later is not None:
            later.add(run, curves)
        else:
            _warn(_drawn(run, curves))


def _drawn(run: Run, curves: Curves) -> list[str]:
    """Draw and store one picture, and return what to warn of: it is no reason for a training to fail."""
    try:
        with processes.scratch_folder() as folder:
            if curves.draw(folder / CURVES_PLOT):
                run.artifact(folder / CURVES_PLOT)
    except Exception as error:
        return [f"{CURVES_PLOT} of run {run.run_id} is missing: {type(error).__name__}: {error}"]
    return []


def _warn(warnings: list[str]) -> None:
    """Log warnings, from the main thread: a notebook shows those of another one anywhere."""
    for warning in warnings:
        _log.warning("%s", warning)
