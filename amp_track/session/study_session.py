"""The Optuna studies of one command, the settings that their results depend on, and their MLflow parent run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amp_track.config.cli_params import Affects, flags_of
from amp_track.config.job import Job
from amp_track.memory_plan.allocator import SETTINGS_VARIABLES
from amp_track.records.errors import StoreFailed
from amp_track.records.units import format_bytes
from amp_track.report import progress
from amp_track.session.probe_jobs import MOST_EPOCHS
from amp_track.session.publish import LatePlots
from amp_track.session.session import Session
from amp_track.targets import source
from amp_track.training.devices import heap

if TYPE_CHECKING:
    from amp_track.study.types import Direction, Storage, Study
    from amp_track.tracking import Run, Tracker


_MAXIMIZE: Direction = "maximize"
_SOURCE = "workload source"
"""The setting that another version of the target's files changes."""
_METER_VERSION = 10
"""Increase it when limits, meter or confirmation runs change so that max batches found before may not hold."""
_CUDA_VARIABLES = (*SETTINGS_VARIABLES, "CUBLAS_WORKSPACE_CONFIG")
"""Environment variables that change the memory that a training takes on a GPU."""
_MOST_DRIFT = 0.05
"""Relative change of free memory above which a study without a memory budget prints a warning."""


class Studies:
    """The studies of one command: NAME/max-batch, NAME/train, NAME/seeds and NAME/compare, in one storage.

    The storage is opened on first use, unless an open one is given.
    """

    def __init__(self, session: Session, *, storage: Storage | None = None) -> None:
        self.session = session
        self._opened = storage
        self._url = session.request.stores.storage
        self.name = session.request.stores.study or _default_study_name(session)

    @property
    def storage(self) -> Storage:
        """The open storage."""
        from amp_track.study import opening

        self._opened = self._opened or opening.open_storage(self._url)
        return self._opened

    def close(self) -> None:
        """Close the storage, if it was opened."""
        if self._opened is not None:
            self._opened.close()

    def check(self, *parts: str) -> None:
        """Raise BadInput if a part exists and was created with other settings. Write nothing."""
        from amp_track.study import storage

        request = self.session.request
        if request.stores.optuna.exists():
            for part in parts:
                settings, directions = _settings(self.session, part), [each for _, each in self._objectives(part)]
                storage.check_settings(f"{self.name}/{part}", self.storage, settings, directions, joins=request.joins)

    def open(self, part: str) -> Study:
        """Open a part of the study, new or resumed."""
        from amp_track.study import storage

        study = storage.open_study(
            f"{self.name}/{part}",
            self.storage,
            self._url,
            objectives=self._objectives(part),
            settings=_settings(self.session, part),
        )
        if part != "max-batch":  # the max-batch sampler assigns its probes itself, without a queue
            storage.ask_in_turn(study, self._url)
        return study

    def existing(self, part: str) -> Study | None:
        """Return a part of the study for reading; None if it does not exist. Write nothing."""
        from amp_track.study import opening

        if not self.session.request.stores.optuna.exists():  # to open it would create it
            return None
        return opening.load_study(f"{self.name}/{part}", self.storage)

    def end_stale_trials(self, *parts: str) -> None:
        """End stale trials, also those of a part that this command no longer works on."""
        from amp_track.study import storage

        for study in map(self.existing, parts):
            if study is not None:
                storage.end_stale_trials(study)

    def lock(self, part: str) -> AbstractContextManager[None]:
        """Hold a lock of this storage that all search workers share; see `study.database.worker_lock`."""
        from amp_track.study.database import worker_lock

        return worker_lock(self._url, part, storage=self.storage)

    def free_bytes(self, study: Study) -> int:
        """Return the bytes that were free when the max-batch study began: without a budget they are its limit."""
        from amp_track.study import storage

        with self.lock("memory"):
            known_bytes = storage.free_bytes_of(study)
            if known_bytes is None:
                known_bytes = self.session.inspection.free_bytes
                study.set_user_attr(storage.FREE_BYTES, known_bytes)
        return known_bytes

    def _objectives(self, part: str) -> list[tuple[str, Direction]]:
        """Return the objectives of a part: names and directions."""
        better: Direction = "maximize" if self.session.inspection.higher_is_better else "minimize"
        metric, speed = [(self.session.inspection.metric_name, better)], [("samples/s", _MAXIMIZE)]
        names = {"max-batch": [("max batch", _MAXIMIZE)], "train": metric + speed, "seeds": metric, "compare": speed}
        return names[part]


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """A study's name and its MLflow parent run."""

    name: str
    run_id: str
    experiment_id: str
    id_of: Callable[[str], str]
    """Returns the id of a trial's run. A run that waited in the outbox gets its id when it is delivered."""


