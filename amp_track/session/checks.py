"""Checks of a request, its device and its workload, before anything is written. They raise BadInput."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from amp_track.config.cli_params import flags_of
from amp_track.config.inspection import Inspection
from amp_track.config.job import Job, library_of_model, loads_in_its_own_process
from amp_track.config.options import Request
from amp_track.config.precisions import PRECISIONS
from amp_track.records.errors import BadInput, BadOption, UnknownOption
from amp_track.records.units import format_bytes
from amp_track.targets import source


def check_supported(request: Request, inspection: Inspection, precisions: Sequence[str], *, trains: bool) -> None:
    """Check that device and data set support the request, which trains for more than one batch if `trains`."""
    job, options = request.job, request.max_batch_options
    budget, effective = job.memory_budget_bytes, options.effective_batch_size
    _check_settings(request, inspection)
    if trains and inspection.is_streamed and job.steps is None:
        raise BadInput(
            f"{job.workload}: train_data() is an IterableDataset, so the length of an epoch is unknown. Add --steps."
        )
    data_has_a_batch(request, job, inspection)
    if effective is not None and inspection.knows_samples(job) and effective > inspection.training_samples:
        raise BadInput(
            f"--effective-batch-size: got {effective}, expected at most {inspection.training_samples}, the number of "
            f"training samples of {job.workload}."
        )
    if options.headroom is not None:
        if budget is None and not inspection.budget_support.supported:
            raise BadInput(
                f"--headroom is not supported on this device: {inspection.budget_support.reason}. Omit --headroom."
            )
        total = budget if budget is not None else inspection.free_bytes
        if options.headroom.of(total) >= total:
            raise BadInput(
                f"--headroom: got {options.headroom}, expected less than {format_bytes(total)}, "
                f"the {'memory budget' if budget is not None else 'free memory'}."
            )
    if job.num_workers and loads_in_its_own_process(inspection.hardware.kind, budget):
        raise BadInput(
            f"--num-workers {job.num_workers} is not supported with --memory-budget on a CPU: the budget covers one "
            "process. Omit one of the two."
        )
    for precision in precisions:
        support = inspection.support(precision)
        if not support.supported:
            supported = ", ".join(name for name in PRECISIONS if inspection.support(name).supported)
            raise BadInput(f"--precision: got {precision}, expected one of {supported}: {support.reason}.")


def data_has_a_batch(request: Request, job: Job, inspection: Inspection) -> None:
    """Check that the training data has at least one batch for a resolved job."""
    batch_size, ranks = job.batch_size, job.nproc
    if batch_size is None or not inspection.knows_samples(job) or batch_size * ranks <= inspection.training_samples:
        return
    times = f" for each of {ranks} ranks" if ranks > 1 else ""
    samples = f"{inspection.training_samples} training samples"
    if request.resumption.resume is not None:
        raise BadInput(
            f"{job.workload}: the run's batch size {batch_size}{times} exceeds the {samples} that the workload has "
            "now. Resume the run with its original data."
        )
    if request.job.batch_size is None:
        raise BadInput(
            f"{job.workload}: the workload's batch size {batch_size}{times} exceeds its {samples}. "
            "Set a smaller --batch-size."
        )
    raise BadInput(
        f"--batch-size: got {batch_size}{times}, expected at most {inspection.training_samples}, the number of "
        f"training samples of {job.workload}."
    )


def needs_a_workload(job: Job, inspection: Inspection, command: str, why: str) -> None:
    """Check that the target is a workload; only max-batch takes functions and commands too."""
    if inspection.kind != "workload":
        raise BadInput(
            f"{job.workload}: {command} needs a Workload, {why}; this is a {inspection.kind}. Use max-batch, or "
            "write a Workload."
        )


_MODELS_WITH = {
    "image_size": f"models of images by name ({source.MODELS_BY_NAME})",
    "sequence_length": "models of texts by name (transformers:CONFIG.json)",
    "checkpoint_activations": "models of timm and transformers by name (timm:NAME, transformers:CONFIG.json)",
}
"""The models by name that have an option, if not all have it."""
_SETTINGS = {
    "function": {"workload", "device", "memory_budget_bytes", "job_timeout_seconds", "options"},
    "command": {"workload", "device", "memory_budget_bytes", "job_timeout_seconds", "precision_words"},
}
"""The settings of a job that a target other than a workload takes: all else is in its own code."""


def _check_settings(request: Request, inspection: Inspection) -> None:
    """Check that a function or a command is not given settings that only a workload's trainer has."""
    if inspection.kind == "workload":
        if request.job.precision_words:
            raise BadInput("--precision-words requires a command: amp-track max-batch -- python train.py …")
        return
    if request.max_batch_options.confirm_steps == "epoch" and request.job.job_timeout_seconds is None:
        raise BadInput(
            f"--confirm-steps epoch runs a {inspection.kind} to its own end, which may never come. Add --job-timeout."
        )
    instead = "give it a parameter and use --set" if inspection.kind == "function" else "write it in the command"
    for flag in flags_of(Job):
        if flag.field.name in request.given and flag.field.name not in _SETTINGS[inspection.kind]:
            raise BadInput(f"{flag.name} is not supported with a {inspection.kind}, which trains itself: {instead}.")


