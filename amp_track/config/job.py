"""Job: everything that determines one run. No torch, no MLflow, no Optuna: importing this costs milliseconds.

A Job's fields are the single source of the command line's flags (`amp_track.config.cli_params` reads the metadata), of
the names `mlflow run -P` takes, and of the params that MLflow shows.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from amp_track.config import values
from amp_track.config.fields import Affects, Panel, setting, switch

DEFAULT_WORKLOAD = "experiments/digits.py"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that determines one run.

    `None` stands for "as the workload says" until `resolve` has filled it in; a resolved job holds only what was run.
    """

    workload: str = DEFAULT_WORKLOAD
    precision: str = setting(
        "amp",
        "fp32 (strict IEEE), tf32, amp or fp16 (float16 with GradScaler), bf16.",
        values.precision,
        expected=f"one of {', '.join(values.PRECISIONS)}",
        metavar="NAME",
        affects=Affects.TRIAL,
    )
    batch_size: int | None = setting(
        None,
        "Samples per step; auto trains at the largest batch that fits.",
        values.positive_integer,
        expected="a whole number of 1 or more, or auto",
        metavar="N|auto",
        shown_default="the workload's",
        affects=Affects.TRIAL,
    )
    epochs: int | None = setting(
        None,
        "Passes over the training data.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
        shown_default="the workload's",
        affects=Affects.TRAINING,
        resumable=True,
    )
    steps: int | None = setting(
        None,
        "Optimizer steps, instead of --epochs.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
        shown_default="none",
        affects=Affects.TRAINING,
        resumable=True,
        panel=Panel.TRAINING,
    )
    learning_rate: float | None = setting(
        None,
        "Learning rate.",
        values.positive_number,
        expected="a number above 0",
        flag="lr",
        metavar="LR",
        shown_default="the workload's",
        affects=Affects.TRAINING,
    )
    lr_scaling: str = setting(
        "none",
        "How the learning rate follows the batch size, from the workload's own batch size: none, linear (SGD) or "
        "sqrt (Adam).",
        values.one_of("none", "linear", "sqrt"),
        expected="one of none, linear, sqrt",
        metavar="RULE",
        affects=Affects.TRAINING,
        panel=Panel.TRAINING,
    )
    seed: int = setting(
        0, "Seed of initial weights and of the order of samples.", values.seed,
        expected="a whole number from 0 to 2147483647", metavar="N",
        affects=Affects.TRAINING, panel=Panel.TRAINING,
    )  # fmt: skip
    device: str = setting(
        "auto",
        "auto, cpu, cuda, cuda:1, mps, …; auto takes the first accelerator there is.",
        values.device,
        expected="auto, cpu, or an accelerator such as cuda, cuda:1, mps",
        metavar="NAME",
        affects=Affects.MAX_BATCH,
        resumable=True,
    )
    memory_budget_bytes: int | None = setting(
        None,
        "Memory the job may use, enforced: 6GiB, 512MiB.",
        values.byte_size,
        expected="a size above 0 with its unit, such as 6GiB or 512MiB",
        flag="memory-budget",
        metavar="SIZE",
        shown_default="what the device has free",
        affects=Affects.MAX_BATCH,
        resumable=True,
    )
    grad_accum: int = setting(
        1,
        "Batches whose gradients are added up before each optimizer step.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
        affects=Affects.MAX_BATCH,
        panel=Panel.TRAINING,
    )
    max_grad_norm: float | None = setting(
        None,
        "Clip the gradients' norm, after unscaling.",
        values.positive_number,
        expected="a number above 0",
        metavar="NORM",
        shown_default="no clipping",
        affects=Affects.MAX_BATCH,
        panel=Panel.TRAINING,
    )
    nproc: int = setting(
        1,
        "Train data-parallel in so many processes, each with a device, a batch and a memory budget of its own.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
        affects=Affects.MAX_BATCH,
        panel=Panel.TRAINING,
    )
    num_workers: int | None = setting(
        None,
        "Processes that load data beside each training process; 0, as on a CPU with a budget: between the steps.",
        values.natural_number,
        expected="a whole number of 0 or more",
        metavar="N",
        shown_default="the workload's",
        affects=Affects.TRAINING,
        resumable=True,
        panel=Panel.TRAINING,
    )
    channels_last: bool = switch(
        "Keep image tensors in channels-last memory order.",
        affects=Affects.MAX_BATCH,
        panel=Panel.TRAINING,
    )
    compile: bool = switch(
        "torch.compile the model.",
        affects=Affects.MAX_BATCH,
        panel=Panel.TRAINING,
    )
    synthetic: bool = switch(
        "Train on made-up batches of the real shapes: size and speed without the data; no quality is reported.",
        affects=Affects.MAX_BATCH,
        panel=Panel.TRAINING,
    )
    grad_stats_every: int | None = setting(
        None,
        "Every N steps, look for overflow and underflow of float16 in the gradients of every layer.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        flag="grad-stats-every",
        metavar="N",
        shown_default="never",
        affects=Affects.MAX_BATCH,
        resumable=True,
        panel=Panel.TRAINING,
    )
    checkpoint_every: int | None = setting(
        None,
        "Every N steps, keep all that --resume needs with the MLflow run; the best and the last are kept.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
        shown_default="never",
        affects=Affects.NOTHING,
        resumable=True,
        panel=Panel.TRAINING,
    )
    job_timeout_seconds: float | None = setting(
        None,
        "Give up on a job, or on importing the workload and loading its data, after this long: 90s, 10m, 2h.",
        values.duration_seconds,
        expected="a time above 0 with its unit, such as 90s, 10m or 1h30m, of a century at most",
        flag="job-timeout",
        metavar="TIME",
        shown_default="no limit",
        affects=Affects.NOTHING,
        resumable=True,
        panel=Panel.TRAINING,
    )
    options: tuple[tuple[str, str], ...] = setting(
        (),
        "An option of the workload, such as width=32; may be given several times.",
        values.option,
        expected="option=value",
        flag="set",
        metavar="OPTION=VALUE",
        repeatable=True,
        shown_default="the workload's",
        affects=Affects.MAX_BATCH,
    )
    probe: bool = False
    """Only as many steps as show whether this batch size fits and what it costs: see `amp_track.training.trainer`."""
    probe_to_the_end: bool = True
    """Whether a probe of a training of one epoch makes the end of the epoch too: a smaller batch, and an evaluation."""
    epoch_steps: int | None = None
    """Optimizer steps of an epoch that is cut short, of which the last is the epoch's own last; as many batches are
    evaluated."""

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"--epochs: got {self.epochs} together with --steps {self.steps}, expected one of the two; "
                "leave out the one you do not mean"
            )

    def params(self) -> dict[str, str]:
        """The job as MLflow shows it: every field by name, as text; unset ones say so."""
        texts = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name == "options":
                value = ",".join(f"{name}={text}" for name, text in value) or None
            texts[item.name] = str(value)
        return texts

    def as_json(self) -> str:
        """Return the whole job as text, for `from_json`."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        values = json.loads(text)
        values["options"] = tuple((name, value) for name, value in values["options"])
        return Job(**values)

    @property
    def short_name(self) -> str:
        """`experiments/digits.py` and `package.digits:Digits` are both `digits`."""
        module, colon, _ = self.workload.partition(":")
        return module.rpartition(".")[2] if colon else Path(module).stem


assert all(item.metadata["affects"] is not None for item in dataclasses.fields(Job) if "help" in item.metadata), (
    "every flag of a Job says what it affects: one that does not would be missing from the fingerprint of studies"
)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of the processes that train a job together."""

    index: int = 0
    count: int = 1
    local_index: int = 0
    """Among those on its machine, and so the device that it has."""
    local_count: int = 1
    rendezvous: str = ""
    """Where they find each other: file:///path on one machine, else tcp://host:port/name, a store of torch."""


ALONE = Rank()


def ranks_of_one_machine(count: int, rendezvous: str = "") -> list[Rank]:
    """Return the ranks of so many processes that train on one machine."""
    return [
        Rank(index=index, count=count, local_index=index, local_count=count, rendezvous=rendezvous)
        for index in range(count)
    ]


@dataclass(frozen=True, kw_only=True)
class JobFolder:
    """Where a job's process leaves files for its run: checkpoints, pictures, and the weights it ends with."""

    path: str
    resume_from: str | None = None
    """The checkpoint to resume from."""
    keep_weights: bool = False
    keep_plots: bool = True


def loads_in_its_own_process(device_kind: str, memory_budget_bytes: int | None) -> bool:
    """A CPU's budget is of one process, and its meter would count what loader workers share with it."""
    return device_kind == "cpu" and memory_budget_bytes is not None
