"""Which flags each command takes, and from what was given to a Request. Command line and Python interface share it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from amp_track.config import torchrun
from amp_track.config.cli_params import Flag, build, flag_named, flags_of, given_fields
from amp_track.config.job import Job
from amp_track.config.options import (
    CompareOptions,
    Example,
    MaxBatchOptions,
    PlanOptions,
    ReportOptions,
    Request,
    Resumption,
    SearchOptions,
    Stores,
    Trust,
    UiOptions,
    WorkOptions,
)
from amp_track.records.errors import BadInput
from amp_track.stores.addresses import STORAGE_VARIABLE

# fit and search choose precision and batch size themselves, and make no checkpoints of their short jobs.
_JOB_OF_A_STUDY = flags_of(Job, without=("precision", "batch_size", "checkpoint_every"))

_DISTRIBUTED = ("train", "max-batch", "search", "compare")
"""What torchrun may start."""

FLAGS: Mapping[str, tuple[Flag, ...]] = {
    "train": (
        *flags_of(Job),
        *flags_of(Resumption),
        *flags_of(MaxBatchOptions, without=("precisions",)),
        *flags_of(Trust),
        *flags_of(Stores),
    ),
    "max-batch": (*flags_of(MaxBatchOptions), *_JOB_OF_A_STUDY, *flags_of(Stores)),
    "search": (
        *flags_of(MaxBatchOptions, without=("multiple_of", "effective_batch_size")),
        *flags_of(SearchOptions),
        *_JOB_OF_A_STUDY,
        *flags_of(Stores),
    ),
    "compare": (
        *flags_of(CompareOptions),
        *(flag for flag in flags_of(MaxBatchOptions) if flag.name == "--precision"),
        *flags_of(SearchOptions, without=("trials", "time_limit_seconds", "lr_range")),
        *flags_of(Job, without=("precision", "checkpoint_every")),
        *flags_of(Stores),
    ),
    "dtypes": (
        *(
            flag_named(flags_of(Job), name)
            for name in ("--precision", "--device", "--channels-last", "--seed", "--synthetic", "--set")
        ),
        *flags_of(Example),
    ),
    "plan": (
        *flags_of(PlanOptions),
        *(
            flag_named(flags_of(MaxBatchOptions), name)
            for name in ("--precision", "--max-batch-size", "--effective-batch-size")
        ),
        *(
            flag_named(flags_of(Job), name)
            for name in ("--batch-size", "--grad-accum", "--max-grad-norm", "--channels-last", "--set")
        ),
        *flags_of(Stores, without=("study", "storage")),
    ),
    "report": (*flags_of(ReportOptions), *flags_of(Stores, without=("study", "experiment"))),
    "ui": (*flags_of(UiOptions), *flags_of(Stores, without=("study", "experiment"))),
    "worker": (
        *flags_of(WorkOptions),
        flag_named(flags_of(Job), "--device"),
        *flags_of(Trust),
        *flags_of(Stores, without=("study", "experiment")),
    ),
}
"""By command, in the order of its `--help`."""


def request_of(command: str, workload: str | None, given: Mapping[str, Any], *, owns_process: bool = False) -> Request:
    """Return what a command was asked for; the parts it has no flags for stay at their defaults.

    Args:
        command: one of `FLAGS`.
        workload: a file, or `package.module:Class`; None where none was given.
        given: by `Flag.parameter`, what was given: text, texts of a flag that may be repeated, or True for a switch.
        owns_process: whether this process does nothing but this command.

    Raises:
        BadInput: a value cannot be read, or two do not go together.
    """
    flags, given = FLAGS[command], _with_the_ranks(command, given, owns_process=owns_process)
    assert set(given) <= {flag.parameter for flag in flags}, "every value is given for a flag of the command"
    storage = next((flag.parameter for flag in flags if flag.name == "--storage"), None)
    if storage is not None and given.get(storage) is None:
        given[storage] = os.environ.get(STORAGE_VARIABLE) or None  # an empty variable counts as not set
    fixed: dict[str, Any] = {}
    if command in ("train", "compare"):
        batch_size = flag_named(flags, "--batch-size").parameter
        if given.get(batch_size) == "auto":
            if command == "compare":
                raise BadInput(
                    "--batch-size: got auto, expected a whole number of 1 or more: all of a comparison have the same; "
                    "find one with amp-track max-batch"
                )
            given[batch_size] = None
            fixed["find_batch_size"] = True
    if command == "compare":
        fixed["compare_options"] = build(CompareOptions, flags, given)
    job: dict[str, Any] = {} if workload is None else {"workload": workload}
    if command == "plan":
        job |= {"synthetic": True, "device": "cpu"}  # its shapes are those of example(), and its device is none
    if command == "dtypes":
        job["batch_size"] = build(Example, flags, given).batch_size
    return Request(
        job=build(Job, flags, given, **job),
        stores=build(Stores, flags, given),
        max_batch_options=build(MaxBatchOptions, flags, given),
        search_options=build(SearchOptions, flags, given),
        resumption=build(Resumption, flags, given),
        trust=build(Trust, flags, given),
        plan_options=build(PlanOptions, flags, given),
        report_options=build(ReportOptions, flags, given),
        ui_options=build(UiOptions, flags, given),
        work_options=build(WorkOptions, flags, given),
        given=given_fields(Job, flags, given) | ({"workload"} if workload is not None else set()),
        owns_process=owns_process,
        **fixed,
    )


def _with_the_ranks(command: str, given: Mapping[str, Any], *, owns_process: bool) -> dict[str, Any]:
    """Return what was given, with as many processes as torchrun has started commands, if it has started this one.

    Raises:
        BadInput: torchrun has started what it cannot, or --nproc says another number.
    """
    given = dict(given)
    if not owns_process:
        if command in _DISTRIBUTED and torchrun.read(os.environ) is not None:
            function = command.replace("-", "_")
            raise BadInput(
                f"torchrun: got a program of yours that calls amp_track.{function}, expected the command: torchrun … "
                f"-m amp_track {command} …; or call it without torchrun"
            )
        return given
    launch = torchrun.launch()
    if launch is None:
        return given
    if command not in _DISTRIBUTED:
        raise BadInput(
            f"torchrun: got it with {command}, expected one of {', '.join(_DISTRIBUTED)}; start {command} without it"
        )
    processes = flag_named(FLAGS[command], "--nproc").parameter
    count = str(launch.rank.count)
    if given.get(processes) not in (None, count):
        raise BadInput(
            f"--nproc: got {given[processes]} with {count} commands that torchrun has started (WORLD_SIZE), "
            "expected as many; leave it out"
        )
    if not given.get(flag_named(FLAGS["train"], "--resume").parameter):  # whose training has a number of its own
        given[processes] = count
    return given
