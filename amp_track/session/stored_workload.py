"""Decide whether the workload file that a store names may run here, before it is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from amp_track.config.options import Request
from amp_track.records.errors import BadInput
from amp_track.targets import source


@dataclass(frozen=True, kw_only=True)
class StoredWorkload:
    """The workload of a run or of a study, as recorded in the store.

    Args:
        owner: the run or the study, for messages.
        reference: its file, or `package.module:Class`.
        digest: of its source files.
        imports: the other source files, relative to the folder of the workload's file; None if they are not recorded.
        with_workload: the command line that names the workload explicitly.
        if_changed: advice if the source files have changed.
    """

    owner: str
    reference: str
    digest: str
    imports: tuple[str, ...] | None
    with_workload: str
    if_changed: str


def checked(stored: StoredWorkload, request: Request) -> str:
    """Return the workload to run: the one given on the command line, or the one that the store names.

    Everyone who can write to the store can name any file there. Such a file runs only if it is in the working folder.
    Its symbolic links are resolved first, because the modules in a link's folder are not those in the file's folder.

    Raises:
        BadInput: the store names a file that is missing or outside the working folder, or the source files differ from
            the recorded ones.
    """
    is_given = "workload" in request.given
    reference = request.job.workload if is_given else stored.reference
    if not is_given and ":" not in reference and not os.path.isfile(reference):
        raise BadInput(
            f"{stored.owner} trains {reference}, which does not exist here. Run the command in the folder that has it, "
            f"or name the file: {stored.with_workload}"
        )
    source.check_reference(reference)
    files = source.workload_files(reference)
    if not (is_given or request.trust.trust_store) and not _are_in_the_working_folder(files):
        raise BadInput(
            f"{stored.owner} trains {reference}, which is outside the working folder. Name it explicitly "
            f"({stored.with_workload}), or add --trust-store if everyone who can write to the store may run code here."
        )
    if not is_given and ":" not in reference and os.path.abspath(reference) != str(files[0]):
        reference = str(files[0])
    # A module that only its import finds, or without recorded imports, is compared after its import.
    if request.resumption.allow_changed_workload or not files or stored.imports is None:
        return reference
    if stored.digest not in [source.digest(file, stored.imports) for file in files]:
        raise changed(stored, reference)
    return reference


def changed(stored: StoredWorkload, reference: str) -> BadInput:
    """Return the error about source files that differ from the recorded ones."""
    return BadInput(
        f"{stored.owner} was created with another version of {reference} or of a file that it imports. "
        f"{stored.if_changed}"
    )


def _are_in_the_working_folder(files: list[Path]) -> bool:
    here = Path.cwd().resolve()
    return bool(files) and all(file.is_relative_to(here) for file in files)
