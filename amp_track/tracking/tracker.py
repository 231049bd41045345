"""An MLflow tracking store: its experiment, and runs that end with their block."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlflow
import requests
from mlflow.entities import Run as StoredRun
from pydantic import TypeAdapter, ValidationError

from amp_track.config.job import Job
from amp_track.records import metrics as names
from amp_track.records.errors import BadInput, StoreFailed
from amp_track.records.events import PLOTS
from amp_track.records.masking import masked
from amp_track.records.result import JobStatus
from amp_track.stores import addresses, sqlite_files
from amp_track.stores.errors import reason_of
from amp_track.stores.locks import store_lock
from amp_track.tracking import checkpoints, environment, mlflow_internals
from amp_track.tracking.outbox import Sender, find_by_key, is_among, is_key, sink_for
from amp_track.tracking.run import DIAGNOSIS, Run
from amp_track.tracking.tags import DIGEST_TAG, IMPORTS_TAG, PROCESS, is_at_work, process_tag, stale_runs
from amp_track.tracking.writes import STATUS_TAG, CreateRun, ResumeRun, killed, now_ms
from amp_track.workers import interrupts, liveness

_SECONDS_AFTER_AN_INTERRUPT, _SECONDS_OF_A_GUEST = 1.0, 30.0
"""How long an interrupted command, and a watched training at its end, continue to deliver to a server. The next command
delivers the rest."""

_FORBIDDEN = ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED")  # MLflow's codes for HTTP 401 and 403

_log = logging.getLogger("amp_track.tracking")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Resumable:
    """The information that is needed to resume a stopped training."""

    job: Job
    workload_digest: str
    workload_imports: tuple[str, ...] | None
    is_finished: bool


class Tracker:
    """An MLflow tracking store, with its tables created.

    New top-level runs go to `experiment`, else to the one that the environment names (MLFLOW_EXPERIMENT_ID or _NAME),
    else to `amp_track`.

    Args:
        uri: the store's address, which the command has checked.
        outbox_folder: where records wait for a server that does not answer; a database file needs none.
        resumes: whether runs are only resumed, wherever the environment would put new ones.

    Raises:
        BadInput: another version of MLflow created the store, or the environment names a run or an experiment that is
            not in it. Nothing is written then.
    """

    def __init__(
        self,
        uri: str,
        *,
        outbox_folder: Path = Path(addresses.OUTBOX),
        experiment: str | None = None,
        resumes: bool = False,
    ) -> None:
        mlflow_internals.hush()
        self.uri = uri
        self._experiment = experiment
        self._open_runs: list[Run] = []
        address = addresses.StoreAddress.parse(uri)
        if not address.exists() and not resumes:
            environment.check_new_store(uri, experiment)
        with store_lock(uri):
            if address.sqlite_file is not None:
                sqlite_files.make_tables(address.sqlite_file, mlflow_internals.empty_store)
            self._client = mlflow_internals.open_client(uri)
        self._sink = sink_for(uri, self._client, outbox_folder)
        if not resumes:
            self._check_environment()
        if isinstance(self._sink, Sender) and (left := self._sink.adopt_left_behind()):
            _log.warning("delivering %d records of an earlier command from %s", left, outbox_folder)
            self._sink.drain()  # else reads from the server would be out of date

    @functools.cached_property
    def _experiment_id(self) -> str:
        with store_lock(self.uri):
            return self._ask(lambda: environment.experiment(self._client, self._experiment), writes=True)

    def _check_environment(self) -> None:
        if (run_id := environment.run_id_of_environment()) is None:
            known = self._ask(lambda: environment.known_experiment(self._client, self._experiment))
            environment.check_artifact_store(self.uri, known)
        elif not self.exists(run_id):
            raise environment.not_there(self.uri, "MLFLOW_RUN_ID", run_id, "a run")

    @contextmanager
    def run(
        self, name: str, *, tags: dict[str, str], run_id: str | None = None, parent: Run | None = None
    ) -> Iterator[Run]:
        """Open a run that ends with its block: FINISHED, FAILED (exception) or KILLED (Ctrl-C or SIGTERM).

        The tags are set immediately. With `run_id`, an existing run is resumed.
        """
        # The process tag first: later commands use it to find stale RUNNING runs.
        tags = tags | process_tag()
        run = self._create(name, tags, parent) if run_id is None else self._reopen(run_id, tags)
        self._open_runs.append(run)
        status = "FAILED"
        try:
            if parent is None and (count := self._end_stale(run.experiment_id)):
                _log.warning("ended %d %s whose process had died", count, "runs" if count > 1 else "run")
            yield run
            run.flush()  # a run with missing records is not FINISHED
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            run.tags({STATUS_TAG: str(JobStatus.INTERRUPTED)})
            raise
        finally:
            self._open_runs.remove(run)
            try:
                run.diagnosed()
                run.flush()
            finally:
                run.end(status, is_shared=parent is None)
            if not self._open_runs:
                self._sink.finish(seconds=_SECONDS_AFTER_AN_INTERRUPT if status == "KILLED" else math.inf)

    @contextmanager
    def finished_run(self, run_id: str) -> Iterator[Run]:
        """Open a run to add artifacts and tags, without changing its status or end time."""
        existing = self._get(run_id)
        run = Run(self._sink, run_id, existing.info.experiment_id, existing=existing)
        yield run
        run.flush()
        self._sink.finish()

    @contextmanager
    def attached_run(self, run_id: str) -> Iterator[Run]:
        """Open a run of somebody else to add to it, without changing its status or end time, or reading the store."""
        run = Run(self._sink, run_id, experiment_id="", started_ms=now_ms())
        seconds = _SECONDS_OF_A_GUEST
        try:
            yield run
        except KeyboardInterrupt:
            seconds = _SECONDS_AFTER_AN_INTERRUPT
            raise
        finally:
            run.flush()
            self._sink.finish(seconds=seconds)

    def _create(self, name: str, tags: dict[str, str], parent: Run | None) -> Run:
        if parent is not None:
            tags = tags | {"mlflow.parentRunId": parent.run_id}
            parent.go_on(process_tag())
        experiment_id = parent.experiment_id if parent is not None else self._experiment_id
        tags = mlflow_internals.context_tags() | tags
        write = CreateRun(experiment_id=experiment_id, name=name, tags=tags, start_time_ms=now_ms())
        if parent is not None:
            return Run(self._sink, self._sink.create(write), experiment_id, started_ms=write.start_time_ms)
        made = self._ask(lambda: write.create(self._client), writes=True)
        return Run(self._sink, made.info.run_id, experiment_id, existing=made)

    def _reopen(self, run_id: str, tags: dict[str, str]) -> Run:
        existing = self._get(run_id)
        self._sink.write(run_id, ResumeRun())
        run = Run(self._sink, run_id, existing.info.experiment_id, existing=existing)
        run.tags(tags)
        run.flush()
        return run

    def _ask(self, question: Callable[[], Answer], *, writes: bool = False) -> Answer:
        """Return the answer of the store. Ctrl-C ends the wait, unless the question `writes` something.

        Raise StoreFailed if the server does not answer or rejects it; a missing object is MLflow's own error.
        """
        if not isinstance(self._sink, Sender):
            return question()
        try:
            with nullcontext() if writes else interrupts.waiting():
                return question()
        except (mlflow.exceptions.MlflowException, requests.RequestException) as error:  # the latter for artifacts
            code, response = getattr(error, "error_code", None), getattr(error, "response", None)
            if code in environment.NOT_THERE:
                raise
            if code in _FORBIDDEN or getattr(response, "status_code", None) in (401, 403):
                raise StoreFailed(
                    f"{masked(self.uri)} rejects the request ({reason_of(error)}). Add its host to --allowed-hosts of "
                    "the MLflow server, or log in with MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
                    "MLFLOW_TRACKING_TOKEN."
                ) from error
            raise StoreFailed(
                f"{masked(self.uri)} does not answer ({reason_of(error)}). Nothing is lost: run the same command again "
                "later."
            ) from error

    def _get(self, run_id: str) -> StoredRun:
        return self._ask(lambda: self._client.get_run(run_id))

    def resumable(self, run_id: str) -> Resumable:
        """Return the information that is needed to resume a run. Raise BadInput if it cannot be resumed now."""
        if not self.exists(run_id):
            raise BadInput(
                f"--resume: got {run_id}, expected a run in {masked(self.uri)}. Set its store with --tracking-uri."
            )
        run = self._get(run_id)
        tags = run.data.tags
        if tags.get("amp_track.kind") != "train" or "amp_track.job" not in tags:
            raise BadInput(f"--resume: run {run_id} was not created by amp-track train. Use the id of a run that was.")
        process = json.loads(tags[PROCESS])
        if run.info.status == "RUNNING" and not liveness.is_gone(process):
            raise BadInput(
                f"--resume: process {process['pid']} on {process['host']} is still training run {run_id}. Stop it "
                "first, or, if that machine no longer exists, end the run with MlflowClient().set_terminated."
            )
        try:
            imports = TypeAdapter(tuple[str, ...]).validate_json(tags.get(IMPORTS_TAG, ""))
        except ValidationError:  # the tag is missing or was cut
            imports = None
        is_finished = run.info.status == "FINISHED"
        return Resumable(Job.from_json(tags["amp_track.job"]), tags.get(DIGEST_TAG, ""), imports, is_finished)

    def fetch_checkpoint(self, run_id: str, folder: Path) -> tuple[Path, int]:
        """Download the newest checkpoint of a run into `folder`. Raise BadInput without one."""
        return self._ask(lambda: checkpoints.fetch(self._client, run_id, folder))

    def on_record(self, run_id: str, metric_name: str) -> dict[str, dict[int, float]]:
        """Return the training metrics that a run has logged, by name and by step or epoch."""

        def read(name: str) -> dict[int, float]:
            return {metric.step: metric.value for metric in self._client.get_metric_history(run_id, name)}

        return self._ask(lambda: {name: read(name) for name in names.streamed_metrics(metric_name)})

    def diagnosed(self, run_id: str, folder: Path) -> list[dict[str, Any]]:
        """Return the rows of the table of the diagnosed layers of a run; none if it has no such table."""

        def read() -> list[dict[str, Any]]:
            if DIAGNOSIS not in (file.path for file in self._client.list_artifacts(run_id)):
                return []
            with checkpoints.time_to_transfer(0):
                table = json.loads(Path(self._client.download_artifacts(run_id, DIAGNOSIS, str(folder))).read_text())
            return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]

        return self._ask(read)

    def fetch_plots(self, run_id: str, folder: Path) -> dict[str, Path]:
        """Download the plots of the workload into `folder` and return them by name; empty without any."""
        if not self._sink.drain() or not self.exists(run_id):
            return {}

        def download() -> list[Path]:
            files = [item.path for item in self._client.list_artifacts(run_id, PLOTS)]
            return [Path(self._client.download_artifacts(run_id, file, str(folder))) for file in files]

        return {file.stem: file for file in self._ask(download)}

    def id_of(self, run_id: str, experiment_id: str) -> str:
        """Return the id of a run of an experiment that was made when a server was down, if it has made it since."""
        known = self._sink.id_of(run_id)
        if not is_key(known):
            return known
        try:
            return self._ask(lambda: find_by_key(self._client, experiment_id, known)) or known
        except StoreFailed:
            return known

    def settle(self) -> None:
        """Wait until a server has accepted all writes, unless it does not answer."""
        self._sink.drain()

    def exists(self, run_id: str) -> bool:
        """Return whether the store has this run and it is not deleted. Raise errors of the store."""
        return self._ask(lambda: environment.active_run(self._client, run_id)) is not None

    def kill_orphans(self, parent_run_id: str, finished_trials: Mapping[str, Mapping[int, bool]]) -> int:
        """End the child runs whose process was killed as KILLED. Return their number.

        They are RUNNING although their Optuna trial is over, or FINISHED although their trial has no measurement,
        because the process was killed between the two. Runs of measured trials whose end waits to be sent are not
        among them. `finished_trials` says whether the study has the measurement of each finished trial, by the name of
        the Optuna study and the number of the trial.
        """

        def is_measured(run: StoredRun) -> bool | None:
            of_study = finished_trials.get(run.data.tags.get("optuna.study", ""), {})
            return of_study.get(int(run.data.tags.get("optuna.trial", "-1")))  # None: unfinished, or no trial

        ending = self._sink.ending()  # before the search: they are being sent
        running = self._children(parent_run_id, "attributes.status = 'RUNNING'")
        orphans = [run for run in running if is_measured(run) is not None and not is_at_work(run)]
        orphans = [run for run in orphans if not (is_measured(run) and is_among(run, ending))]
        if not all(all(of_study.values()) for of_study in finished_trials.values()):
            finished = self._children(parent_run_id, "attributes.status = 'FINISHED'")
            orphans += [run for run in finished if is_measured(run) is False]
        for run in orphans:
            self._kill(run)
        return len(orphans)

    def kill_run(self, parent_run_id: str, study: str, trial: int) -> None:
        """End the run of one trial as KILLED, whatever its status: its measurement is not in the study.

        If the store cannot be reached, this happens when the study is resumed.
        """
        try:
            for run in self._children(parent_run_id, f"tags.`optuna.trial` = '{trial}'"):
                if run.data.tags.get("optuna.study") == study:
                    self._kill(run)
        except (mlflow.exceptions.MlflowException, StoreFailed) as error:
            _log.warning("the run of trial %d of %s could not be ended: %s", trial, study, reason_of(error))

    def _end_stale(self, experiment_id: str) -> int:
        """End the runs of an experiment whose process has died as KILLED. Return their number.

        A server may not know yet that this process has resumed a run, nor the ends that wait to be sent.
        """
        known = self._sink.ending() | {run.run_id for run in self._open_runs}  # before the search: they are being sent
        running = self._ask(lambda: self._client.search_runs([experiment_id], "attributes.status = 'RUNNING'"))
        stale = [run for run in stale_runs(running) if not is_among(run, known)]
        for run in stale:
            self._kill(run)
        return len(stale)

    def _kill(self, run: StoredRun) -> None:
        for write in killed(run.info.start_time or 0):
            self._sink.write(run.info.run_id, write)

    def _children(self, parent_run_id: str, which: str) -> list[StoredRun]:
        experiment_id = self._get(parent_run_id).info.experiment_id
        children = f"tags.`mlflow.parentRunId` = '{parent_run_id}' and {which}"
        return list(self._ask(lambda: self._client.search_runs([experiment_id], children)))


def warm_up(uri: str) -> None:
    """Import and prepare everything that opening the store at `uri` needs, which takes a while. Write nothing."""
    mlflow_internals.hush()
    if not uri.startswith("http"):
        mlflow_internals.load_store()
        if (file := addresses.StoreAddress.parse(uri).sqlite_file) is not None and not sqlite_files.read(file).tables:
            mlflow_internals.empty_store()
    mlflow_internals.context_tags()
