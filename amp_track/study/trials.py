"""Run one trial of a study with heartbeats, robust against a search worker that was considered dead.

`Study.optimize` differs in two failures. It ends with "Cannot tell a FAIL trial" if another search worker has failed
the trial meanwhile, and it stops the heartbeats after one that the database did not accept.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from amp_track.records.errors import StoreFailed
from amp_track.study import database, optuna_internals, storage

Value = float | tuple[float, ...]
_log = logging.getLogger("amp_track.study")
_NO_ANSWER = (StorageInternalError, SQLAlchemyError, StoreFailed, OSError)
_HEARTBEAT_SECONDS = 1
"""How long the end of a trial waits for a heartbeat in a slow database."""
_FIRST_HEARTBEAT_SECONDS = 0.25
"""When the first heartbeat is sent: while the job runs. Without one, a trial is as good as with a new one."""


@dataclass
class NextTrial:
    """A trial that runs, and its finite or infinite value once it is known."""

    trial: optuna.Trial
    value: Value = field(init=False)


@contextmanager
def next_trial(study: optuna.Study) -> Iterator[NextTrial]:
    """Ask for a trial, and tell its value at the end of the block, which sets it.

    Trials of dead search workers are not handled here: the loops of a search and a grid end them before, and the batch
    sampler does while it waits for its turn.

    A block that raises TrialPruned ends, and its trial becomes PRUNED. If another search worker has failed the trial
    meanwhile, its measurement is discarded with a warning. After any other exception of the block, which is passed on,
    the trial is FAIL.
    """
    with warnings.catch_warnings():
        # Optuna warns that `ask` sends no heartbeats: `_beating` does.
        warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed to be used with Study.optimize")
        trial = study.ask()
    asked = NextTrial(trial)
    try:
        with _beating(study, trial):
            yield asked
        values = asked.value if isinstance(asked.value, tuple) else (asked.value,)
        _tell(study, trial, TrialState.COMPLETE, [float(value) for value in values])
    except optuna.TrialPruned:
        with contextlib.suppress(UpdateFinishedTrialError):  # it has measured nothing
            _tell(study, trial, TrialState.PRUNED)
    except UpdateFinishedTrialError:
        _log.warning(
            "trial %d of %s was taken over: this process sent no heartbeat for %d seconds, so its measurement is lost",
            trial.number,
            study.study_name,
            database.TIMES.grace,
        )
        storage.report_stale_trial(study, study.get_trials(deepcopy=False)[trial.number])
    except BaseException:
        with contextlib.suppress(UpdateFinishedTrialError, *_NO_ANSWER):  # the first error is more informative
            study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
        raise


def _tell(study: optuna.Study, trial: optuna.Trial, state: TrialState, values: list[float] | None = None) -> None:
    """Store the result of a trial. Raise UpdateFinishedTrialError if it has already ended with another one.

    `Study.tell` reads the trial before and after.
    """
    shared, trial_id = optuna_internals.storage_of(study), optuna_internals.id_of(trial)
    shared.set_trial_state_values(trial_id, state, values)


@contextmanager
def _beating(study: optuna.Study, trial: optuna.Trial) -> Iterator[None]:
    """Send heartbeats of a trial from another thread until the block ends."""
    if (heartbeat := optuna_internals.heartbeat_of(study)) is None:
        yield
        return
    interval, trial_id = heartbeat.get_heartbeat_interval(), optuna_internals.id_of(trial)
    is_over = threading.Event()

    def beat() -> None:
        pause: float | None = _FIRST_HEARTBEAT_SECONDS
        while not is_over.wait(pause):
            with contextlib.suppress(*_NO_ANSWER):  # try again with the next one
                heartbeat.record_heartbeat(trial_id)
            pause = interval

    thread = threading.Thread(target=beat, name=f"heartbeat of trial {trial_id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_HEARTBEAT_SECONDS)
