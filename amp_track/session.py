"""What one command has found out and opened: good arguments first, then a fresh process that looks at device and
workload, then the stores, then jobs one after another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from amp_track import progress, stores
from amp_track.errors import BadInput
from amp_track.frontier import Limit
from amp_track.job import PROBE_EPOCHS, Event, Inspection, Job, Outcome, resolve
from amp_track.request import Request
from amp_track.sandbox import Sandbox
from amp_track.values import PRECISIONS, format_bytes

if TYPE_CHECKING:  # imported late: mlflow and optuna take two seconds, and bad arguments should not
    import optuna

    from amp_track.study.fit import EdgeSampler
    from amp_track.tracking import Run, Tracker

_LARGEST_SYNTHETIC_BATCH = 2**20


class Session:
    """One command at work. Make it with `prepare`."""

    def __init__(self, request: Request, sandbox: Sandbox, found: Inspection, precisions: tuple[str, ...]) -> None:
        self.request = request
        self.sandbox = sandbox
        self.found = found
        self.precisions = precisions
        self.job = resolve(request.job, found)
        self.tracking_uri = stores.tracking_uri(request.stores.tracking_uri)
        self.study_name = request.stores.study or self._default_study_name()
        self._storage: optuna.storages.RDBStorage | None = None

    @classmethod
    def prepare(cls, request: Request, precisions: tuple[str, ...] | None) -> Session:
        """Judge everything that can be judged before anything is written; the cheap things before torch is imported."""
        workload = request.job.workload
        if ":" not in workload and not Path(workload).is_file():
            raise BadInput(
                f"{workload}: got no such file, expected a Python file with one Workload or package.module:Class; "
                "see experiments/digits.py for one to copy"
            )
        tracking_uri = stores.tracking_uri(request.stores.tracking_uri)
        stores.check_tracking("--tracking-uri", tracking_uri)
        stores.check("--storage", request.stores.storage)
        stores.check_apart(tracking_uri, request.stores.storage)
        sandbox = Sandbox(workload)
        with progress.working("importing torch, looking at device and workload"):
            found = sandbox.inspect(request.job)
        batch_size = request.job.batch_size
        if batch_size is not None and not request.job.synthetic and batch_size > found.training_samples:
            raise BadInput(
                f"--batch-size: got {batch_size}, expected at most the {found.training_samples} training samples that "
                f"{workload} has"
            )
        for precision in precisions or ():
            support = found.support(precision)
            if not support.supported:
                there = ", ".join(name for name in PRECISIONS if found.support(name).supported)
                raise BadInput(
                    f"--precision: got {precision}, expected one this device has ({there}): {support.reason}"
                )
        if precisions is None:
            precisions = tuple(name for name in PRECISIONS if found.support(name).supported)
        return cls(request, sandbox, found, precisions)

    @property
    def skipped(self) -> dict[str, str]:
        """The precisions that are left out, with the reason."""
        return self.unsupported | {
            name: "not asked for" for name in PRECISIONS if name not in self.precisions and name not in self.unsupported
        }

    @property
    def unsupported(self) -> dict[str, str]:
        """The precisions this device lacks, with the reason."""
        return {name: support.reason for name, support in self.found.precisions if not support.supported}

    @property
    def limit(self) -> Limit:
        """The largest batch worth probing. Synthetic batches have no data set to end at."""
        limits = []
        if not self.job.synthetic:
            limits.append(Limit(self.found.training_samples, "dataset"))
        if self.request.edges.max_batch_size is not None:
            limits.append(Limit(self.request.edges.max_batch_size, "max_batch_size"))
        return min(limits or [Limit(_LARGEST_SYNTHETIC_BATCH, "max_batch_size")], key=lambda limit: limit.batch_size)

    def edge_settings(self) -> dict[str, str]:
        """What a proven edge depends on: with another of these it is another edge."""
        params = self.job.params()
        depends_on = (
            "device",
            "memory_budget_bytes",
            "accumulate",
            "clip_norm",
            "channels_last",
            "compile",
            "synthetic",
        )
        settings = {name: params[name] for name in (*depends_on, "options")}
        epochs = self.job.epochs if self.job.epochs is not None else PROBE_EPOCHS
        return settings | {
            "workload": self.found.workload_name,
            "workload source": self.found.workload_digest,
            "device name": self.found.device_name,
            "dataset": self.found.dataset_digest,
            "max_batch_size": str(self.request.edges.max_batch_size),
            "probe epochs": str(min(epochs, PROBE_EPOCHS)),
            "torch": dict(self.found.versions)["torch"],
        }

    def training_settings(self) -> dict[str, str]:
        params = self.job.params()
        names = ("epochs", "steps", "learning_rate", "lr_scaling", "seed")
        return self.edge_settings() | {
            **{name: params[name] for name in names},
            "search-lr": str(self.request.trainings.learning_rates),
            "precision": ",".join(self.precisions),
        }

    def _default_study_name(self) -> str:
        """The same for the same question, so that asking again goes on; another for another question."""
        digest = hashlib.sha256(json.dumps(self.edge_settings(), sort_keys=True).encode()).hexdigest()[:6]
        budget = self.job.memory_budget_bytes
        parts = [self.job.short_name, self.found.device.replace(":", "")]
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

        if not stores.exists(self.request.stores.storage):
            return
        storage.check_settings(f"{self.study_name}/fit", self.storage, self.edge_settings())
        if training:
            storage.check_settings(f"{self.study_name}/train", self.storage, self.training_settings())

    def open_tracker(self) -> Tracker:
        from amp_track.tracking import Tracker

        return Tracker(self.tracking_uri)

    def open_fit_study(self) -> tuple[optuna.Study, EdgeSampler]:
        from amp_track.study import storage
        from amp_track.study.fit import EdgeSampler

        sampler = EdgeSampler(self.precisions, self.limit)
        study = storage.open_study(
            f"{self.study_name}/fit",
            self.storage,
            self.request.stores.storage,
            directions=["maximize"],
            settings=self.edge_settings(),
            sampler=sampler,
        )
        return study, sampler

    def open_train_study(self) -> optuna.Study:
        import optuna

        from amp_track.study import storage

        return storage.open_study(
            f"{self.study_name}/train",
            self.storage,
            self.request.stores.storage,
            directions=["maximize" if self.found.higher_is_better else "minimize", "maximize"],
            settings=self.training_settings(),
            sampler=optuna.samplers.TPESampler(),
        )

    @contextmanager
    def study_run(self, tracker: Tracker, fit_study: optuna.Study, *, given: str | None) -> Iterator[Run]:
        """The MLflow run that stands for the study: one, however often the study is gone on with.

        Args:
            tracker: where it is.
            fit_study: remembers its id.
            given: the id of a run that is there already, to be this one if the study has none yet.
        """
        from amp_track import tracking
        from amp_track.study import storage

        known = fit_study.user_attrs.get(storage.PARENT_RUN_ID)
        if known is not None and not tracker.exists(known):
            known = None  # another tracking store, or deleted there
        if known is not None and given is not None and known != given:
            with tracker.run(f"goes on with {self.study_name}", run_id=given, tags={"amp_track.continues": known}):
                pass
        tags = {"amp_track.kind": "study", "amp_track.study": self.study_name}
        with tracker.run(self.study_name, tags=tags, run_id=known or given) as parent:
            if known is None:
                fit_study.set_user_attr(storage.PARENT_RUN_ID, parent.run_id)
                tracking.describe(parent, self.job, self.found, kind="study", with_params=False)
                parent.tags({f"amp_track.skipped.{name}": reason for name, reason in self.unsupported.items()})
                parent.flush()
                fit_study.set_user_attr(storage.FREE_BYTES, self.found.free_bytes)
            else:
                progress.say(f"going on with study {self.study_name}")
                self._warn_of_other_free_memory(fit_study.user_attrs.get(storage.FREE_BYTES))
                killed = tracker.kill_orphans(known, storage.finished_trials(fit_study, f"{self.study_name}/train"))
                if killed:
                    progress.say(f"ended {killed} runs whose process had died")
            yield parent

    def _warn_of_other_free_memory(self, then_bytes: int | None) -> None:
        """Without a budget an edge is that of the memory that was free."""
        now_bytes = self.found.free_bytes
        if self.job.memory_budget_bytes is None and then_bytes and abs(now_bytes / then_bytes - 1) > 0.05:
            progress.say(
                f"its edges are for the {format_bytes(then_bytes)} that were free then, now {format_bytes(now_bytes)} "
                "are: give a --memory-budget, or another --study to find them anew"
            )

    def run_tracked(self, job: Job, run: Run, *, kind: str, title: str, epoch_lines: bool = False) -> Outcome:
        """Run a job and log it to `run`, whatever comes of it."""
        from amp_track import tracking

        tracking.describe(run, job, self.found, kind=kind)
        run.flush()
        quality_name = self.found.quality_name
        with progress.following(job, title, quality_name, epoch_lines=epoch_lines) as show:

            def on_event(event: Event) -> None:
                run.event(event, quality_name)
                show(event)

            outcome = self.sandbox.run(job, on_event)
        run.outcome(outcome)
        return outcome

    def bytes_needed(self, job: Job) -> int | None:
        """The smallest budget a job would fit; None when it has no budget, or does not run without one either."""
        if job.memory_budget_bytes is None:
            return None
        outcome = self.sandbox.measure(job)
        return outcome.max_memory_bytes if outcome.fits else None
