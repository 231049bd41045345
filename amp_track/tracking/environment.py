"""Choose the run and the experiment from --experiment, MLFLOW_RUN_ID, MLFLOW_EXPERIMENT_ID and _NAME."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from urllib.parse import urlsplit

import mlflow
from mlflow.entities import Experiment
from mlflow.entities import Run as StoredRun

from amp_track.records.errors import BadInput
from amp_track.records.masking import masked, masked_within
from amp_track.stores import addresses
from amp_track.tracking.mlflow_internals import NEW_FILES

NOT_THERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""MLflow's error codes for an unknown id, and for an invalid one."""
_FIRST_EXPERIMENT = "0"  # the id of the experiment that every new store contains
_LONGEST_ID, _LONGEST_NAME = 18, 500  # maximum number of digits of an experiment's id, and of characters in its name
_KIND, _OURS = "mlflow.experimentKind", "custom_model_development"
"""Without this tag of the experiment, the UI of MLflow 3 first shows the (empty) traces of language models."""
_LIBRARIES = {
    "s3": ("boto3", "boto3"),
    "gs": ("google.cloud.storage", "google-cloud-storage"),
    "wasbs": ("azure.storage.blob", "azure-storage-blob"),
}
"""The module that MLflow imports when it stores the first file, and its package, by the scheme of the location."""


def active_run(client: mlflow.MlflowClient, run_id: str) -> StoredRun | None:
    """Return a run; None if it does not exist or has been deleted."""
    try:
        run = client.get_run(run_id)
    except mlflow.exceptions.MlflowException as error:
        if error.error_code not in NOT_THERE:
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None


def run_id_of_environment() -> str | None:
    """Return the id of the run that `mlflow run` created for this process, or None."""
    return os.environ.get("MLFLOW_RUN_ID") or None


def experiment_name(given: str | None = None) -> str:
    """Return the name of the experiment of new runs: `given` by --experiment, or the environment's if it is valid."""
    if given is not None:
        return given
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or addresses.DEFAULT_EXPERIMENT
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise BadInput(
            f"MLFLOW_EXPERIMENT_NAME: got {name!r}, expected at most {_LONGEST_NAME} printable characters. Use another "
            "name, or unset it."
        )
    return name


def known_experiment(client: mlflow.MlflowClient, given: str | None = None) -> Experiment | None:
    """Return the experiment of new runs; None if it does not exist yet.

    Raise BadInput if it has been deleted, or MLFLOW_EXPERIMENT_ID is invalid or unknown.
    """
    name, uri = experiment_name(given), client.tracking_uri
    given_id = os.environ.get("MLFLOW_EXPERIMENT_ID", "") if given is None else ""
    unknown = not_there(uri, "MLFLOW_EXPERIMENT_ID", given_id, "an experiment")
    if len(given_id) > _LONGEST_ID:  # a database would raise its own error
        raise unknown
    try:
        found = client.get_experiment(given_id) if given_id else client.get_experiment_by_name(name)
    except mlflow.exceptions.MlflowException as error:
        if given_id and error.error_code in NOT_THERE:
            raise unknown from None
        raise
    if found is not None and found.lifecycle_stage != "active":
        raise BadInput(
            f"--tracking-uri: experiment {found.name} of {masked(uri)} has been deleted. Restore it (mlflow "
            f"experiments restore --experiment-id {found.experiment_id}), or use another --experiment."
        )
    return found


def experiment(client: mlflow.MlflowClient, given: str | None = None) -> str:
    """Return the id of the experiment of new runs; create it if it does not exist. Raises BadInput as above."""
    if (found := known_experiment(client, given)) is None:
        try:
            return str(client.create_experiment(experiment_name(given), tags={_KIND: _OURS}))
        except mlflow.exceptions.MlflowException:
            if (found := known_experiment(client, given)) is None:  # else another machine has just made it
                raise
    elif found.name == addresses.DEFAULT_EXPERIMENT and _KIND not in found.tags:  # MLflow or an older version made it
        client.set_experiment_tag(found.experiment_id, _KIND, _OURS)
    return str(found.experiment_id)


def check_artifact_store(uri: str, found: Experiment | None) -> None:
    """Raise BadInput if this machine cannot store files for runs of an experiment (None: a new one)."""
    folder: Path | None = NEW_FILES
    if found is not None:
        location = found.artifact_location
        module, package = _LIBRARIES.get(urlsplit(location).scheme, ("", ""))
        if module and not _is_installed(module):
            raise BadInput(
                f"--tracking-uri: experiment {found.name} of {masked(uri)} stores files in {masked_within(location)}, "
                f"which requires {package}. Install it, or use another --experiment."
            )
        folder = addresses.local_folder(location)
    if folder is not None and not uri.startswith("http"):  # else the folder may be on the server
        _check_folder(folder)


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


def _check_folder(folder: Path) -> None:
    """Raise BadInput if no files can be stored in a folder, which need not exist yet."""
    around = (folder.absolute(), *folder.absolute().parents)
    nearest = next(path for path in around if os.path.exists(path))  # Path.exists may raise PermissionError
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        fix = "Make it writable" if folder.is_absolute() else "Use another working directory"
        raise BadInput(
            f"--tracking-uri: files of runs go to {folder}, but {nearest} is not a writable folder. {fix}, or use "
            "another --experiment."
        )


def check_new_store(uri: str, given: str | None = None) -> None:
    """Raise BadInput if the environment names what no new store has, or its files cannot be kept in this folder."""
    _check_folder(NEW_FILES)
    experiment_name(given)
    if (run_id := run_id_of_environment()) is not None:
        raise not_there(uri, "MLFLOW_RUN_ID", run_id, "a run")
    experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID") or _FIRST_EXPERIMENT
    if given is None and experiment_id != _FIRST_EXPERIMENT:
        raise not_there(uri, "MLFLOW_EXPERIMENT_ID", experiment_id, "an experiment")


def not_there(uri: str, variable: str, got: str, expected: str) -> BadInput:
    return BadInput(f"{variable}: got {got}, expected {expected} in {masked(uri)}. Unset it, or use another store.")