@dataclass(frozen=True)
class TrackedStudy:
    """An Optuna study whose trials are MLflow runs under one parent run."""

    session: Session
    studies: Studies
    study: Study
    tracker: Tracker
    parent: Run
    plots: LatePlots

    def open(self, part: str) -> TrackedStudy:
        """Open another part of the same study, under the same parent run."""
        return dataclasses.replace(self, study=self.studies.open(part))

    @property
    def run(self) -> StudyRun:
        """The run that stands for the study."""
        experiment_id = self.parent.experiment_id
        id_of = functools.partial(self.tracker.id_of, experiment_id=experiment_id)
        return StudyRun(name=self.studies.name, run_id=self.parent.run_id, experiment_id=experiment_id, id_of=id_of)


@contextmanager
def tracked(studies: Studies, study: Study, tracker: Tracker, *, given_run_id: str | None) -> Iterator[TrackedStudy]:
    """Open the MLflow parent run of a study, a new one or that of the resumed study. Close the studies at the end.

    The first part that is opened stores the id of the run. An existing run becomes the parent run if `given_run_id`
    names it and the study has none yet.
    """
    from amp_track.study import storage

    with closing(studies), ExitStack() as stack:
        # Otherwise two search workers that start at the same time would create a run each.
        with studies.lock(f"run of {study.study_name}"):
            known = first_known = storage.parent_run_id_of(study)
            if known is not None and not tracker.exists(known):
                known = None  # it is in another tracking store, or was deleted
            tags = {"amp_track.kind": "study", "amp_track.study": studies.name}
            parent = stack.enter_context(tracker.run(studies.name, tags=tags, run_id=known or given_run_id))
            if known is None:
                study.set_user_attr(storage.PARENT_RUN_ID, parent.run_id)
        if known is None:
            if first_known is None and studies.session.request.stores.study is None:  # else the name was chosen
                _say_what_has_changed(studies, study)
            _describe(studies.session, parent)
        elif given_run_id is not None and known != given_run_id:
            with tracker.run(f"resumes {studies.name}", run_id=given_run_id, tags={"amp_track.continues": known}):
                pass
        plots = stack.enter_context(LatePlots())
        if known is not None:
            _resume(studies, study, tracker, known)
        # From now on, end the run of each trial that this process finds, or that was taken for, stale.
        storage.on_stale_trial(studies.storage, functools.partial(tracker.kill_run, parent.run_id))
        try:
            yield TrackedStudy(studies.session, studies, study, tracker, parent, plots)
        except KeyboardInterrupt:
            progress.say("the same command resumes where it stopped")
            with suppress(StoreFailed):  # the interrupt may have ended the wait for the database
                if any(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False)):
                    name = shlex.quote(name_for_commands(study))
                    report = studies.session.request.stores.command("amp-track", "report", name)
                    progress.say(f"what is known so far: {report}")
            raise


def name_for_commands(study: Study) -> str:
    """Return the name by which `report` and `worker` find a study: NAME, or NAME/compare.

    A comparison may have max batches beside it, which NAME means then.
    """
    return study.study_name.removesuffix("/max-batch")


def _describe(session: Session, parent: Run) -> None:
    """Log the params that all trials share, the options that are not the default, and the skipped precisions."""
    from amp_track import tracking

    request, options = session.request, session.request.max_batch_options
    differing = {"precision", "probe", "probe_to_the_end", "worst_batch", "speed_readings", "epoch_steps"}
    given = {flag.field.name: str(getattr(options, flag.field.name)) for flag in options.changed()}
    if request.compare_options is None:
        differing.add("batch_size")
    elif request.compare_options.vary is not None:
        differing.add("options")
        given["vary"] = request.compare_options.vary[0]
    if request.search_options.lr_range is not None:
        differing.add("learning_rate")
    if request.search_options.seeds > 1:
        differing.add("seed")
    tracking.describe(parent, session.job, session.inspection, kind="study", varied=differing)
    parent.params(given)
    parent.tags({f"amp_track.skipped.{name}": reason for name, reason in session.unsupported.items()})
    parent.flush()


def _say_what_has_changed(studies: Studies, study: Study) -> None:
    """Print why a study is new, if another one differs only in what no flag of the command says."""
    from amp_track.study import storage

    session = studies.session
    hashed = {
        _SOURCE: f"{session.job.workload} or a file that it imports has changed",
        "dataset": "the data has changed",
        "meter": "the memory meter of amp_track has changed",
    }
    named = {"threads": "the number of threads", "allocator": "GLIBC_TUNABLES", "torch": "torch"}
    named |= {name: name for name in (*source.LIBRARIES, *_CUDA_VARIABLES)}
    if (found := storage.differing_only_in({*hashed, *named}, study)) is not None:
        other, values = found
        changes = [
            hashed.get(key) or f"{named[key]} is {now or 'not there'} instead of {then or 'not there'}"
            for key, (then, now) in values.items()
        ]
        progress.say(f"new study {studies.name}: since study {other}, {' and '.join(changes)}")


