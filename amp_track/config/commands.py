"""List the flags of each command and build its Request, for the command line and the Python interface."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from amp_track.config import torchrun, values
from amp_track.config.cli_params import Flag, Panel, build, changed, flag_named, flags_of
from amp_track.config.job import Job
from amp_track.config.options import (
    DEFAULT_TIME_LIMIT,
    CompareOptions,
    InitOptions,
    MaxBatchOptions,
    ModelOptions,
    PlanCheckOptions,
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
from amp_track.config.precisions import AUTO
from amp_track.records.errors import BadInput
from amp_track.stores.addresses import STORAGE_VARIABLE

# max-batch and search choose precision and batch size themselves; their jobs are too short for checkpoints.
_JOB_OF_A_STUDY = flags_of(Job, without=("precision", "batch_size", "checkpoint_every", "precision_words"))
_BATCH_SIZE = "Samples per batch. auto finds the max batch first and trains at it."

_TRACED_BATCH = "2"
_DISTRIBUTED = ("train", "max-batch", "search", "compare")
"""The commands that torchrun may start."""

FLAGS: Mapping[str, tuple[Flag, ...]] = {
    "init": (*flags_of(InitOptions),),
    "train": (
        *changed(
            flags_of(Job, without=("precision_words",)),
            precision={"shown_default": "bf16 if the device has units for it, else fp32"},
            batch_size={"help": _BATCH_SIZE, "kind": values.batch_size},
        ),
        *flags_of(Resumption),
        *flags_of(MaxBatchOptions, without=("precisions",)),
        *flags_of(Trust),
        *changed(flags_of(Stores), study={"help": "With --batch-size auto: name of the study of the max batch."}),
    ),
    "max-batch": (
        *flags_of(MaxBatchOptions),
        *changed(
            flags_of(SearchOptions, "time_limit_seconds"),
            time_limit_seconds={
                "help": "Start no further probe after this time: 90s, 30m, 2h. The same command goes on.",
                "shown_default": "no limit",
                "panel": Panel.MAX_BATCH,
            },
        ),
        *_JOB_OF_A_STUDY,
        *flags_of(Job, "precision_words"),
        *flags_of(Stores),
    ),
    "search": (
        *flags_of(MaxBatchOptions, without=("multiple_of", "effective_batch_size")),
        *flags_of(SearchOptions),
        *(flag for flag in _JOB_OF_A_STUDY if flag.field.name != "synthetic"),  # it compares the metric
        *flags_of(Stores),
    ),
    "compare": (
        *flags_of(CompareOptions),
        *flags_of(MaxBatchOptions, "precisions"),
        *flags_of(SearchOptions, "seeds", "tolerance"),
        *changed(
            flags_of(Job, without=("precision", "checkpoint_every", "precision_words")),
            eval_batch_size={"help": "Samples per batch of an evaluation.", "kind": values.fixed_eval_batch_size},
        ),
        *flags_of(Stores),
    ),
    "dtypes": (
        *changed(
            flags_of(Job, "precision", "device", "channels_last", "seed", "synthetic", "options", "batch_size"),
            batch_size={"help": "Samples of the traced batch. A few are enough.", "shown_default": _TRACED_BATCH},
        ),
    ),
    "plan": (
        *flags_of(PlanOptions),
        *flags_of(ModelOptions),
        *flags_of(PlanCheckOptions),
        *changed(
            flags_of(MaxBatchOptions, "precisions", "max_batch_size", "effective_batch_size"),
            precisions={"shown_default": "all"},
            max_batch_size={"shown_default": "no limit"},
        ),
        *flags_of(Job, "batch_size", "grad_accum", "max_grad_norm", "channels_last", "options"),
        *changed(
            flags_of(Stores, without=("study", "storage")),
            experiment={"help": "MLflow experiment of the run of --track."},
        ),
    ),
    "explain": (
        *changed(
            flags_of(
                Job,
                "precision",
                "batch_size",
                "memory_budget_bytes",
                "device",
                "grad_accum",
                "max_grad_norm",
                "channels_last",
                "options",
            ),
            batch_size={"help": "Samples per batch of the workload, or in the snapshot."},
            memory_budget_bytes={"help": "Memory limit in which a workload fails.", "shown_default": "none"},
        ),
    ),
    "report": (*flags_of(ReportOptions), *flags_of(Stores, without=("study", "experiment"))),
    "ui": (*flags_of(UiOptions), *flags_of(Stores, without=("study", "experiment"))),
    "worker": (
        *flags_of(WorkOptions),
        *flags_of(Job, "device"),
        *flags_of(Trust),
        *flags_of(Stores, without=("study", "experiment")),
    ),
}
"""The flags by command. `--help` shows them by panel; see `amp_track.config.cli_params`."""


def request_of(
    command: str,
    workload: str | None,
    given: Mapping[str, Any],
    *,
    words: Sequence[str] = (),
    more_targets: Sequence[str] = (),
    study: str | None = None,
    owns_process: bool = False,
) -> Request:
    """Return the request of a command. Options without a flag on this command have their defaults.

    Args:
        command: one of `FLAGS`.
        workload: a file, or `package.module:Class`; None if it was not given.
        given: the values by `Flag.parameter`: a text, the texts of a repeatable flag, or True for a switch.
        words: the words of a command whose script is the workload.
        more_targets: the targets of `plan` beside the workload.
        study: the study that is an argument of the command.
        owns_process: whether this process runs only this command.

    Raises:
        BadInput: a value is invalid, or two values contradict each other.
    """
    flags, given = FLAGS[command], _with_the_ranks(command, given, owns_process=owns_process)
    assert set(given) <= {flag.parameter for flag in flags}, "the command has a flag for every given value"
    storage = next((flag.parameter for flag in flags if flag.name == "--storage"), None)
    if storage is not None and given.get(storage) is None:
        given[storage] = os.environ.get(STORAGE_VARIABLE) or None  # an empty variable counts as not set
    fixed: dict[str, Any] = {}
    job: dict[str, Any] = {"command": tuple(words)} | ({} if workload is None else {"workload": workload})
    if command == "train":
        if not given.get(flag_named(flags, "--precision").parameter):
            job["precision"] = AUTO
        batch_size = flag_named(flags, "--batch-size").parameter
        if given.get(batch_size) == "auto":
            given[batch_size] = None
            fixed["find_batch_size"] = True
    if command == "search":
        trials, time_limit = (flag_named(flags, name).parameter for name in ("--trials", "--time-limit"))
        if not given.get(trials) and not given.get(time_limit):
            given[time_limit] = DEFAULT_TIME_LIMIT
    if command == "compare":
        fixed["compare_options"] = build(CompareOptions, flags, given)
    if command == "plan":
        job |= {"synthetic": True, "device": "cpu"}  # a plan uses the shapes of example() and needs no device
    if command == "dtypes":
        batch_size = flag_named(flags, "--batch-size").parameter
        given[batch_size] = given.get(batch_size) or _TRACED_BATCH
    options = [item for item in dataclasses.fields(Request) if dataclasses.is_dataclass(item.default)]
    built = {item.name: build(type(item.default), flags, given) for item in options}
    if study is not None:
        built["stores"] = dataclasses.replace(built["stores"], study=study)
    asked = build(Job, flags, given, **job)
    return Request(
        job=dataclasses.replace(asked, options=built["model_options"].added_to(asked.options)),
        **built,
        given=frozenset(flag.field.name for flag in flags if flag.owner is Job and given.get(flag.parameter))
        | ({"workload"} if workload is not None else set()),
        more_targets=tuple(more_targets),
        owns_process=owns_process,
        **fixed,
    )


def _with_the_ranks(command: str, given: Mapping[str, Any], *, owns_process: bool) -> dict[str, Any]:
    """Return the given values with --nproc set to torchrun's WORLD_SIZE, if torchrun has started this command.

    Raises:
        BadInput: torchrun cannot start this command, or --nproc differs from WORLD_SIZE.
    """
    given = dict(given)
    if not owns_process:
        if command in _DISTRIBUTED and torchrun.read(os.environ) is not None:
            function = command.replace("-", "_")
            raise BadInput(
                f"amp_track.{function} does not run in a script that torchrun has started. Use torchrun … -m amp_track "
                f"{command} …, or call it without torchrun."
            )
        return given
    launch = torchrun.launch()
    if launch is None:
        return given
    if command not in _DISTRIBUTED:
        raise BadInput(
            f"{command} does not run under torchrun, only {', '.join(_DISTRIBUTED)} do. Start it without torchrun."
        )
    processes = flag_named(FLAGS[command], "--nproc").parameter
    count = str(launch.rank.count)
    if given.get(processes) not in (None, count):
        raise BadInput(
            f"--nproc: got {given[processes]}, expected the {count} processes that torchrun has started (WORLD_SIZE)."
        )
    if not given.get(flag_named(FLAGS["train"], "--resume").parameter):  # a resumed training keeps its --nproc
        given[processes] = count
    return given
