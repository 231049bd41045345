"""Studies are opened and their trials written here.

A study is made by one process at a time, keeps the settings it was made with, and has no trial left RUNNING by a
process that is gone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState
from pydantic import Field, Json, TypeAdapter, ValidationError

from amp_track.config.values import PRECISIONS
from amp_track.records.errors import BadInput, StoreFailed
from amp_track.records.result import JobResult
from amp_track.stores.locks import store_lock
from amp_track.study import notes, optuna_internals
from amp_track.study.database import WORKER
from amp_track.study.opening import Storage
from amp_track.study.study_lock import alone
from amp_track.workers import processes

Direction = Literal["minimize", "maximize"]
"""The direction of an objective, as Optuna names it."""
Value = TypeVar("Value")
_SETTINGS, JOB_RESULT, RUN_ID, LEARNING_RATE = "settings", "job_result", "mlflow_run_id", "learning_rate"
PARENT_RUN_ID, FREE_BYTES, _COMMAND = "mlflow_parent_run_id", "free_bytes", "command"
_JOB_RESULTS: TypeAdapter[JobResult] = TypeAdapter(Json[JobResult])
_SETTINGS_AS_JSON: TypeAdapter[dict[str, str]] = TypeAdapter(Json[dict[str, str]])
_BYTES = TypeAdapter(Annotated[int, Field(strict=True, ge=0)])
_TEXT, _NUMBER = TypeAdapter(str), TypeAdapter(float)
_OVER_ALL_PRECISIONS = ("max-batch", "compare")
"""The parts of a study whose param `precision` is a categorical over all of `PRECISIONS`."""
_MOST_JOB_RESULTS = 10_000
"""Parsed outcomes are kept in memory up to this number."""


def read(adapter: TypeAdapter[Value], stored: object, whose: str, what: str) -> Value:
    """Return what is stored, which a damaged database, or another version of amp_track, may have as something else."""
    try:
        return adapter.validate_python(stored)
    except ValidationError as error:
        raise _unreadable(whose, what) from error


def _unreadable(whose: str, what: str) -> StoreFailed:
    return StoreFailed(
        f"--study: got {whose} with {what} that this version of amp-track cannot read, expected what it has written; "
        "name another --study, or restore a copy of the storage"
    )


def open_study(
    name: str,
    storage: Storage,
    url: str,
    *,
    objectives: Sequence[tuple[str, Direction]],
    settings: dict[str, str],
) -> optuna.Study:
    """Open a study, new or resumed. Trials of dead processes are ended as FAIL.

    Args:
        objectives: of each the name that optuna-dashboard shows, and whether it is wanted high or low.

    Raises:
        BadInput: it exists and was made with other settings, so that its results would not hold for this command, or
            when other precisions were known, which Optuna cannot change.
    """
    names, directions = [name for name, _ in objectives], [direction for _, direction in objectives]
    check_settings(name, storage, settings, directions)
    with alone(url, "study", storage=storage):
        study = optuna.create_study(study_name=name, storage=storage.cached, directions=directions, load_if_exists=True)
        if study.metric_names != names:
            study.set_metric_names(names)
        if _SETTINGS not in study.user_attrs:
            study.set_user_attr(_SETTINGS, json.dumps(settings))
    end_stale_trials(study)
    return study


def ask_in_turn(study: optuna.Study, url: str) -> None:
    """Let one search worker of this machine at a time take a trial from the queue.

    SQLite locks no rows, so two search workers could take the same trial, and the slower one would end with "Cannot
    tell a COMPLETE trial".
    """
    ask = study.ask

    def asked_alone(fixed_distributions: dict[str, BaseDistribution] | None = None) -> optuna.Trial:
        with store_lock(url):
            return ask(fixed_distributions)

    study.ask = asked_alone  # type: ignore[method-assign]


def check_settings(
    name: str,
    storage: Storage,
    settings: dict[str, str],
    directions: Sequence[Direction],
    *,
    joins: bool = False,
) -> None:
    """Raise BadInput when a study of this name was made with other settings or precisions. Write nothing.

    Args:
        name: the name of the study.
        storage: where it is.
        settings: by name, what the results of this command depend on.
        directions: of its objectives.
        joins: whether the command has read from the study what can be read: what differs is then this machine.

    Raises:
        StoreFailed: what is stored of it cannot be read.
    """
    try:
        study_id = storage.get_study_id_from_name(name)
    except KeyError:
        return
    stored = storage.get_study_user_attrs(study_id).get(_SETTINGS)
    known = settings if stored is None else read(_SETTINGS_AS_JSON, stored, name, _SETTINGS)
    # Another device is why others differ, too.
    for setting in sorted(known.keys() | settings.keys(), key=lambda setting: (setting != "device", setting)):
        if known.get(setting) != settings.get(setting):
            flag = f"STUDY: got {name} on a machine with" if joins else "--study: got"
            advice = "start its workers where it is so" if joins else "use that setting or name another --study"
            raise BadInput(
                f"{flag} {setting} {settings.get(setting)}, expected the {known.get(setting)} that "
                f"{'it' if joins else f'study {name}'} was made with; {advice}"
            )
    found = [direction.name.lower() for direction in storage.get_study_directions(study_id)]
    if not found or "not_set" in found:
        raise _unreadable(name, "objectives")
    if found != list(directions):
        raise BadInput(
            f"--study: got {name}, which was made to {' and '.join(found)}, expected to {' and '.join(directions)} its "
            "objectives; name another --study"
        )
    # The trainings of a search choose among their own edges: those are compared when they are known.
    if name.rpartition("/")[2] in _OVER_ALL_PRECISIONS:
        trials = storage.cached.get_all_trials(study_id, deepcopy=False)
        check_choices(name, trials, {"precision": CategoricalDistribution(PRECISIONS)})


def check_choices(name: str, trials: Sequence[FrozenTrial], expected: Mapping[str, BaseDistribution]) -> None:
    """Raise BadInput when the trials of a study know other choices of a categorical than `expected`.

    Optuna takes no other choices into a stored study: it would raise a bare ValueError at the next trial.

    Args:
        name: the name of the study.
        trials: all of its trials.
        expected: the distributions of this command, by param; only categoricals are compared.
    """
    for trial in trials:
        for param, stored in trial.distributions.items():
            asked = expected.get(param)
            if not isinstance(stored, CategoricalDistribution) or not isinstance(asked, CategoricalDistribution):
                continue
            if stored.choices != asked.choices:
                known, wanted = (", ".join(map(str, each.choices)) for each in (stored, asked))
                raise BadInput(
                    f"--study: got {name}, which was made with the choices {known} of {param}, expected {wanted}, as "
                    "this command has them; name another --study, because the choices of a study cannot change"
                )


def name_worker(trial: optuna.Trial) -> None:
    """Record which process runs a trial, so that a later search worker can tell whether it is still alive."""
    trial.set_user_attr(WORKER, processes.this_process())


def end_stale_trials(study: optuna.Study) -> None:
    """End as FAIL every RUNNING trial whose process is gone, and the run that stands for it.

    On this host that is known at once. On another, and of a process that stands still, it is when the grace period has
    passed since the last heartbeat.
    """
    optuna.storages.fail_stale_trials(study)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        worker = trial.user_attrs.get(WORKER)
        if worker is None or not processes.is_gone(worker):
            continue
        # It may have ended, and its process after it, since the trials were read.
        if study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True).state is TrialState.FAIL:
            bury(study, trial)


def when_buried(shared: Storage, end_run: Callable[[str, int], None]) -> None:
    """From here on, call `end_run(name of the study, number)` for each trial whose measurement stays out of its study.

    It is called where this process has found the trial's process dead, or has been taken for dead itself.
    """

    def callback(study: optuna.Study, trial: FrozenTrial) -> None:
        end_run(study.study_name, trial.number)  # it may have finished: its trial has not, and is run again

    shared.heartbeat_stale_trial_callback = callback


def bury(study: optuna.Study, trial: FrozenTrial) -> None:
    """Do for a trial that was failed here what Optuna does for one that had no heartbeat."""
    heartbeat = optuna_internals.heartbeat_of(study)
    callback = heartbeat.get_heartbeat_stale_trial_callback() if heartbeat is not None else None
    if callback is not None:
        callback(study, trial)


def remember(trial: optuna.Trial, job_result: JobResult, run_id: str) -> None:
    """Store the outcome with the trial, so that the study alone is enough to resume and to report."""
    optuna_internals.keep(trial, JOB_RESULT, json.dumps(dataclasses.asdict(job_result)))
    if not job_result.fits:
        notes.note_failure(trial, job_result)
    if trial.user_attrs.get(RUN_ID) != run_id:  # where the run was made it is known: each attribute is a commit
        trial.set_user_attr(RUN_ID, run_id)


def measured(trial: FrozenTrial) -> JobResult:
    """Return the outcome of a trial that has run, and check that its values are there."""
    job_result = job_result_of(trial)
    if job_result is None or (trial.state is TrialState.COMPLETE and not trial.values):
        raise _unreadable(f"trial {trial.number}", "values or an outcome")
    return job_result


def param_of(trial: FrozenTrial, name: str) -> Any:
    """Return a param that a trial was made with."""
    if name not in trial.params:
        raise _unreadable(f"trial {trial.number}", f"a param {name}")
    return trial.params[name]


def job_result_of(trial: FrozenTrial) -> JobResult | None:
    """Return the outcome that `remember` has stored; None for a trial that died first."""
    # Among the attributes for people in studies that an older version has made.
    text = trial.system_attrs.get(JOB_RESULT, trial.user_attrs.get(JOB_RESULT))
    if text is None:
        return None
    return _parsed_job_result(read(_TEXT, text, f"trial {trial.number}", JOB_RESULT))


@functools.lru_cache(maxsize=_MOST_JOB_RESULTS)
def _parsed_job_result(text: str) -> JobResult:
    """Parse an outcome once: search workers read all of a study's at every poll, and none of them ever changes."""
    return read(_JOB_RESULTS, text, "a trial", JOB_RESULT)


