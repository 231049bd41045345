"""What a command is asked for besides the job itself. Fields are flags, as in `amp_track.config.job`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from amp_track.config import values
from amp_track.config.fields import Panel, setting, switch
from amp_track.config.job import Job
from amp_track.records import masking
from amp_track.records.errors import BadInput
from amp_track.stores import addresses
from amp_track.stores.addresses import DEFAULT_EXPERIMENT, DEFAULT_STORAGE, DEFAULT_TRACKING_URI, STORAGE_VARIABLE


@dataclass(frozen=True, kw_only=True)
class Stores:
    """Where results go, and under which name they are resumed."""

    study: str | None = setting(
        None,
        "Name of the study; the same name resumes where it stopped and repeats nothing.",
        values.study_name,
        expected="a name of 500 characters at most, all of them printable and none a slash",
        metavar="NAME",
        shown_default="from workload, device and budget",
    )
    experiment: str | None = setting(
        None,
        "MLflow experiment of new runs; resumed runs and studies stay in theirs.",
        values.experiment_name,
        expected="a name of at most 500 printable characters",
        metavar="NAME",
        shown_default=f"MLFLOW_EXPERIMENT_NAME or {DEFAULT_EXPERIMENT}",
        panel=Panel.STORES,
    )
    storage: str = setting(
        DEFAULT_STORAGE,
        "Optuna's database; for workers on several machines postgresql+psycopg://user:password@host/name, or a journal "
        "in a folder that they share: PATH.log.",
        str,
        expected="a database address, or a journal's path that ends in .log",
        metavar="URL",
        shown_default=f"{STORAGE_VARIABLE} or {DEFAULT_STORAGE}",
        panel=Panel.STORES,
    )
    tracking_uri: str | None = setting(
        None,
        "MLflow's database or server.",
        str,
        expected="a database address or http://…",
        metavar="URI",
        shown_default=f"MLFLOW_TRACKING_URI or {DEFAULT_TRACKING_URI}",
        panel=Panel.STORES,
    )

    def __post_init__(self) -> None:
        masking.remember(self.storage)
        masking.remember(addresses.tracking_uri(self.tracking_uri))


@dataclass(frozen=True, kw_only=True)
class MaxBatchOptions:
    """How `fit` looks for the largest batch; `search` and `compare` take the precisions from here."""

    precisions: tuple[str, ...] | None = setting(
        None,
        f"Precisions to compare, comma-separated: {', '.join(values.PRECISIONS)} (fp16 is the same as amp).",
        values.precisions,
        expected=f"names from {', '.join(values.PRECISIONS)}, separated by commas",
        flag="precision",
        metavar="NAMES",
        shown_default="every one the device supports; plan: all",
    )
    max_batch_size: int | None = setting(
        None,
        "Never try a larger batch than this.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
        shown_default="the training samples; plan: no limit",
        panel=Panel.SEARCH,
    )
    headroom: values.Headroom | None = setting(
        None,
        "Memory of the budget to leave free at the edge: 5%, 512MiB.",
        values.headroom,
        expected="a part of the budget, such as 5%, or a size, such as 512MiB",
        metavar="SIZE",
        shown_default="none",
        panel=Panel.SEARCH,
    )
    multiple_of: int = setting(
        1,
        "Beside the exact edge, find the largest multiple of this that fits (tensor cores like multiples of 8).",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
        panel=Panel.SEARCH,
    )
    effective_batch_size: int | None = setting(
        None,
        "Samples for each optimizer step, reached by accumulating gradients: says with which batch, and how many.",
        values.effective_batch_size,
        expected="a whole number from 1 to 2147483647",
        metavar="N",
        shown_default="no accumulation",
        panel=Panel.SEARCH,
    )
    confirm_steps: int | Literal["epoch"] | None = setting(
        None,
        "Steps of the training that confirms each edge; epoch: never less than a whole one; 0: none.",
        values.confirm_steps,
        expected="a whole number, 0 or more, or epoch",
        metavar="N|epoch",
        shown_default="3 epochs if they take 5 s at most; else one, "
        "cut short at 60 s or, if that is longer, 4 x the probes' time",
        panel=Panel.SEARCH,
    )


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How `search` trains inside the edges; `compare` takes seeds and margin from here."""

    trials: int = setting(
        12,
        "Trainings in all; a study that already has some is filled up to this number.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
    )
    time_limit_seconds: float | None = setting(
        None,
        "Start no training after this time: 90s, 30m, 2h. Max batches are found however long they take.",
        values.duration_seconds,
        expected="a time above 0 with its unit, such as 90s, 30m or 1h30m",
        flag="time-limit",
        metavar="TIME",
        shown_default="no limit",
    )
    lr_range: tuple[float, float] | None = setting(
        None,
        "Search the learning rate in this interval too.",
        values.interval,
        expected="two numbers above 0, the lower first, such as 1e-4,1e-2",
        flag="lr-range",
        metavar="LOW,HIGH",
        shown_default="not searched",
        panel=Panel.SEARCH,
    )
    seeds: int = setting(
        1,
        "Train every precision with so many seeds at one batch size, and test whether their quality is fp32's.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
        shown_default="1: no test",
    )
    tolerance: values.Tolerance = setting(
        values.Tolerance(fraction=0.01),
        "Difference of quality that does not matter: 1% of fp32's, or 0.005.",
        values.tolerance,
        expected="a part of the quality, such as 1%, or a number above 0, such as 0.005",
        metavar="SIZE",
        panel=Panel.SEARCH,
    )


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What `compare` varies besides the precision."""

    vary: tuple[str, tuple[str, ...]] | None = setting(
        None,
        "Compare at each of several values of one option of the workload, such as width=16,64,256.",
        values.options,
        expected="option=value,value,…",
        metavar="OPTION=V1,V2,…",
        shown_default="the workload's options as they are",
    )


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """Which training `train` resumes."""

    resume: str | None = setting(
        None,
        "Resume the training of this MLflow run from its newest checkpoint; workload and settings are its own.",
        values.run_id,
        expected="the id of an MLflow run",
        metavar="RUN_ID",
        shown_default="a new training",
    )
    allow_changed_workload: bool = switch(
        "With --resume: train the rest even if the workload's file, or a file that it imports, has changed since.",
        panel=Panel.TRAINING,
    )


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Whether a store may decide which file runs."""

    trust_store: bool = switch(
        "Run the workload that the store names even if its file is outside the working folder: everyone who can write "
        "to the store can then run code here.",
        panel=Panel.STORES,
    )


