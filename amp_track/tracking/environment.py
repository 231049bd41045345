"""Choose the run and the experiment from --experiment, MLFLOW_RUN_ID, MLFLOW_EXPERIMENT_ID and _NAME."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from urllib.parse import urlsplit

import mlflow
from mlflow.entities import Experiment

from amp_track.records import masking
from amp_track.records.errors import BadInput
from amp_track.stores import addresses

_FIRST_EXPERIMENT = "0"
"""The id of the experiment that every new store has."""
NOT_THERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""MLflow's codes for an id of nothing, and for a text that can be no id."""
_LONGEST_ID = 18
"""Digits that MLflow gives the id of an experiment at most."""
_KIND_OF_EXPERIMENT = {"mlflow.experimentKind": "custom_model_development"}
"""Else the UI of MLflow 3 shows the traces of language models first, of which there are none."""
_NEW_FILES = "mlruns"
"""Where MLflow keeps the files of a new experiment in a database, seen from the current folder."""
_LIBRARIES = {
    "s3": ("boto3", "boto3"),
    "gs": ("google.cloud.storage", "google-cloud-storage"),
    "wasbs": ("azure.storage.blob", "azure-storage-blob"),
}
"""By the beginning of a location, the module that MLflow imports to keep files there, as late as it keeps the first
one, and its package."""
_LONGEST_NAME = 500
"""Characters that MLflow takes in the name of an experiment."""


def run_id_of_environment() -> str | None:
    """Return the id of the run that `mlflow run` has made for this process."""
    return os.environ.get("MLFLOW_RUN_ID") or None


def experiment_name(given: str | None = None) -> str:
    """Return the name of the experiment of new runs. Raises BadInput if the environment's name is invalid.

    Args:
        given: the name that --experiment gave; it takes precedence over the environment.
    """
    if given is not None:
        return given
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or addresses.DEFAULT_EXPERIMENT
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise BadInput(
            f"MLFLOW_EXPERIMENT_NAME: got {name!r}, expected a name of {_LONGEST_NAME} printable characters at most; "
            "give another one, or unset it"
        )
    return name


def known_experiment(client: mlflow.MlflowClient, given: str | None = None) -> Experiment | None:
    """Return the experiment of new runs; None if it does not exist yet. `given` is as in `experiment_name`.

    Raises:
        BadInput: it has been deleted, or the environment names it by an id that is none.
    """
    name, uri = experiment_name(given), client.tracking_uri
    given_id = os.environ.get("MLFLOW_EXPERIMENT_ID") if given is None else None
    if given_id and len(given_id) > _LONGEST_ID:  # a database raises an error of its own
        raise not_there(uri, "MLFLOW_EXPERIMENT_ID", given_id, "an experiment")
    try:
        found = client.get_experiment(given_id) if given_id else client.get_experiment_by_name(name)
    except mlflow.exceptions.MlflowException as error:
        if given_id is None or error.error_code not in NOT_THERE:
            raise
        raise not_there(uri, "MLFLOW_EXPERIMENT_ID", given_id, "an experiment") from None
    if found is None:
        return None
    if found.lifecycle_stage != "active":
        raise BadInput(
            f"--tracking-uri: got {masking.masked(uri)}, whose experiment {found.name} has been deleted, expected "
            "one that is there; restore it (mlflow experiments restore --experiment-id "
            f"{found.experiment_id}), or name another with --experiment"
        )
    return found


def experiment(client: mlflow.MlflowClient, given: str | None = None) -> str:
    """Return the id of the experiment of new runs; create it if it does not exist. Raises BadInput as above."""
    if (found := known_experiment(client, given)) is not None:
        if found.name == addresses.DEFAULT_EXPERIMENT:
            _say_its_kind(client, found)
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(experiment_name(given), tags=_KIND_OF_EXPERIMENT))
    except mlflow.exceptions.MlflowException:
        if (found := known_experiment(client, given)) is None:  # else another machine has just made it
            raise
        return str(found.experiment_id)


def _say_its_kind(client: mlflow.MlflowClient, found: Experiment) -> None:
    """Tag an experiment that an earlier version has made; what people have chosen in the UI stays."""
    for name, kind in _KIND_OF_EXPERIMENT.items():
        if name not in found.tags:
            client.set_experiment_tag(found.experiment_id, name, kind)


def check_artifact_store(uri: str, found: Experiment | None) -> None:
    """Raise BadInput if the files of runs cannot be kept from here: in an experiment that is there, or in a new one."""
    if found is None:
        if not uri.startswith("http"):  # a server says itself where
            _check_folder(Path(_NEW_FILES))
        return
    location = found.artifact_location
    module, package = _LIBRARIES.get(urlsplit(location).scheme, ("", ""))
    if module and not _is_installed(module):
        raise BadInput(
            f"--tracking-uri: got {masking.masked(uri)}, whose experiment {found.name} keeps files in "
            f"{masking.masked_within(location)}, expected {package} to be installed, which that needs; install it, "
            "or name another experiment with --experiment"
        )
    folder = addresses.local_folder(location)
    if folder is not None and not uri.startswith("http"):  # else the folder may be one of the server's machine
        _check_folder(folder)


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _check_folder(folder: Path) -> None:
    """Raise BadInput if no files can be kept in a folder, which need not be there yet."""
    around = (folder.absolute(), *folder.absolute().parents)
    nearest = next(path for path in around if os.path.exists(path))  # Path.exists raises where it may not look
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise BadInput(
            f"--tracking-uri: got one whose files go to {folder}, expected a folder that can be written, {nearest} "
            f"cannot; {'work in another folder' if not folder.is_absolute() else 'see to it'}, or name another "
            "experiment with --experiment"
        )


def check_new_store(uri: str, given: str | None = None) -> None:
    """Raise BadInput if the environment names what no new store has, or its files cannot be kept in this folder."""
    _check_folder(Path(_NEW_FILES))
    experiment_name(given)
    if (run_id := run_id_of_environment()) is not None:
        raise not_there(uri, "MLFLOW_RUN_ID", run_id, "a run")
    experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID") or _FIRST_EXPERIMENT
    if given is None and experiment_id != _FIRST_EXPERIMENT:
        raise not_there(uri, "MLFLOW_EXPERIMENT_ID", experiment_id, "an experiment")


def not_there(uri: str, variable: str, got: str, expected: str) -> BadInput:
    """Return the error of a variable that names what the store lacks."""
    return BadInput(
        f"{variable}: got {got}, expected {expected} in {masking.masked(uri)}; unset it, or name the store it is in"
    )
