"""What a plan predicts for a fit study, made when the search first needs it, and once."""

from __future__ import annotations

import time
from collections.abc import Mapping

from amp_track.config.job import Job
from amp_track.memory_plan import gpus
from amp_track.records.plan import Forecast, ForecastTask
from amp_track.report import progress
from amp_track.session.session import Session


class Plans:
    """Returns the forecasts by precision when called; none, and a line that says why, where none can be made.

    Args:
        session: the command.
        job: a job of the study, at any precision and batch size.
        budget_bytes: the memory that a probe may take.
        max_batch_size: the largest batch worth probing.
    """

    def __init__(self, session: Session, job: Job, *, budget_bytes: int, max_batch_size: int) -> None:
        self._session = session
        self._job = job
        self._task = ForecastTask(
            precisions=session.precisions,
            budget_bytes=budget_bytes,
            max_batch_size=max_batch_size,
            on_cuda=session.inspection.hardware.kind == "cuda",
            blas_workspace_bytes=gpus.blas_workspace_of(session.inspection.hardware),
        )
        self._made: Mapping[str, Forecast] | None = None
        self.seconds: float | None = None
        """How long it took; None if none was needed."""

    def __call__(self) -> Mapping[str, Forecast]:
        if self._made is None:
            started = time.perf_counter()
            with progress.working("predicting where memory ends"):
                forecasts = self._session.runner.forecast(self._job, self._task)
            self.seconds = time.perf_counter() - started
            if forecasts.reason:
                progress.say(f"no plan of the memory ({forecasts.reason}): the search begins without one")
            self._made = dict(forecasts.by_precision)
        return self._made