@contextmanager
def given_by_vary(request: Request, names: Collection[str]) -> Iterator[None]:
    """Reject workload options that another flag gives too, and name the right flag in the errors about their values."""
    flags = request.model_options.flags()
    for name in names:
        if name in dict(request.job.options):
            raise BadInput(f"{name} is given by both --vary and {flags.get(name, '--set')}. Omit one of the two.")
    flags |= dict.fromkeys(names, "--vary")
    try:
        yield
    except BadOption as error:
        if error.option not in flags:
            raise
        if isinstance(error, UnknownOption) and flags[error.option] != "--vary":
            models = _MODELS_WITH.get(error.option, f"models by name ({source.MODELS_BY_NAME})")
            raise BadInput(f"{flags[error.option]} is not for {request.job.workload}: it is for {models}.") from None
        raise BadOption(error.option, error.problem, flags[error.option]) from None


@dataclass(frozen=True, kw_only=True)
class StoredWorkload:
    """The workload of a run or of a study, as recorded in the store."""

    owner: str
    """The run or the study, for messages."""
    reference: str
    """Its file, or `package.module:Class`."""
    digest: str
    imports: tuple[str, ...] | None
    """The other source files, relative to the folder of the workload's file; None if they are not recorded."""
    trains_itself: bool = False
    """Whether the store also names other code to run: a command, or functions in the options of an integration."""
    with_workload: str
    """The command line that names the workload explicitly."""
    if_changed: str
    """Advice if the source files have changed."""


def trusted_workload(stored: StoredWorkload, request: Request) -> str:
    """Return the workload to run: the one given on the command line, or the one that the store names.

    Everyone who can write to the store can name any file there. Such a file runs only if it is in the working folder.
    Its symbolic links are resolved first, because the modules in a link's folder are not those in the file's folder.

    Raises:
        BadInput: the store names a file that is missing or outside the working folder, or the source files differ from
            the recorded ones.
    """
    if stored.trains_itself and not request.trust.trust_store:
        raise BadInput(
            f"{stored.owner} runs a command or functions that the store names. Add --trust-store if everyone who can "
            "write to the store may run code here."
        )
    is_given = "workload" in request.given
    reference = request.job.workload if is_given else stored.reference
    if not is_given and ":" not in reference and not os.path.isfile(reference):
        raise BadInput(
            f"{stored.owner} trains {reference}, which does not exist here. Run the command in the folder that has it, "
            f"or name the file: {stored.with_workload}"
        )
    source.check_reference(reference)
    files = source.workload_files(reference)
    here = Path.cwd().resolve()
    # A model by name runs no code but its library's; the file of one of transformers is data.
    is_here = bool(files or library_of_model(reference)) and all(file.is_relative_to(here) for file in files)
    if not (is_given or request.trust.trust_store or is_here):
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
        raise changed_workload(stored, reference)
    return reference


def changed_workload(stored: StoredWorkload, reference: str) -> BadInput:
    """Return the error about source files that differ from the recorded ones."""
    return BadInput(
        f"{stored.owner} was created with another version of {reference} or of a file that it imports. "
        f"{stored.if_changed}"
    )