def parent_run_id_of(study: optuna.Study) -> str | None:
    """Return the id of the MLflow run that stands for a study; None if it has none yet."""
    return parent_run_id(study.study_name, study.user_attrs)


def parent_run_id(name: str, user_attributes: Mapping[str, Any]) -> str | None:
    """Return the same from a study's name and user attributes."""
    stored = user_attributes.get(PARENT_RUN_ID)
    return None if stored is None else read(_TEXT, stored, name, PARENT_RUN_ID)


def free_bytes_of(study: optuna.Study) -> int | None:
    """Return the bytes that were free when a study without a budget began; None where that is not known."""
    stored = study.user_attrs.get(FREE_BYTES)
    return None if stored is None else read(_BYTES, stored, study.study_name, FREE_BYTES)


def remember_command(study: optuna.Study, command_as_json: str) -> None:
    """Store what a study is asked, so that it can be reported without its workload."""
    study.set_user_attr(_COMMAND, command_as_json)


def command_of(study: optuna.Study, adapter: TypeAdapter[Value]) -> Value | None:
    """Return what `remember_command` has stored, as `adapter` reads it; None for a study of an older version."""
    stored = study.user_attrs.get(_COMMAND)
    if stored is None:
        return None
    return read(adapter, stored, study.study_name, _COMMAND)


