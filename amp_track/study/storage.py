"""Open the studies of a storage, and write and read their trials.

Only one process at a time creates a study. A study keeps the settings that it was created with, and trials whose
process has died do not stay RUNNING.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState
from pydantic import Json, TypeAdapter, ValidationError

from amp_track.records.errors import BadInput, StoreFailed
from amp_track.records.result import JobResult, JobStatus
from amp_track.stores.locks import store_lock
from amp_track.study import dashboard, optuna_internals
from amp_track.study.database import WORKER, SharedStorage, worker_lock
from amp_track.study.opening import Storage, reading
from amp_track.workers import interrupts, liveness

Direction = Literal["minimize", "maximize"]
"""The direction of an objective, as Optuna names it."""
Value = TypeVar("Value")
_SETTINGS, JOB_RESULT, RUN_ID, LEARNING_RATE = "settings", "job_result", "mlflow_run_id", "learning_rate"
PARENT_RUN_ID, FREE_BYTES, COMMAND = "mlflow_parent_run_id", "free_bytes", "command"
PUBLISHED = "published"
"""Attribute of a max-batch study: the hash of the result that its page shows, or that the page is of a search."""
VERSION_ATTRIBUTE, VERSION = "amp_track_version", 2
"""The version of everything that a study stores, the choices of its params included. Increase it with any change but
a new optional field."""
_JOB_RESULT: TypeAdapter[JobResult] = TypeAdapter(Json[JobResult])
PARTS = ("max-batch", "train", "seeds", "compare")
"""The parts of a study NAME, in the order in which they are created: NAME/max-batch, NAME/train, …"""
_NEAREST = 3
"""How many names an error lists."""
_NEARLY_AS_LONG = 0.9
"""A training that timed out after this fraction of the current --job-timeout is not repeated; clocks differ."""
_MOST_JOB_RESULTS = 10_000
"""Number of parsed job results that are kept in memory."""
_POLL_SECONDS, _SILENT_SECONDS = 0.1, 5
_log = logging.getLogger("amp_track.study")


def read(adapter: TypeAdapter[Value], stored: object, whose: str, what: str) -> Value:
    """Return a validated stored value. A damaged database or another version of amp_track may hold something else."""
    try:
        return adapter.validate_python(stored)
    except ValidationError as error:
        raise StoreFailed(
            f"This version of amp-track cannot read {what} of {whose}. Use another --study, or restore a backup of the "
            "storage."
        ) from error


def open_study(
    name: str, storage: Storage, url: str, *, objectives: Sequence[tuple[str, Direction]], settings: dict[str, str]
) -> optuna.Study:
    """Create or resume a study. End trials of dead processes as FAIL.

    `objectives` are names, which optuna-dashboard shows, with directions. The results depend on the `settings`.

    Raises:
        BadInput: the study exists with other settings, or another version of amp-track has created it.
    """
    names, directions = [name for name, _ in objectives], [direction for _, direction in objectives]
    check_settings(name, storage, settings, directions)
    with worker_lock(url, "study", storage=storage):
        study = optuna.create_study(study_name=name, storage=storage.cached, directions=directions, load_if_exists=True)
        if VERSION_ATTRIBUTE not in study.user_attrs:
            study.set_user_attr(VERSION_ATTRIBUTE, VERSION)
        if study.metric_names != names:
            study.set_metric_names(names)
        if _SETTINGS not in study.user_attrs:
            study.set_user_attr(_SETTINGS, json.dumps(settings))
    end_stale_trials(study)
    return study


def ask_in_turn(study: optuna.Study, url: str) -> None:
    """Lock the queue of a study while a search worker of this machine takes a trial from it.

    SQLite locks no rows: two search workers could take the same trial, and the slower one would fail with "Cannot tell
    a COMPLETE trial".
    """
    ask = study.ask

    def ask_locked(fixed_distributions: dict[str, BaseDistribution] | None = None) -> optuna.Trial:
        with store_lock(url):
            return ask(fixed_distributions)

    study.ask = ask_locked  # type: ignore[method-assign]


def check_settings(
    name: str, storage: Storage, settings: dict[str, str], directions: Sequence[Direction], *, joins: bool = False
) -> None:
    """Raise BadInput if a study of this name was created with other settings or by another version. Write nothing.

    `joins`: the command takes its settings from the study, so that a difference is due to this machine.
    """
    try:
        study_id = storage.get_study_id_from_name(name)
    except KeyError:
        return
    # Asked first: its creator stores the attributes before a trial. The cache reads trials that are needed later.
    has_trials = bool(storage.cached.get_all_trials(study_id, deepcopy=False))
    attributes = storage.get_study_user_attrs(study_id)
    if VERSION_ATTRIBUTE in attributes or has_trials:  # else it is just being created
        check_version(name, attributes)
    known: dict[str, str] = json.loads(attributes[_SETTINGS]) if _SETTINGS in attributes else settings
    # The device first: another device changes other settings, too.
    for setting in sorted(known.keys() | settings.keys(), key=lambda setting: (setting != "device", setting)):
        if known.get(setting) != settings.get(setting):
            fix = f"Set OMP_NUM_THREADS={known.get(setting)}" if setting == "threads" else "Use that setting"
            if joins and setting != "threads":
                fix = "Start its workers on matching machines"
            raise BadInput(
                f'Study "{name}" was created with {setting} {known.get(setting)}; '
                f"this {'machine' if joins else 'command'} has {settings.get(setting)}. "
                f"{fix}{'' if joins else ' or use another --study'}."
            )
    found = [direction.name.lower() for direction in storage.get_study_directions(study_id)]
    if found != list(directions):
        raise BadInput(
            f'Study "{name}" was created to {" and ".join(found)}; this command needs to {" and ".join(directions)}. '
            "Use another --study."
        )


def differing_only_in(
    settings: Collection[str], study: optuna.Study
) -> tuple[str, dict[str, tuple[str | None, str | None]]] | None:
    """Return the newest other study that differs from a part of a study in no other settings, or None.

    It is returned by its NAME, with the value of each differing setting then and now, None where there was none.
    """
    mine, (_, _, part) = json.loads(study.user_attrs[_SETTINGS]), study.study_name.partition("/")
    for other in reversed(optuna_internals.storage_of(study).get_all_studies()):
        name, _, other_part = other.study_name.partition("/")
        if other_part == part and other.user_attrs.get(VERSION_ATTRIBUTE) == VERSION:
            known = json.loads(other.user_attrs.get(_SETTINGS, "{}"))
            differing = {key for key in known.keys() | mine.keys() if known.get(key) != mine.get(key)}
            if differing and differing <= set(settings):
                return name, {key: (known.get(key), mine.get(key)) for key in sorted(differing)}
    return None


def check_version(name: str, user_attributes: Mapping[str, Any]) -> None:
    """Raise BadInput if another version of amp-track has created a study with these user attributes."""
    if user_attributes.get(VERSION_ATTRIBUTE) != VERSION:
        raise BadInput(f'Study "{name}" was created by another version of amp-track. Use another --study name.')


def name_worker(trial: optuna.Trial) -> None:
    """Record which process runs a trial, so that other search workers can check whether it is alive."""
    trial.set_user_attr(WORKER, liveness.this_process())


def polls(deadline: float) -> Iterator[None]:
    """Poll jobs of other search workers until the deadline of the monotonic clock; say so once if it takes long."""
    started, has_said = time.monotonic(), False
    while True:
        yield
        now = time.monotonic()
        if now > deadline:
            return
        if not has_said and now - started > _SILENT_SECONDS:
            _log.warning("waiting for a job of another search worker")
            has_said = True
        interrupts.sleep(_POLL_SECONDS)


def end_stale_trials(study: optuna.Study) -> list[FrozenTrial]:
    """End every RUNNING trial whose process has died as FAIL, and its MLflow run. Return all trials.

    A dead process of this host is detected at once. One of another host, or one that is stopped, is detected when the
    grace period since its last heartbeat has passed.
    """
    trials = study.get_trials(deepcopy=False)
    if not any(trial.state is TrialState.RUNNING for trial in trials):
        return trials
    optuna.storages.fail_stale_trials(study)
    trials = study.get_trials(deepcopy=False)
    gone = [trial for trial in trials if trial.state is TrialState.RUNNING and _has_died(trial)]
    for trial in gone:
        # The trial may have ended, and then its process, since the trials were read.
        with contextlib.suppress(UpdateFinishedTrialError):  # another search worker has ended it at the same moment
            if study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True).state is TrialState.FAIL:
                report_stale_trial(study, trial)
    return study.get_trials(deepcopy=False) if gone else trials


def _has_died(trial: FrozenTrial) -> bool:
    worker = trial.user_attrs.get(WORKER)
    return worker is not None and liveness.is_gone(worker)


def on_stale_trial(shared: Storage, end_run: Callable[[str, int], None]) -> None:
    """Register a callback `end_run(study name, trial number)` for trials whose measurement is discarded.

    It is called if this process finds the trial's process dead, or was itself considered dead. The run may have
    finished, but the trial has not: it runs again.
    """
    shared.stale_trial_callback = lambda study, trial: end_run(study.study_name, trial.number)


def report_stale_trial(study: optuna.Study, trial: FrozenTrial) -> None:
    """Call the stale-trial callback for a trial that this process has failed."""
    shared = optuna_internals.without_cache(optuna_internals.storage_of(study))
    if isinstance(shared, optuna_internals.StaleTrialHeartbeat) and shared.stale_trial_callback is not None:
        shared.stale_trial_callback(study, trial)


def one_commit(trial: optuna.Trial) -> contextlib.AbstractContextManager[None]:
    """Store the params that a block chooses for a trial in one commit of a database."""
    shared = optuna_internals.without_cache(trial.storage)
    return shared.one_commit() if isinstance(shared, SharedStorage) else contextlib.nullcontext()


def set_attributes(trial: optuna.Trial, user: Mapping[str, Any], *, system: Mapping[str, Any] | None = None) -> None:
    """Set attributes of a running trial, in one commit of a database: each commit waits for the disk."""
    shared, trial_id = optuna_internals.without_cache(trial.storage), optuna_internals.id_of(trial)
    if isinstance(shared, SharedStorage):
        shared.set_trial_attributes(trial_id, user, system or {})
        return
    for name, value in user.items():
        shared.set_trial_user_attr(trial_id, name, value)
    for name, value in (system or {}).items():
        shared.set_trial_system_attr(trial_id, name, value)


def remember(
    trial: optuna.Trial,
    job_result: JobResult,
    run_id: str,
    *,
    constraint: tuple[str, float] | None = None,
    columns: Mapping[str, Any] | None = None,
) -> None:
    """Store the job result with the trial: the study is then enough to resume and to report.

    The constraint has a name and a violation; one of at most 0 is feasible. The dashboard shows the `columns`.
    """
    system: dict[str, Any] = {JOB_RESULT: json.dumps(dataclasses.asdict(job_result))}  # no column of the dashboard
    if constraint is not None:
        name, violation = constraint
        system |= {optuna_internals.constraint_attribute(name): violation, dashboard.CONSTRAINTS: [violation]}
    set_attributes(trial, {RUN_ID: run_id, **(columns or {})}, system=system)
    if not job_result.fits:
        dashboard.note_failure(trial, job_result)


def job_result_of(trial: FrozenTrial) -> JobResult | None:
    """Return the job result that `remember` has stored; None for a trial that died before."""
    text = trial.system_attrs.get(JOB_RESULT)
    return None if text is None else _parsed_job_result(text)


def was_given_up_sooner(trial: FrozenTrial, job_timeout_seconds: float | None) -> bool:
    """Return whether a training timed out within a shorter limit than the current one, so that it is made again."""
    job_result = job_result_of(trial)
    if job_result is None or job_result.status is not JobStatus.TIMED_OUT:
        return False
    return job_result.wall_seconds < _NEARLY_AS_LONG * (job_timeout_seconds or math.inf)


@functools.lru_cache(maxsize=_MOST_JOB_RESULTS)
def _parsed_job_result(text: str) -> JobResult:
    """Parse a job result once: search workers read all of a study at every poll, and stored ones never change."""
    return read(_JOB_RESULT, text, "a trial", JOB_RESULT)


def run_id_of(trial: FrozenTrial) -> str:
    """Return the id of the MLflow run of a trial, or an empty string."""
    return str(trial.user_attrs.get(RUN_ID, ""))


def parent_run_id_of(study: optuna.Study | optuna_internals.FrozenStudy) -> str | None:
    """Return the id of the MLflow parent run of a study; None if it has none yet."""
    return study.user_attrs.get(PARENT_RUN_ID)


def free_bytes_of(study: optuna.Study) -> int | None:
    """Return the free bytes at the start of a study without a budget; None if unknown."""
    return study.user_attrs.get(FREE_BYTES)


def command_of(study: optuna.Study, adapter: TypeAdapter[Value]) -> Value | None:
    """Return the stored command, validated by `adapter`; None if the study is just being created.

    Raises:
        BadInput: another version of amp-track has created the study.
    """
    if (stored := study.user_attrs.get(COMMAND)) is None:
        return None
    check_version(study.study_name, study.user_attrs)
    return read(adapter, stored, study.study_name, COMMAND)


def finished_trials(study: optuna.Study, *others: str) -> dict[str, dict[int, bool]]:
    """Return whether the measurement of each finished trial is stored, by study name and trial number.

    The trials are those of `study` and of the existing studies among `others`.
    """
    shared = optuna_internals.storage_of(study)
    known = [name for name in optuna.get_all_study_names(shared) if name in others]
    studies = [study, *(optuna.load_study(study_name=name, storage=shared) for name in known)]
    for each in studies:
        end_stale_trials(each)
    return {
        each.study_name: {
            trial.number: trial.state is not TrialState.FAIL  # a FAIL trial has died: its job runs again
            for trial in each.get_trials(deepcopy=False)
            if trial.state.is_finished()
        }
        for each in studies
    }


def parts_by_study(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the parts of each study in Optuna, in the order of `PARTS`, by NAME.

    `names` are those of all studies of a storage; studies of other programs are left out.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        study, _, part = name.partition("/")
        if part.partition("/")[0] in PARTS:
            found.setdefault(study, []).append(name)
    return {
        study: sorted(parts, key=lambda name: (PARTS.index(name.split("/")[1]), name)) for study, parts in found.items()
    }


def known_study(asked: str, known: Iterable[str], *, storage: str) -> str:
    """Return the name of an existing study; accept a part of it, such as NAME/max-batch.

    Raises:
        BadInput: there is no such study. The message lists the nearest names.
    """
    names = list(known)
    study = asked.partition("/")[0]
    if study in names:
        return study
    if not names:
        raise BadInput(f"STUDY: got {asked}, but {storage} holds no studies. Create one with amp-track max-batch.")
    nearest = difflib.get_close_matches(study, names, n=_NEAREST, cutoff=0.0)
    raise BadInput(
        f"STUDY: got {asked}, expected a study in {storage}, such as {', '.join(nearest)}. Use one of its studies, "
        "or another --storage."
    )


@dataclass(frozen=True)
class Part:
    """A part of a study, such as NAME/max-batch, as Optuna knows it."""

    name: str
    study_id: int
    parent_run_id: str | None
    """The id of the study's MLflow parent run, if this part has stored it."""


def studies(url: str) -> dict[str, tuple[Part, ...]]:
    """Return the parts of each study of a storage, in the order in which they are created, by NAME. Write nothing.

    Raises:
        BadInput: there is no storage yet, or another version of Optuna created it.
    """
    with reading(url) as storage:
        known = {study.study_name: study for study in storage.get_all_studies()}
        return {
            name: tuple(
                Part(part, storage.get_study_id_from_name(part), parent_run_id_of(known[part])) for part in parts
            )
            for name, parts in parts_by_study(known).items()
        }


def have_measured(url: str, parts: Iterable[Part]) -> bool:
    """Return whether any trial of these parts of a study has a job result. Raise BadInput if there is no storage."""
    with reading(url) as storage:
        return any(
            job_result_of(trial) is not None
            for part in parts
            for trial in storage.get_all_trials(part.study_id, deepcopy=False)
            if trial.state.is_finished()
        )
