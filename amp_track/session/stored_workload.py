"""The workload that a store names: whether its file may run here, decided before it is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from amp_track import workload_import
from amp_track.config.options import Request
from amp_track.records.errors import BadInput
from amp_track.session import checks


@dataclass(frozen=True, kw_only=True)
class StoredWorkload:
    """The workload of a run or of a study, as the store has it.

    Args:
        owner: the run or the study, for messages.
        reference: its file, or `package.module:Class`.
        digest: of its source files.
        imports: those besides the workload's own file, relative to its folder; None if that is not on record.
        with_workload: the command line that names the workload itself.
        if_changed: what to do where the source files have changed.
    """

    owner: str
    reference: str
    digest: str
    imports: tuple[str, ...] | None
    with_workload: str
    if_changed: str


def checked(stored: StoredWorkload, request: Request) -> str:
    """Return the workload to run: the one given on the command line, else the one that the store names.

    Whoever can write to the store can name any file there. Such a file runs only if it lies in the working folder, and
    without the symbolic links that led to it: modules beside a link are not those beside the file.

    Raises:
        BadInput: the store names a file that is missing here or lies elsewhere, or the source files are not those on
            record.
    """
    is_given = "workload" in request.given
    reference = request.job.workload if is_given else stored.reference
    if not is_given and ":" not in reference and not os.path.isfile(reference):
        raise BadInput(
            f"{stored.owner} trains {reference}, which is no file here. Start the command in the folder that has it, "
            f"or name the file: {stored.with_workload}"
        )
    checks.workload_exists(reference)
    files = workload_import.workload_files(reference)
    if not (is_given or request.trust.trust_store) and not _are_in_the_working_folder(files):
        raise BadInput(
            f"{stored.owner} trains {reference}, which is outside the working folder. Name it yourself "
            f"({stored.with_workload}), or add --trust-store if everyone who can write to the store may run code here."
        )
    if not is_given and ":" not in reference and os.path.abspath(reference) != str(files[0]):
        reference = str(files[0])
    # A module that only its import finds, and one whose imports are not on record, are compared after the import.
    if request.resumption.allow_changed_workload or not files or stored.imports is None:
        return reference
    if stored.digest not in [workload_import.digest(file, stored.imports) for file in files]:
        raise changed(stored, reference)
    return reference


def changed(stored: StoredWorkload, reference: str) -> BadInput:
    """Return the error that the source files are not those on record."""
    return BadInput(
        f"{stored.owner} was made with another version of {reference}, or of a file that it imports. "
        f"{stored.if_changed}"
    )


def _are_in_the_working_folder(files: list[Path]) -> bool:
    here = Path.cwd().resolve()
    return bool(files) and all(file.is_relative_to(here) for file in files)