def _resume(studies: Studies, study: Study, tracker: Tracker, parent_run_id: str) -> None:
    """Print that the study is resumed, warn of other free memory, and end the runs of killed processes."""
    from amp_track.study import storage

    progress.say(f"resuming study {studies.name}")
    then_bytes, now_bytes = storage.free_bytes_of(study), studies.session.inspection.free_bytes
    has_budget = studies.session.job.memory_budget_bytes is not None
    if then_bytes is not None and not has_budget and abs(now_bytes - then_bytes) > _MOST_DRIFT * then_bytes:
        progress.say(
            f"the max batches of this study were found with {format_bytes(then_bytes)} free, now "
            f"{format_bytes(now_bytes)} are free; set a --memory-budget, or use another --study"
        )
    trials = storage.finished_trials(study, f"{studies.name}/train", f"{studies.name}/seeds")
    if killed := tracker.kill_orphans(parent_run_id, trials):
        progress.say(f"ended {killed} stale {'runs' if killed > 1 else 'run'} of killed processes")


def _settings(session: Session, part: str) -> dict[str, str]:
    """Return every setting that the results of a part of a study depend on, by name."""
    if part == "max-batch":
        return _max_batch_settings(session)
    # Each trial of a search chooses the rest.
    training = (
        _max_batch_settings(session)
        | _settings_that_affect(session.job, Affects.TRAINING)
        | {"lr_range": str(session.request.search_options.lr_range), "precision": ",".join(session.precisions)}
    )
    if part != "compare":
        return training
    # Compared values, seeds and data (which may depend on the option) differ between trainings: such a study may grow.
    assert session.request.compare_options is not None
    vary, _ = session.request.compare_options.vary or ("nothing", ())
    options = ",".join(f"{name}={value}" for name, value in session.job.options if name != vary)
    common = {name: value for name, value in training.items() if name not in ("seed", "precision", "dataset")}
    return common | {"batch_size": str(session.job.batch_size), "options": options, "vary": vary}


def _max_batch_settings(session: Session) -> dict[str, str]:
    """Return every setting that a proven max batch depends on, by name."""
    options, inspection, job = session.request.max_batch_options, session.inspection, session.job
    # Kernels of an evaluation stay loaded: only trainings that continue after it need memory for them. A confirmation
    # run ends with the first steps of an additional epoch.
    epochs, most = job.epochs or 1, MOST_EPOCHS + 1
    training = f"{job.steps} steps" if job.steps is not None else f"{most} or more" if epochs >= most else str(epochs)
    on_cpu = {
        # Also if another thread has added huge pages meanwhile, to start a fork server.
        "allocator": heap.with_huge_pages(os.environ.get(heap.TUNABLES_VARIABLE, "")),
        "threads": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
    }  # GPU memory depends on neither, and machines with the same GPU differ in both
    on_cuda = {name: value for name in _CUDA_VARIABLES if (value := os.environ.get(name))}
    return _settings_that_affect(job, Affects.MAX_BATCH) | {
        **({"command": shlex.join(job.command)} if job.command else {}),
        "workload": inspection.workload_name,
        _SOURCE: inspection.workload_digest,
        "device": inspection.hardware.title,
        "dataset": inspection.dataset_digest,
        "max_batch_size": str(options.max_batch_size),
        "headroom": repr(options.headroom),
        "confirm_steps": str(options.confirm_steps),
        "checkpoints": "none" if job.checkpoint_every is None else "some",
        "accumulation": "none" if options.effective_batch_size is None else "some",
        "epochs": training,
        "torch": dict(inspection.versions)["torch"],
        **dict(inspection.libraries),
        "meter": str(_METER_VERSION),
        **{"cpu": on_cpu, "cuda": on_cuda}.get(inspection.hardware.kind, {}),
    }


def _settings_that_affect(job: Job, what: Affects) -> dict[str, str]:
    params, names = job.params(), [flag.field.name for flag in flags_of(Job) if flag.setting.affects is what]
    return {name: params[name] for name in names if name in params}


def _default_study_name(session: Session) -> str:
    """Return a name derived from the settings that the max batches, or a comparison, depend on.

    So max-batch and search share a study. A search that only trains otherwise has the same name: `check` rejects it.
    """
    settings = _settings(session, "max-batch" if session.request.compare_options is None else "compare")
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]
    budget = session.job.memory_budget_bytes
    parts = [session.job.short_name, session.inspection.device.replace(":", "")]
    parts += [format_bytes(budget).replace(" ", "")] if budget else []
    return "-".join([*parts, digest])