@dataclass(frozen=True, kw_only=True)
class Example:
    """The batch that `dtypes` looks at, as small as shows everything."""

    batch_size: int = setting(
        2,
        "Samples of the batch that is looked at; a few show all there is.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Which memory `plan` predicts the largest batches for."""

    memory_budgets: tuple[str, ...] = setting(
        (),
        "Memory that the training may take, as --memory-budget: 6GiB. Give it several times to compare.",
        values.byte_size_text,
        expected="a size above 0 with its unit, such as 6GiB or 512MiB",
        flag="memory-budget",
        metavar="SIZE",
        repeatable=True,
        shown_default="none: memory at one batch",
    )
    gpus: tuple[str, ...] = setting(
        (),
        'A card by its name, such as "RTX 4090": its memory without what a CUDA context takes of it.',
        str,
        expected="a card's name, such as RTX 4090",
        flag="gpu",
        metavar="NAME",
        repeatable=True,
        shown_default="none",
    )
    vary: tuple[tuple[str, tuple[str, ...]], ...] = setting(
        (),
        "Plan at each of several values of an option, such as finetune=head,all. Several are combined.",
        values.options,
        expected="option=value,value,…",
        metavar="OPTION=V1,V2,…",
        repeatable=True,
        shown_default="the workload's options as they are",
    )
    what_if: bool = switch("Plan with each listed option of the workload, and channels-last, changed alone.")
    track: bool = switch("Keep the plan as one MLflow run, with a picture and files for PyTorch's memory visualizer.")


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where `report` writes the page."""

    out: str | None = setting(
        None,
        "Write the page to this file, as its name says: .html or .md. Needs no tracking store.",
        str,
        expected="a file",
        metavar="FILE",
        shown_default="artifacts of the study's run",
    )


@dataclass(frozen=True, kw_only=True)
class UiOptions:
    """Where `ui` serves its pages."""

    host: str = setting(
        "127.0.0.1",
        "Where the pages are served; on another address than 127.0.0.1, whoever reaches it can delete studies.",
        str,
        expected="an address of this machine",
        metavar="ADDRESS",
    )
    port: int | None = setting(
        None,
        "Port of MLflow's UI.",
        values.port,
        expected="a whole number from 1 to 65535",
        metavar="N",
        shown_default="5000, where pages of studies link to, or any free one",
    )
    dashboard_port: int | None = setting(
        None,
        "Port of optuna-dashboard.",
        values.port,
        expected="a whole number from 1 to 65535",
        metavar="N",
        shown_default="any free one",
    )
    no_browser: bool = switch("Open no browser, only print the addresses; so it is where there is no display.")


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """How many search workers `work` starts, and with what."""

    workers: int = setting(
        1,
        "Search workers to start, each with a device of its own; one of the local launcher is this command itself.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
    )
    launcher: str = setting(
        "local",
        f"What starts them: {', '.join(values.LAUNCHERS)}.",
        values.one_of(*values.LAUNCHERS),
        expected=f"one of {', '.join(values.LAUNCHERS)}",
        metavar="NAME",
    )
    sbatch: tuple[tuple[str, str], ...] = setting(
        (),
        "An option of SLURM's sbatch, such as partition=gpu, time=8:00:00 or exclusive; may be given several times.",
        values.sbatch_option,
        expected="an option of sbatch, such as partition=gpu",
        metavar="OPTION=VALUE",
        repeatable=True,
        shown_default="time=1440",
    )
    logs: str | None = setting(
        None,
        "Folder for what each worker prints: worker-1.err has its progress, worker-1.out its result.",
        str,
        expected="a folder",
        metavar="FOLDER",
        shown_default="amp_track-workers/STUDY/HOST-PROCESS",
    )


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that one command is asked for."""

    job: Job
    given: frozenset[str] = frozenset()
    """The job's fields that were given, and not left at their defaults; the workload too."""
    find_batch_size: bool = False
    """`train --batch-size auto`."""
    stores: Stores = Stores()
    max_batch_options: MaxBatchOptions = MaxBatchOptions()
    search_options: SearchOptions = SearchOptions()
    resumption: Resumption = Resumption()
    trust: Trust = Trust()
    plan_options: PlanOptions = PlanOptions()
    report_options: ReportOptions = ReportOptions()
    ui_options: UiOptions = UiOptions()
    work_options: WorkOptions = WorkOptions()
    joins: bool = False
    """Whether it was read from a study that exists, which it works on."""
    compare_options: CompareOptions | None = None
    """Only `compare` has them."""
    owns_process: bool = False
    """Whether this process does nothing but this command: it then steps back for its jobs, for good."""

    def __post_init__(self) -> None:
        effective, grad_accum = self.max_batch_options.effective_batch_size, self.job.grad_accum
        if effective is not None and grad_accum != 1:
            raise BadInput(
                f"--grad-accum: got {grad_accum} together with --effective-batch-size {effective}, expected one of the "
                "two; leave out the one you do not mean"
            )
        if effective is not None and effective % self.job.nproc:
            raise BadInput(
                f"--effective-batch-size: got {effective}, expected a multiple of --nproc {self.job.nproc}; "
                "change one of the two"
            )

    def check_max_batch_options(self) -> None:
        """Raise BadInput when an option about the edge was given where no edge is looked for."""
        for item in dataclasses.fields(MaxBatchOptions):
            value = getattr(self.max_batch_options, item.name)
            if item.name in ("precisions", "effective_batch_size") or value == item.default or self.find_batch_size:
                continue
            name = item.metadata["flag"] or item.name.replace("_", "-")
            raise BadInput(
                f"--{name}: got {value}, expected it together with --batch-size auto, which looks for the largest "
                "batch; add that, or leave it out"
            )
