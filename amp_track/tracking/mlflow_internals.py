"""Access what is private to MLflow, all in this module. Each function documents what breaks if it changes."""

from __future__ import annotations

import functools
import json
import logging
import logging.config
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import mlflow
from alembic.util import CommandError
from mlflow.entities import Metric, Param, RunTag
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from amp_track.records.errors import BadInput
from amp_track.records.masking import masked
from amp_track.records.metrics import EVAL_LOSS
from amp_track.stores import databases, sqlite_files
from amp_track.stores.addresses import StoreAddress

_SECTION, _MOST_RUNS = "amp_track", 100
"""The section of the charts in MLflow's UI, and the maximum number of runs in one chart."""
NEW_FILES = Path("mlruns")
"""The folder in the working directory in which MLflow stores the files of a new experiment of a database."""


def hush() -> None:
    for noisy in ("alembic", "mlflow.tracking"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs errors that it also raises


@contextmanager
def _logging_as_it_is() -> Iterator[None]:
    """Keep MLflow up to 3.6 from configuring the logging of this process whenever it checks a database's tables."""
    with mock.patch.object(logging.config, "fileConfig"):
        yield


def open_client(uri: str) -> mlflow.MlflowClient:
    """Return a client. Raise BadInput if another version of MLflow created the store.

    MLflow up to 3.8 also creates the folder for files of new experiments. A file in its place is rejected, and a new
    folder is removed: a command that is rejected later must leave nothing behind.
    """
    hush()
    if not uri.startswith("http") and (missing := _missing_tables(uri)):
        raise BadInput(
            f"--tracking-uri: {masked(uri)} has no table {min(missing)}, which MLflow {mlflow.__version__} needs. Make "
            f"a backup and run `mlflow db upgrade {masked(uri)}`, or use another store."
        )
    is_new = not NEW_FILES.exists()
    try:
        with _logging_as_it_is():
            client = mlflow.MlflowClient(tracking_uri=uri)
    except FileExistsError as error:
        raise BadInput(
            f"--tracking-uri: MLflow stores files in {error.filename}, which is not a writable folder. Use another "
            "working directory."
        ) from None
    except CommandError:  # of MLflow up to 3.8
        raise BadInput(
            f"--tracking-uri: {masked(uri)} cannot be opened by MLflow {mlflow.__version__}: a newer version has "
            "created it. Upgrade MLflow, or use another store."
        ) from None
    except mlflow.exceptions.MlflowException as error:
        if error.__cause__ is not None:  # an error of the database
            raise
        message = str(error).partition("NOTE:")[0].strip()
        raise BadInput(
            f"--tracking-uri: {masked(uri)} cannot be opened by MLflow {mlflow.__version__}: {message}"
        ) from None
    if is_new:
        with suppress(OSError):  # it is not there, or already in use
            NEW_FILES.rmdir()
    return client


@functools.cache
def context_tags() -> dict[str, str]:
    """Return the tags of user and source that MLflow's own `start_run` sets.

    If the registry changes, the columns User and Source of the UI become empty, or no run can be created.
    """
    from mlflow.tracking.context import registry

    return dict(registry.resolve_tags())


def delete_artifact(client: mlflow.MlflowClient, run_id: str, file: str) -> None:
    """Delete one artifact of a run through its repository, because MlflowClient has no method for it.

    If `get_artifact_repository` moves, the import of this module fails.
    """
    repository = get_artifact_repository(client.get_run(run_id).info.artifact_uri, tracking_uri=client.tracking_uri)
    repository.delete_artifacts(file)  # type: ignore[no-untyped-call]


def log_batch(
    client: mlflow.MlflowClient, run_id: str, metrics: list[Metric], params: list[Param], tags: list[RunTag]
) -> None:
    """Log a batch, whose repetition changes nothing.

    MLflow before 3.16 rejects a NaN that it has stored already. If its error code changes, a batch with a NaN whose
    answer was lost is lost with its other metrics.
    """
    try:
        client.log_batch(run_id, metrics, params, tags)
    except mlflow.exceptions.MlflowException as error:
        names = {name for name, *_ in _nans(metrics)}
        if not names or error.error_code != "BAD_REQUEST":
            raise
        stored = {nan for name in names for nan in _nans(client.get_metric_history(run_id, name))}
        new = [metric for metric in metrics if not stored & set(_nans([metric]))]
        client.log_batch(run_id, new, params, tags)


def _nans(metrics: Iterable[Metric]) -> Iterator[tuple[str, int, int]]:
    """Yield the name, time and step of each metric that is NaN."""
    return ((metric.key, metric.timestamp, metric.step) for metric in metrics if math.isnan(metric.value))


def load_store() -> None:
    """Import and prepare MLflow's database store, which takes half a second.

    If the module moves, no command can start.
    """
    import sqlalchemy.orm
    from mlflow.store.tracking import sqlalchemy_store  # noqa: F401

    sqlalchemy.orm.configure_mappers()


@functools.cache
def empty_store() -> tuple[str, ...]:
    """Return the SQL statements that create MLflow's tables in SQLite; () if this does not work in memory.

    MLflow creates them in sixty steps with a disk write each: that takes six seconds on a slow disk, and a process that
    is killed between two steps leaves a store that can never be opened. If `_initialize_tables` changes, MLflow creates
    the tables itself.
    """
    import sqlalchemy
    from sqlalchemy.pool import StaticPool

    load_store()  # registers MLflow's tables
    engine = sqlalchemy.create_engine("sqlite://", poolclass=StaticPool)  # one connection: one database in memory
    try:
        from mlflow.store.db.utils import _initialize_tables

        with _logging_as_it_is():
            _initialize_tables(engine)  # type: ignore[no-untyped-call]
        return sqlite_files.script_of(engine)
    except (ImportError, AttributeError, TypeError, sqlalchemy.exc.SQLAlchemyError):
        return ()


def _missing_tables(uri: str) -> set[str]:
    """Return the tables of the installed MLflow that are missing in a database that has some of them.

    MLflow would treat it as a new one and alter it unasked. If `Base` moves, this check fails.
    """
    from mlflow.store.db.base_sql_model import Base
    from mlflow.store.tracking.dbmodels import models  # noqa: F401  # registers the tables in Base

    missing = set(Base.metadata.tables) - databases.tables(StoreAddress.parse(uri))
    return missing if "experiments" not in missing else set()


def has_tables(uri: str) -> bool:
    """Return whether an existing database is an MLflow store. If its tables are renamed, none is."""
    return "experiments" in databases.tables(StoreAddress.parse(uri))


def view_tag(run_id: str) -> str:
    """Return the name of the experiment's tag that holds the view of the trainings of a study.

    A "shared view" of MLflow's UI defines charts, and has a URL. It is not part of MLflow's API: its names are the same
    in the UI of all releases from 3.10 to 3.18. If they change, the URL shows the default charts of all runs. A URL
    with a filter shows no view, so the filter is part of the view, and each study has one view.
    """
    return f"mlflow.sharedViewState.{run_id}"


def trainings_view(run_id: str, *, batches_differ: bool) -> str:
    """Return the view of the trainings under a study's run: speed and memory first, then the loss.

    Speed and memory are plotted over the batch size if `batches_differ`, else as bars.
    """
    speed, memory, seconds = "throughput/samples_per_s", "memory/max_reserved_mib", "time/wall_s"

    def scatter(across: str, kind: str, up: str) -> dict[str, Any]:
        return {"type": "SCATTER", "xaxis": {"key": across, "type": kind}, "yaxis": {"key": up, "type": "METRIC"}}

    charts = [
        scatter("batch_size", "PARAM", name) if batches_differ else {"type": "BAR", "metricKey": name}
        for name in (speed, memory)
    ]
    charts.append(scatter(seconds, "METRIC", EVAL_LOSS))
    shown = {"deleted": False, "isGenerated": False, "runsCountToCompare": _MOST_RUNS}
    return json.dumps(
        {
            "searchFilter": f"tags.`mlflow.parentRunId` = '{run_id}' AND tags.`amp_track.kind` = 'train'",
            "orderByKey": f"metrics.`{speed}`",  # by time, the UI folds children under their parent
            "orderByAsc": False,
            "runsHiddenMode": "SHOWALL",  # the default is ten
            "compareRunCharts": [
                {"uuid": f"{_SECTION}-{number}", "metricSectionId": _SECTION, **shown, **chart}
                for number, chart in enumerate(charts)
            ],
            "compareRunSections": [
                {"uuid": _SECTION, "name": "Speed, memory, loss", "display": True, "isReordered": False}
            ],
            "isAccordionReordered": True,
        }
    )
