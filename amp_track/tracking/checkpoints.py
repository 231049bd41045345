"""Store checkpoints as artifacts of a run: the last and the best, each complete or absent.

MLflow's artifact stores write a file in place, so a partial file looks complete. Therefore a tag of the run names each
completely stored file and its digest, and is set in one transaction. Files without a tag are removed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import RunTag

from amp_track.records.errors import BadInput
from amp_track.records.events import CheckpointWritten
from amp_track.records.masking import masked_within
from amp_track.records.units import MEBIBYTE
from amp_track.stores import addresses
from amp_track.tracking import mlflow_internals
from amp_track.workers import processes

_log = logging.getLogger("amp_track.tracking")
_FOLDER = "checkpoints"
_TRANSFER_SECONDS, _SLOWEST_BYTES_PER_SECOND = 120, MEBIBYTE  # the first is MLflow's default
_LAST, _BEST = "amp_track.checkpoint.last", "amp_track.checkpoint.best"


def keep(client: mlflow.MlflowClient, run_id: str, written: CheckpointWritten) -> None:
    """Store a checkpoint and remove those that it replaces. Keep its local file."""
    file = Path(written.file)
    size = file.stat().st_size
    tag = {"file": f"{_FOLDER}/{file.name}", "step": written.step, "sha256": _digest(file), "bytes": size}
    with time_to_transfer(size):
        client.log_artifact(run_id, str(file), _FOLDER)
    names = [name for name, applies in ((_LAST, written.is_last), (_BEST, written.is_best)) if applies]
    client.log_batch(run_id, tags=[RunTag(name, json.dumps(tag)) for name in names])
    _remove_others(client, run_id)


def fetch(client: mlflow.MlflowClient, run_id: str, folder: Path) -> tuple[Path, int]:
    """Download the newest checkpoint of a run into `folder`, and return its optimizer steps, too.

    Raises:
        BadInput: the run has no checkpoint, or an altered one.
    """
    newest = max(_known(client, run_id), key=lambda stored: stored["step"], default=None)
    if newest is None:
        raise BadInput(f"--resume: run {run_id} has no checkpoint. Train again with --checkpoint-every.")
    with time_to_transfer(newest.get("bytes", 0)):  # an earlier version stored no size
        file = Path(client.download_artifacts(run_id, newest["file"], str(folder)))
    if _digest(file) != newest["sha256"]:
        raise BadInput(
            f"--resume: {newest['file']} of run {run_id} has changed since it was stored. Restore it, or train again."
        )
    return file, newest["step"]


def time_to_transfer(size_bytes: int) -> AbstractContextManager[None]:
    """Give the server more time to answer within the block: it may first copy the file to or from an object store.

    A timeout that the user has set is not changed.
    """
    name, ours = addresses.REQUEST_TIMEOUT
    if os.environ.get(name) != ours:
        return nullcontext()
    return processes.variables({name: str(max(_TRANSFER_SECONDS, size_bytes // _SLOWEST_BYTES_PER_SECOND))})


def _known(client: mlflow.MlflowClient, run_id: str) -> list[dict[str, Any]]:
    """Return the stored checkpoints: file, step, sha256 and bytes."""
    tags = client.get_run(run_id).data.tags
    return [json.loads(tags[name]) for name in (_LAST, _BEST) if name in tags]


def _remove_others(client: mlflow.MlflowClient, run_id: str) -> None:
    keep = {stored["file"] for stored in _known(client, run_id)}
    for file in client.list_artifacts(run_id, _FOLDER):
        if file.path not in keep:
            try:
                mlflow_internals.delete_artifact(client, run_id, file.path)
            except Exception as error:  # some stores cannot delete: continue training
                _warn_once(f"older checkpoints stay in {_FOLDER}: {type(error).__name__}: {masked_within(str(error))}")
                return


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
