"""What one command has found out and opened: good arguments first, then a fresh process that looks at device and
workload, then the stores, then jobs one after another."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from amp_track.commands.request import Request
from amp_track.commands.session import checks, store_checks
from amp_track.commands.session.keep_curves import kept_curves
from amp_track.planner.frontier import Limit
from amp_track.records import addresses
from amp_track.records.events import Event
from amp_track.records.inspection import Inspection, resolve
from amp_track.records.job import Job, JobFolder, loads_in_its_own_process
from amp_track.records.outcome import Outcome
from amp_track.records.steps import steps_per_epoch, synthetic_samples, total_steps
from amp_track.records.values import PRECISIONS, format_bytes
from amp_track.report import advice, progress
from amp_track.sandbox.sandbox import Sandbox
from amp_track.workers import processes
from amp_track.workers.locks import store_lock

if TYPE_CHECKING:  # imported late: mlflow and optuna take two seconds, and bad arguments should not
    import optuna

    from amp_track.study.edge_sampler import EdgeSampler, Task
    from amp_track.tracking import Run, Tracker

Direction = Literal["minimize", "maximize"]
"""Of an objective."""
_LARGEST_SYNTHETIC_BATCH = 2**20
_STEPS_AFTER_AN_EPOCH = 2


class Session:
    """One command at work. Make it with `prepare`."""

    def __init__(self, request: Request, sandbox: Sandbox, found: Inspection, precisions: tuple[str, ...]) -> None:
        self.request = request
        self.sandbox = sandbox
        self.inspection = found
        self.precisions = precisions
        self.job = resolve(request.job, found)
        self.tracking_uri = addresses.tracking_uri(request.stores.tracking_uri)
        self.study_name = request.stores.study or self._default_study_name()
        self._storage: optuna.storages.RDBStorage | None = None

    @classmethod
    def prepare(cls, request: Request, precisions: tuple[str, ...] | None) -> Session:
        """Judge everything that can be judged before anything is written; the cheap things before torch is imported."""
        tracking_uri = addresses.tracking_uri(request.stores.tracking_uri)
        store_checks.check_tracking("--tracking-uri", tracking_uri)
        store_checks.check("--storage", request.stores.storage)
        store_checks.check_apart(tracking_uri, request.stores.storage)
        return cls.prepare_readonly(request, precisions)

    @classmethod
    def prepare_readonly(cls, request: Request, precisions: tuple[str, ...] | None) -> Session:
        """As `prepare`, for a command that writes nothing."""
        checks.workload_exists(request.job.workload)
        sandbox = Sandbox(request.job.workload)
        with progress.working("importing torch, looking at device and workload"):
            found = sandbox.inspect(request.job)
        checks.check_supported(request, found, precisions or ())
        if precisions is None:
            precisions = tuple(name for name in PRECISIONS if found.support(name).supported)
        return cls(request, sandbox, found, precisions)

    def with_options(self, options: tuple[tuple[str, str], ...]) -> Session:
        """The same command with other options of the workload. Raises BadInput if it does not take them."""
        request = dataclasses.replace(self.request, job=dataclasses.replace(self.request.job, options=options))
        found = self.sandbox.inspect(request.job)
        return Session(request, self.sandbox, found, self.precisions)

    @property
    def skipped(self) -> dict[str, str]:
        """The precisions that are left out, with the reason."""
        return self.unsupported | {
            name: "not asked for" for name in PRECISIONS if name not in self.precisions and name not in self.unsupported
        }

    @property
    def unsupported(self) -> dict[str, str]:
        """The precisions this device lacks, with the reason."""
        return {name: support.reason for name, support in self.inspection.precisions if not support.supported}

    @property
    def limit(self) -> Limit:
        """The largest batch worth probing. Synthetic batches have no data set to end at."""
        limits = []
        if not self.job.synthetic:
            limits.append(Limit(max(self.inspection.training_samples // self.job.processes, 1), "dataset"))
        if self.request.fit_options.max_batch_size is not None:
            limits.append(Limit(self.request.fit_options.max_batch_size, "max_batch_size"))
        return min(limits or [Limit(_LARGEST_SYNTHETIC_BATCH, "max_batch_size")], key=lambda limit: limit.batch_size)

    def job_of(self, task: Task, budget_bytes: int | None) -> Job:
        """The job of one task of the fit study, within `budget_bytes`."""
        accumulate = self.job.accumulate
        if self.request.fit_options.effective_batch_size is not None:
            accumulate = 2  # what is found will be accumulated: gradients are held while the next batch runs
        job = dataclasses.replace(
            self.job,
            precision=task.precision,
            batch_size=task.batch_size,
            memory_budget_bytes=budget_bytes,
            accumulate=accumulate,
            probe=task.kind != "confirm",
            loader_workers=0
            if loads_in_its_own_process(self.inspection.device_kind, budget_bytes)
            else self.job.loader_workers,
            checkpoint_every=None,
        )
        return job if job.probe else dataclasses.replace(job, epochs=None, steps=self._confirm_steps(job))

    def _confirm_steps(self, job: Job) -> int:
        """By default an epoch, its evaluation, and the first steps after it: as much as changes memory."""
        if (asked := self.request.fit_options.confirm_steps) is not None:
            return asked
        samples = self._training_samples(job)
        return min(total_steps(job, samples), steps_per_epoch(job, samples) + _STEPS_AFTER_AN_EPOCH)

    def _training_samples(self, job: Job) -> int:
        assert job.batch_size is not None
        return synthetic_samples(job) if job.synthetic else self.inspection.training_samples

    def fit_budget_bytes(self, free_bytes: int) -> int | None:
        """What a probe may take: the budget less the headroom; None for no limit but the device's own."""
        headroom = self.request.fit_options.headroom
        budget = self.job.memory_budget_bytes
        if headroom is None:
            return budget
        budget = budget if budget is not None else free_bytes
        return budget - headroom.of(budget)

    def edge_settings(self) -> dict[str, str]:
        """What a proven edge depends on: with another of these it is another edge."""
        params = self.job.params()
        depends_on = (
            "device",
            "memory_budget_bytes",
            "processes",
            "accumulate",
            "clip_norm",
            "channels_last",
            "compile",
            "diagnose_every",
            "synthetic",
        )
        edges = self.request.fit_options
        settings = {name: params[name] for name in (*depends_on, "options")}
        # The first evaluation leaves kernels behind: only trainings that go on after it need memory for them.
        training = f"{self.job.steps} steps" if self.job.steps is not None else str(min(self.job.epochs or 1, 2))
        return settings | {
            "workload": self.inspection.workload_name,
            "workload source": self.inspection.workload_digest,
            "device name": self.inspection.device_name,
            "dataset": self.inspection.dataset_digest,
            "max_batch_size": str(edges.max_batch_size),
            "headroom": repr(edges.headroom),
            "confirm_steps": str(edges.confirm_steps),
            "accumulation": "none" if edges.effective_batch_size is None else "some",
            "epochs": training,
            "torch": dict(self.inspection.versions)["torch"],
        }

    def training_settings(self) -> dict[str, str]:
        params = self.job.params()
        names = ("epochs", "steps", "learning_rate", "lr_scaling", "seed", "loader_workers")
        return self.edge_settings() | {
            **{name: params[name] for name in names},
            "search-lr": str(self.request.search_options.learning_rates),
            "precision": ",".join(self.precisions),
        }

    def compare_settings(self) -> dict[str, str]:
        """What the trainings of a comparison have in common. The values compared, the seeds and the data (which may
        depend on the option) are each training's own: a study of them may grow."""
        assert self.request.compare_options is not None
        over, _ = self.request.compare_options.over or ("nothing", ())
        params = self.job.params()
        own = ("seed", "precision", "dataset")
        common = {name: value for name, value in self.training_settings().items() if name not in own}
        options = ",".join(f"{name}={value}" for name, value in self.job.options if name != over)
        return common | {"batch_size": params["batch_size"], "options": options, "over": over}

    def _default_study_name(self) -> str:
        """The same for the same question, so that asking again goes on; another for another question."""
        settings = self.edge_settings() if self.request.compare_options is None else self.compare_settings()
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]
        budget = self.job.memory_budget_bytes
        parts = [self.job.short_name, self.inspection.device.replace(":", "")]
        parts += [format_bytes(budget).replace(" ", "")] if budget else []
        return "-".join([*parts, digest])

    @property
    def storage(self) -> optuna.storages.RDBStorage:
        """Opened when first asked for."""
        from amp_track.study import storage

        if self._storage is None:
            self._storage = storage.open_storage(self.request.stores.storage)
        return self._storage

    def check_study_settings(self, *, training: bool) -> None:
        """Raises BadInput when a study of this name was made with other settings, before anything is written."""
        from amp_track.study import storage

        if not addresses.exists(self.request.stores.storage):
            return
        if self.request.compare_options is not None:
            storage.check_settings(f"{self.study_name}/compare", self.storage, self.compare_settings())
            return
        storage.check_settings(f"{self.study_name}/fit", self.storage, self.edge_settings())
        if training:
            for part in ("train", "seeds"):
                storage.check_settings(f"{self.study_name}/{part}", self.storage, self.training_settings())

    def open_tracker(self) -> Tracker:
        from amp_track.tracking import Tracker

        return Tracker(self.tracking_uri)

    def open_fit_study(self) -> tuple[optuna.Study, EdgeSampler]:
        """The study and its sampler. Without a budget its edges are those of the memory that was free when it began."""
        from amp_track.study import storage
        from amp_track.study.edge_sampler import EdgeSampler, Goal

        study = self._open_study("fit", ["maximize"], self.edge_settings())
        with store_lock(self.request.stores.storage):
            if storage.FREE_BYTES not in study.user_attrs:
                study.set_user_attr(storage.FREE_BYTES, self.inspection.free_bytes)
        free_bytes = study.user_attrs[storage.FREE_BYTES]
        budget_bytes = self.fit_budget_bytes(free_bytes)
        study.sampler = sampler = EdgeSampler(
            Goal(
                precisions=self.precisions,
                limit=self.limit,
                budget_bytes=budget_bytes if budget_bytes is not None else free_bytes,
                first_batch=self.inspection.batch_size,
                multiple_of=self.request.fit_options.multiple_of,
                confirm=self.request.fit_options.confirm_steps != 0,
            )
        )
        return study, sampler

    def open_train_study(self) -> optuna.Study:
        import optuna

        directions: list[Direction] = [self._direction_of_quality, "maximize"]
        return self._open_study("train", directions, self.training_settings(), optuna.samplers.TPESampler())

    def open_seeds_study(self) -> optuna.Study:
        return self._open_study("seeds", [self._direction_of_quality], self.training_settings())

    def open_compare_study(self) -> optuna.Study:
        return self._open_study("compare", ["maximize"], self.compare_settings())

    @property
    def _direction_of_quality(self) -> Direction:
        return "maximize" if self.inspection.higher_is_better else "minimize"

    def _open_study(
        self,
        part: str,
        directions: Sequence[Direction],
        settings: dict[str, str],
        sampler: optuna.samplers.BaseSampler | None = None,
    ) -> optuna.Study:
        from amp_track.study import storage

        url = self.request.stores.storage
        study = storage.open_study(
            f"{self.study_name}/{part}", self.storage, url, directions=directions, settings=settings, sampler=sampler
        )
        if part != "fit":  # whose sampler has claims of its own, and no queue
            storage.ask_in_turn(study, url)
        return study

    @contextmanager
    def study_run(self, tracker: Tracker, study: optuna.Study, *, given: str | None) -> Iterator[Run]:
        """The MLflow run that stands for the study: one, however often the study is gone on with.

        Args:
            tracker: where it is.
            study: remembers its id.
            given: the id of a run that is there already, to be this one if the study has none yet.
        """
        from amp_track import tracking
        from amp_track.study import storage

        known = study.user_attrs.get(storage.PARENT_RUN_ID)
        if known is not None and not tracker.exists(known):
            known = None  # another tracking store, or deleted there
        if known is not None and given is not None and known != given:
            with tracker.run(f"goes on with {self.study_name}", run_id=given, tags={"amp_track.continues": known}):
                pass
        tags = {"amp_track.kind": "study", "amp_track.study": self.study_name}
        with tracker.run(self.study_name, tags=tags, run_id=known or given) as parent:
            if known is None:
                study.set_user_attr(storage.PARENT_RUN_ID, parent.run_id)
                tracking.describe(parent, self.job, self.inspection, kind="study", with_params=False)
                parent.tags({f"amp_track.skipped.{name}": reason for name, reason in self.unsupported.items()})
                parent.flush()
            else:
                progress.say(f"going on with study {self.study_name}")
                if storage.FREE_BYTES in study.user_attrs:
                    self._warn_of_other_free_memory(study.user_attrs[storage.FREE_BYTES])
                killed = tracker.kill_orphans(
                    known, storage.finished_trials(study, f"{self.study_name}/train", f"{self.study_name}/seeds")
                )
                if killed:
                    progress.say(f"ended {killed} runs whose process had died")
            yield parent

    def _warn_of_other_free_memory(self, then_bytes: int) -> None:
        """Without a budget an edge is that of the memory that was free."""
        now_bytes = self.inspection.free_bytes
        if self.job.memory_budget_bytes is None and abs(now_bytes / then_bytes - 1) > 0.05:
            progress.say(
                f"its edges are for the {format_bytes(then_bytes)} that were free then, now {format_bytes(now_bytes)} "
                "are: give a --memory-budget, or another --study to find them anew"
            )

    def run_tracked(
        self,
        job: Job,
        run: Run,
        *,
        kind: str,
        title: str,
        epoch_lines: bool = False,
        predicted_bytes: int | None = None,
        resume_from: Path | None = None,
        keep_weights: bool = False,
    ) -> Outcome:
        """Run a job and log it to `run`, whatever comes of it; or go on from a checkpoint with one that is there."""
        from amp_track import tracking

        if resume_from is None:
            tracking.describe(run, job, self.inspection, kind=kind)
        run.predicted(predicted_bytes)
        run.flush()
        quality_name = self.inspection.quality_name
        per_epoch = steps_per_epoch(job, self._training_samples(job))
        is_training = kind == "train"
        with (
            kept_curves(run, title, quality_name, steps_per_epoch=per_epoch)
            if is_training
            else nullcontext() as curves,
            progress.following(job, title, quality_name, epoch_lines=epoch_lines) as show,
            processes.scratch_folder() if is_training else nullcontext() as folder,
        ):

            def on_event(event: Event) -> None:
                if curves is not None:
                    curves.add(event)
                run.event(event, quality_name)
                show(event)

            resumed = str(resume_from) if resume_from is not None else None
            job_folder = None
            if folder is not None:
                job_folder = JobFolder(path=str(folder), resume_from=resumed, keep_weights=keep_weights)
            outcome = self.sandbox.run(job, on_event, folder=job_folder)
        run.outcome(outcome)
        if words := advice.explain(outcome, job.precision, loader_workers=job.loader_workers):
            run.tags({"amp_track.advice": "\n".join(words)})
        return outcome

    def bytes_needed(self, job: Job) -> int | None:
        """The smallest budget a job would fit; None when it has no budget, or does not run without one either."""
        if job.memory_budget_bytes is None:
            return None
        outcome = self.sandbox.measure(job)
        return outcome.max_memory_bytes if outcome.fits else None
