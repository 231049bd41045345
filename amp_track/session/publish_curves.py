"""Store the plot of each training's curves with its MLflow run, drawn while the next job runs if there is one."""

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
    """The plots of a study's trainings, each drawn while the next job starts. Make it with `late_plots`.

    A plot takes 0.15 s on one core. A job process uses only one core while it loads its data, so a thread draws and
    stores the plots then, and ends before the job's result is used. It has the priority of this process, which is
    below the job's: with a lower one it would hold the GIL for long and delay the reading of the job's events.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Run, Curves]] = []

    def add(self, run: Run, curves: Curves) -> None:
        """Draw this plot later."""
        self._waiting.append((run, curves))

    @contextmanager
    def drawn_beside(self) -> Iterator[None]:
        """Draw the waiting plots in a thread while the block runs a job."""
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
        """Draw the plots that still wait."""
        warnings: list[str] = []
        self._draw(warnings)
        _warn(warnings)

    def _draw(self, warnings: list[str]) -> None:
        while self._waiting:
            warnings += _drawn(*self._waiting.pop(0))


@contextmanager
def late_plots() -> Iterator[LatePlots]:
    """Draw plots while the jobs of the block run, and the remaining ones at its end, also after an error."""
    plots = LatePlots()
    try:
        yield plots
    finally:
        plots.finish()


@contextmanager
def kept_curves(
    run: Run, title: str, metric_name: str, *, steps_per_epoch: int, later: LatePlots | None = None
) -> Iterator[Curves]:
    """Collect the curves of a training and store their plot when the block ends, also after an error.

    Args:
        run: the training's run; recorded values of a resumed run are included.
        title: the title of the plot.
        metric_name: the label of the metric's axis.
        steps_per_epoch: the number of optimizer steps in an epoch.
        later: draws the plot while the next job runs; None to draw it when the block ends.
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
    """Draw and store one plot. Return warnings, because a missing plot must not fail a training."""
    try:
        with processes.scratch_folder() as folder:
            if curves.draw(folder / CURVES_PLOT):
                run.artifact(folder / CURVES_PLOT)
    except Exception as error:
        return [f"{CURVES_PLOT} of run {run.run_id} is missing: {type(error).__name__}: {error}"]
    return []


def _warn(warnings: list[str]) -> None:
    """Log warnings from the main thread; a notebook shows those of other threads in any cell."""
    for warning in warnings:
        _log.warning("%s", warning)
