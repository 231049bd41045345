"""One trial of a study: asked for, run with a heartbeat, and told, also where its search worker was taken for dead.

`Study.optimize` does the same until something goes wrong. A trial that another search worker has failed meanwhile ends
it with "Cannot tell a FAIL trial"; a heartbeat that a database did not take is its last one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from amp_track.records.errors import StoreFailed
from amp_track.study import database, optuna_internals, storage

Objective = Callable[[optuna.Trial], float | tuple[float, ...]]
_log = logging.getLogger("amp_track.study")
_HEARTBEAT_SECONDS = 1
"""How long the end of a trial waits for a heartbeat that a database is slow to take."""


def run_one(study: optuna.Study, objective: Objective) -> None:
    """Ask for a trial, run it, and tell how it ended.

    Trials of dead workers are not looked for here: the loops of a search and of a grid do it before, and the sampler of
    a fit does while it waits for its turn.

    A trial without a value, NaN, is told as FAIL, one that raises TrialPruned as PRUNED. Where another search worker
    has failed the trial meanwhile, its measurement stays out of the study, and that is said.

    Raises:
        Exception: of the objective; the trial is told as FAIL before.
    """
    trial = _ask(study)
    try:
        with _beating(study, trial):
            value = objective(trial)
        values = value if isinstance(value, tuple) else (value,)
        if any(math.isnan(value) for value in values):
            _tell(study, trial, TrialState.FAIL)
        else:
            _tell(study, trial, TrialState.COMPLETE, values)
    except optuna.TrialPruned:
        with contextlib.suppress(UpdateFinishedTrialError):  # it has measured nothing
            _tell(study, trial, TrialState.PRUNED)
    except UpdateFinishedTrialError:
        _log.warning(
            "trial %d of %s was taken over, because this process had given no sign of life for %d seconds: "
            "its measurement is left out",
            trial.number,
            study.study_name,
            database.TIMES.grace,
        )
        storage.bury(study, study.get_trials(deepcopy=False)[trial.number])
    except BaseException:
        with contextlib.suppress(StoreFailed, UpdateFinishedTrialError):  # the first error says more
            study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
        raise


def _ask(study: optuna.Study) -> optuna.Trial:
    with warnings.catch_warnings():
        # Optuna warns that `ask` sends no heartbeats: `_beating` does.
        warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed to be used with Study.optimize")
        return study.ask()


def _tell(study: optuna.Study, trial: optuna.Trial, state: TrialState, values: tuple[float, ...] | None = None) -> None:
    """Tell how a trial ended. Raise UpdateFinishedTrialError if it has ended otherwise."""
    told = study.tell(trial, values, state=state, skip_if_finished=True)
    if (told.state, told.values) != (state, list(values) if values is not None else None):
        raise UpdateFinishedTrialError


@contextmanager
def _beating(study: optuna.Study, trial: optuna.Trial) -> Iterator[None]:
    """Send a heartbeat of a trial now and then, from another thread, until the block ends."""
    if (heartbeat := optuna_internals.heartbeat_of(study)) is None:
        yield
        return
    interval, trial_id = heartbeat.get_heartbeat_interval(), optuna_internals.id_of(trial)
    is_over = threading.Event()

    def beat() -> None:
        while True:
            with contextlib.suppress(StorageInternalError, SQLAlchemyError, StoreFailed):  # the next one may arrive
                heartbeat.record_heartbeat(trial_id)
            if is_over.wait(interval):
                return

    thread = threading.Thread(target=beat, name=f"heartbeat of trial {trial_id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_HEARTBEAT_SECONDS)
