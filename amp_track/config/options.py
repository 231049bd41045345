"""The options of each command besides the job. Fields are flags, as in `amp_track.config.job`."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import Literal

from amp_track.config import values
from amp_track.config.cli_params import Flag, Panel, flags_of, setting, switch
from amp_track.config.job import Job
from amp_track.config.precisions import PRECISIONS, REFERENCE
from amp_track.records import masking
from amp_track.records.errors import BadInput
from amp_track.stores.addresses import (
    DEFAULT_EXPERIMENT,
    DEFAULT_STORAGE,
    DEFAULT_TRACKING_URI,
    STORAGE_VARIABLE,
    StoreAddress,
    tracking_address,
)

DEFAULT_TIME_LIMIT = "30m"
"""The --time-limit of a `search` whose length nobody has chosen."""


# fmt: off
@dataclass(frozen=True, kw_only=True)
class Stores:
    """The stores of results, and the names under which they are stored."""

    study: str | None = setting(
        None, values.study_name, "Name of the study. The same name resumes an interrupted study.",
        shown_default="made from workload, device and budget"
    )
    experiment: str | None = setting(
        None, values.experiment_name, "MLflow experiment of new runs; resumed runs and studies stay in theirs.",
        shown_default=f"MLFLOW_EXPERIMENT_NAME or {DEFAULT_EXPERIMENT}", panel=Panel.STORES
    )
    storage: str = setting(
        DEFAULT_STORAGE, values.storage,
        "Optuna's database. For search workers on several machines: postgresql+psycopg://user:password@host/name, or "
        "a journal file PATH.log in a shared folder.", shown_default=f"{STORAGE_VARIABLE} or {DEFAULT_STORAGE}",
        panel=Panel.STORES
    )
    tracking_uri: str | None = setting(
        None, values.tracking_uri, "MLflow's database or tracking server.",
        shown_default=f"MLFLOW_TRACKING_URI or {DEFAULT_TRACKING_URI}", panel=Panel.STORES
    )

    def __post_init__(self) -> None:
        masking.remember(self.optuna.url)
        masking.remember(self.mlflow.url)

    @property
    def optuna(self) -> StoreAddress:
        """The store address of Optuna."""
        return StoreAddress.parse(self.storage)

    @property
    def mlflow(self) -> StoreAddress:
        """The store address of MLflow: the flag's, or else the environment's or the default."""
        return tracking_address(self.tracking_uri)

    def command(self, *words: str) -> str:
        """Return a command to print, of words that are quoted already, with the flags of these stores."""
        is_default = self.storage in (DEFAULT_STORAGE, os.environ.get(STORAGE_VARIABLE))
        storage = [] if is_default else ["--storage", shlex.quote(masking.masked(self.storage))]
        return " ".join([*words, *storage, *self.tracking_flag])

    def ui_command(self, study: str) -> str | None:
        """Return the command, to print, that starts the UI at `mlflow.ui`; None if a server is the UI."""
        return None if self.mlflow.has_ui else self.command("amp-track", "ui", shlex.quote(study))

    @property
    def tracking_flag(self) -> list[str]:
        """The flag, to print, with which another command uses this tracking store; none for the default."""
        return [] if self.tracking_uri is None else ["--tracking-uri", shlex.quote(masking.masked(self.tracking_uri))]


@dataclass(frozen=True, kw_only=True)
class MaxBatchOptions:
    """How to find the max batch. `search` and `compare` use the precisions too."""

    precisions: tuple[str, ...] | None = setting(
        None, values.precisions,
        f"Precisions to compare, comma-separated: {', '.join(PRECISIONS)} (fp16 and float16 are the same as amp).",
        flag="precision", shown_default="every one the device supports"
    )
    max_batch_size: int | None = setting(
        None, values.positive_integer, "Upper limit of the batch sizes that are tried.",
        shown_default="the number of training samples; 1,048,576 if unknown", panel=Panel.MAX_BATCH
    )
    headroom: values.Headroom | None = setting(
        None, values.headroom, "Part of the budget to leave free at the max batch, such as 5% or 512MiB.",
        shown_default="none", panel=Panel.MAX_BATCH
    )
    multiple_of: int = setting(
        1, values.positive_integer,
        "Also find the largest multiple of N that fits. Tensor cores are fastest at multiples of 8.",
        panel=Panel.MAX_BATCH
    )
    effective_batch_size: int | None = setting(
        None, values.effective_batch_size,
        "Samples per optimizer step. Recommends the batch size and the gradient accumulation that give it.",
        shown_default="no accumulation", panel=Panel.MAX_BATCH
    )
    confirm_steps: int | Literal["epoch"] | None = setting(
        None, values.confirm_steps,
        "Steps of the confirmation run at each max batch. epoch: at least one full epoch, or a script's complete "
        "training. 0: no confirmation run.",
        shown_default="3 epochs if they take at most 5 s, else 1 epoch, shortened to 5 s (one process within a CPU "
        "budget: 3 s) or the time of the probes; of a script 10 s or the time of the probes, at most 1 min",
        panel=Panel.MAX_BATCH
    )

    def changed(self) -> list[Flag]:
        """Return the flags, except --precision, whose value is not the default."""
        flags = flags_of(MaxBatchOptions, without=("precisions",))
        return [flag for flag in flags if getattr(self, flag.field.name) != flag.field.default]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How `search` trains inside the max batches. `compare` uses the seeds and the tolerance too."""

    trials: int = setting(
        12, values.positive_integer, "Total number of training trials. A resumed study continues up to this total.",
        panel=Panel.TRIALS
    )
    time_limit_seconds: float | None = setting(
        None, values.duration_seconds,
        "Start no training later than this after the max batches are found: 90s, 30m, 2h.", flag="time-limit",
        shown_default=f"{DEFAULT_TIME_LIMIT}, or no limit with --trials", panel=Panel.TRIALS
    )
    lr_range: tuple[float, float] | None = setting(
        None, values.interval, "Also search the learning rate, in this interval.", flag="lr-range",
        shown_default="not searched", panel=Panel.TRIALS
    )
    seeds: int = setting(
        1, values.positive_integer,
        "Train every precision with N seeds at one batch size, and test whether the metric equals that of fp32.",
        shown_default="1, without the test", panel=Panel.TRIALS
    )
    tolerance: values.Tolerance = setting(
        values.Tolerance(fraction=0.01), values.tolerance,
        "Difference of the metric that does not matter: 1% of the value of fp32, or 0.005.", panel=Panel.TRIALS
    )


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The option that `compare` varies besides the precision."""

    vary: tuple[str, tuple[str, ...]] | None = setting(
        None, values.options, "Compare at several values of one option of the workload, such as width=16,64,256.",
        shown_default="the workload's options as they are", panel=Panel.TRIALS
    )


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """The training that `train` resumes."""

    resume: str | None = setting(
        None, values.run_id,
        "Resume the training of this MLflow run from its newest checkpoint, with its workload, precision and settings.",
        shown_default="a new training"
    )
    allow_changed_workload: bool = switch(
        "With --resume: continue although the workload's file, or a file that it imports, has changed.",
        panel=Panel.TRAINING
    )


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Whether to run the workload that a store names."""

    trust_store: bool = switch(
        "Run the workload that the store names, even outside the working folder. Everyone who can write to the store "
        "can then run code here.", panel=Panel.STORES
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The memory for which `plan` predicts the max batches."""

    memory_budgets: tuple[str, ...] = setting(
        (), values.memory_budget_text, "Memory limit to plan for, such as 6GiB. Repeatable.", flag="memory-budget",
        repeatable=True, shown_default="none, which shows the memory at one batch size"
    )
    gpus: tuple[str, ...] = setting(
        (), values.gpu, 'GPU to plan for, such as "RTX 4090": its memory minus the CUDA context. Repeatable.',
        flag="gpu", repeatable=True, shown_default="none", panel=Panel.PLAN
    )
    vary: tuple[tuple[str, tuple[str, ...]], ...] = setting(
        (), values.options,
        "Plan at several values of an option, such as finetune=head,all. Repeatable: plans every combination.",
        repeatable=True, shown_default="the workload's options as they are", panel=Panel.PLAN
    )
    what_if: bool = switch(
        "Also plan with one change at a time: each listed option of the workload, and channels-last.", panel=Panel.PLAN
    )
    track: bool = switch(
        "Save the plan as an MLflow run, with a plot and files for PyTorch's memory visualizer.", panel=Panel.PLAN
    )
    csv: str | None = setting(
        None, values.file, "Also write the max batches to this CSV file, one row each.", shown_default="none",
        panel=Panel.PLAN
    )


@dataclass(frozen=True, kw_only=True)
class PlanCheckOptions:
    """The earlier plan that `plan` compares with."""

    check: str | None = setting(
        None, values.file,
        "Compare with the plan in this file, and exit with code 4 if a peak or a safe batch has moved.",
        shown_default="none", panel=Panel.CHECK
    )
    update: bool = switch("Write the plan to the file of --check.", panel=Panel.CHECK)
    against: str | None = setting(
        None, values.revision,
        "Compare with the plan of the target's file at this git revision, such as main or HEAD~1.",
        shown_default="none", panel=Panel.CHECK
    )
    tolerance: values.Tolerance = setting(
        values.Tolerance(fraction=0.01), values.share,
        "Part of a peak or of a safe batch that may move without failing the check.", panel=Panel.CHECK
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of models by name. Each flag sets the workload option that its field is named after, as `--set` does."""

    optimizer_name: str | None = setting(
        None, values.option_value, "Optimizer of a model by name: sgd (momentum 0.9), adam, adamw, rmsprop or "
        "adafactor.", flag="optimizer", shown_default="adamw", panel=Panel.MODEL
    )
    image_size: int | None = setting(
        None, values.positive_integer, "Height and width of the images of a model by name.",
        shown_default="the model's", panel=Panel.MODEL
    )
    sequence_length: int | None = setting(
        None, values.positive_integer, "Tokens per sample of a transformers model.",
        shown_default="512, or the model's maximum", panel=Panel.MODEL
    )
    frozen: bool = switch("Train only the head of a model by name.", panel=Panel.MODEL)
    checkpoint_activations: bool = switch(
        "Compute activations again in the backward pass of a timm or transformers model.", panel=Panel.MODEL
    )

    def flags(self) -> dict[str, str]:
        """Return the flags that were given, by the option of the workload that each sets."""
        given = [flag for flag in flags_of(ModelOptions) if getattr(self, flag.field.name) != flag.field.default]
        return {flag.field.name: flag.name for flag in given}

    def added_to(self, options: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        """Return the options of a job with these. Raises BadInput for one that `--set` gives too."""
        flags = self.flags()
        for name in flags.keys() & dict(options).keys():
            raise BadInput(f"{name} is given by both {flags[name]} and --set. Omit one of the two.")
        return (*options, *((name, str(getattr(self, name))) for name in flags))


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where `report` writes the page to."""

    out: str | None = setting(
        None, values.file,
        "Write the page to this file (.html or .md) instead of the study's run. Needs no tracking store.",
        shown_default="artifacts of the study's run"
    )


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """The file that `init` writes."""

    template: str = setting(
        "plain", values.one_of(*values.TEMPLATES),
        f"Kind of training: {', '.join(values.TEMPLATES)}. plain and timm are a Workload, the others a Trainer."
    )


@dataclass(frozen=True, kw_only=True)
class UiOptions:
    """Where `ui` serves its pages."""

    host: str = setting(
        "127.0.0.1", values.host,
        "Address to serve on. There is no login: on another address than 127.0.0.1, everyone who reaches it can delete "
        "studies."
    )
    port: int | None = setting(
        None, values.port, "Port of MLflow's UI.", shown_default="5000 (study pages link to it), else any free port"
    )
    dashboard_port: int | None = setting(None, values.port, "Port of optuna-dashboard.", shown_default="any free port")
    no_browser: bool = switch("Print the URLs without opening a browser (default when there is no display).")


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """The search workers that `worker` starts."""

    workers: int = setting(
        1, values.positive_integer,
        "Search workers to start, each on its own device. With the local launcher, 1 runs in this command."
    )
    launcher: str = setting(
        "local", values.one_of(*values.LAUNCHERS),
        f"Launcher of the search workers: {', '.join(values.LAUNCHERS)}."
    )
    sbatch: tuple[tuple[str, str], ...] = setting(
        (), values.sbatch_option,
        "Option of SLURM's sbatch, such as partition=gpu, time=8:00:00 or exclusive. Repeatable.", repeatable=True,
        shown_default="time=1440"
    )
    logs: str | None = setting(
        None, values.folder,
        "Folder for the output of the search workers: progress in worker-1.err, the result in worker-1.out.",
        shown_default="amp_track-workers/STUDY/HOST-PROCESS"
    )

# fmt: on


@dataclass(frozen=True, kw_only=True)
class Request:
    """All options of one command."""

    job: Job
    given: frozenset[str] = frozenset()
    """The fields of the job that were given, including the workload."""
    more_targets: tuple[str, ...] = ()
    """The targets of `plan` beside the job's workload."""
    find_batch_size: bool = False
    """`train --batch-size auto`."""
    stores: Stores = Stores()
    max_batch_options: MaxBatchOptions = MaxBatchOptions()
    search_options: SearchOptions = SearchOptions()
    resumption: Resumption = Resumption()
    trust: Trust = Trust()
    plan_options: PlanOptions = PlanOptions()
    plan_check_options: PlanCheckOptions = PlanCheckOptions()
    model_options: ModelOptions = ModelOptions()
    report_options: ReportOptions = ReportOptions()
    init_options: InitOptions = InitOptions()
    ui_options: UiOptions = UiOptions()
    work_options: WorkOptions = WorkOptions()
    joins: bool = False
    """Whether it was read from an existing study that this command joins."""
    compare_options: CompareOptions | None = None
    """Only for `compare`."""
    owns_process: bool = False
    """Whether this process runs only this command: it may then lower its own priority permanently."""

    def __post_init__(self) -> None:
        precisions = self.max_batch_options.precisions or ()
        named = [name for name in precisions if name != REFERENCE]
        if named and self.job.command and not self.job.command_takes_precision:
            raise BadInput(
                f"--precision: got {', '.join(named)}, but the command has no {{precision}}. Write it where the script "
                "takes its precision: python train.py --batch-size {batch_size} --precision {precision}"
            )
        if self.job.precision_words and self.job.command and not self.job.command_takes_precision:
            raise BadInput(
                "--precision-words requires {precision} in the command, where its words go: "
                "python train.py --batch-size {batch_size} {precision}"
            )
        effective, grad_accum = self.max_batch_options.effective_batch_size, self.job.grad_accum
        if effective is not None and grad_accum != 1:
            raise BadInput(
                f"--grad-accum: got {grad_accum} together with --effective-batch-size {effective}, expected only one "
                "of them."
            )
        if effective is not None and effective % self.job.nproc:
            raise BadInput(f"--effective-batch-size: got {effective}, expected a multiple of --nproc {self.job.nproc}.")
        multiple = self.max_batch_options.multiple_of
        if effective is not None and effective // self.job.nproc % multiple:
            of_each = f" × --nproc {self.job.nproc}" if self.job.nproc > 1 else ""
            raise BadInput(
                f"--effective-batch-size: got {effective}, expected a multiple of --multiple-of {multiple}{of_each}."
            )

    def check_max_batch_options(self) -> None:
        """Raise BadInput for an option of the max batch search without --batch-size auto."""
        if self.stores.study is not None and not self.find_batch_size:
            raise BadInput("--study requires --batch-size auto: other trainings are in no study.")
        if self.job.eval_batch_size == "auto" and not self.find_batch_size:
            raise BadInput("--eval-batch-size auto requires --batch-size auto.")
        for flag in self.max_batch_options.changed():
            if flag.field.name != "effective_batch_size" and not self.find_batch_size:
                raise BadInput(f"{flag.name} requires --batch-size auto.")