def learning_rate_of(trial: FrozenTrial) -> float:
    """Return the learning rate that a search has trained with."""
    return read(_NUMBER, trial.user_attrs.get(LEARNING_RATE), f"trial {trial.number}", LEARNING_RATE)


def run_id_of(trial: FrozenTrial) -> str:
    """Return the id of the trial's MLflow run; empty where it has none."""
    return str(trial.user_attrs.get(RUN_ID, ""))


def constrain(trial: optuna.Trial, name: str, violation: float) -> None:
    """Set a constraint of a trial: a violation of at most 0 is feasible.

    It is written twice, because optuna-dashboard 0.21 reads only the older list.
    """
    trial.set_constraint(name, violation)
    optuna_internals.set_dashboard_constraint(trial, violation)


def is_measured(study: optuna.Study, trial: FrozenTrial) -> bool:
    """Return whether a study has the measurement of a trial that has ended.

    Optuna shows a training over seeds without a quality as FAIL. Any other trial that failed has died, perhaps between
    its outcome and its end, and its job is run again.
    """
    if trial.state is not TrialState.FAIL:
        return trial.state.is_finished()
    job_result = job_result_of(trial)
    return (
        study.study_name.endswith("/seeds")
        and job_result is not None
        and (job_result.metric is None or not math.isfinite(job_result.metric))
    )


def finished_trials(study: optuna.Study, *others: str) -> dict[str, dict[int, bool]]:
    """Return the finished trials of this study and of those `others` that exist.

    By study name and number, whether the study has the trial's measurement.
    """
    shared = optuna_internals.storage_of(study)
    known = [name for name in optuna.get_all_study_names(shared) if name in others]
    studies = [study, *(optuna.load_study(study_name=name, storage=shared) for name in known)]
    for other in studies:
        end_stale_trials(other)
    return {
        each.study_name: {
            trial.number: is_measured(each, trial)
            for trial in each.get_trials(deepcopy=False)
            if trial.state.is_finished()
        }
        for each in studies
    }
