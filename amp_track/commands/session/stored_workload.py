"""The workload that a store names: whether its file may run here, decided before it is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from amp_track.commands.request import Request
from amp_track.commands.session import checks
from amp_track.records import sources
from amp_track.records.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class StoredWorkload:
    """The workload of a run or of a study, as the store has it.

    Args:
        owner: the run or the study, for messages.
        reference: its file, or `package.module:Class`.
        digest: of its source files.
        imports: those besides the workload's own file, relative to its folder.
        with_workload: the command line that names the workload itself.
        if_changed: what to do where the source files have changed.
    """

    owner: str
    reference: str
    digest: str
    imports: tuple[str, ...]
    with_workload: str
    if_changed: str


def checked(stored: StoredWorkload, request: Request) -> str:
    """Return the workload to run: the one given on the command line, else the one that the store names.

    Whoever can write to the store can name any file there. Such a file runs only if it lies in the working folder.

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
    files = sources.workload_files(reference)
    if not (is_given or request.trust.trust_store) and not _are_in_the_working_folder(files):
        raise BadInput(
            f"{stored.owner} trains {reference}, which is outside the working folder. Name it yourself "
            f"({stored.with_workload}), or add --trust-store if everyone who can write to the store may run code here."
        )
    if request.resumption.allow_changed_workload or not files:  # a module that only its import finds is checked later
        return reference
    if stored.digest not in [sources.digest(file, stored.imports) for file in files]:
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
