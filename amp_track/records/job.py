"""Job: what determines a run; Inspection: what a fresh process found out before it. No torch, no MLflow, no Optuna:
importing this costs milliseconds.

A Job's fields are the single source of the command line's flags (`amp_track.commands.flags` reads the metadata), of
the names `mlflow run -P` takes, and of the params that MLflow shows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amp_track.records import values

DEFAULT_WORKLOAD = "experiments/digits.py"


def setting(
    default: Any,
    help: str,
    parse: Callable[[str], Any],
    *,
    expected: str,
    flag: str | None = None,
    metavar: str = "TEXT",
    repeatable: bool = False,
    shown_default: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag.

    Args:
        default: the value when the flag is not given.
        help: one sentence for `--help`.
        parse: from the text given to the value; raises ValueError when it cannot be.
        expected: what a good value is, for the error message.
        flag: the flag's name; by default the field's, with dashes.
        metavar: how `--help` shows the value.
        repeatable: the flag may be given several times; `parse` gets each text, the field is a tuple.
        shown_default: what `--help` shows as the default when the value itself would say little.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "parse": parse,
            "expected": expected,
            "flag": flag,
            "metavar": metavar,
            "repeatable": repeatable,
            "shown_default": shown_default,
        },
    )


def switch(help: str) -> Any:
    """A dataclass field that is a flag without a value, off unless given."""
    return field(default=False, metadata={"help": help, "flag": None, "repeatable": False})


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that determines one run.

    `None` stands for "as the workload says" until `resolve` has filled it in; a resolved job holds only what was run.
    """

    workload: str = DEFAULT_WORKLOAD
    precision: str = setting(
        "amp",
        "fp32 (strict IEEE), tf32, amp (float16 with GradScaler) or bf16.",
        values.precision,
        expected=f"one of {', '.join(values.PRECISIONS)}",
        metavar="NAME",
    )
    batch_size: int | None = setting(
        None,
        "Samples per step; auto trains at the largest batch that fits.",
        values.positive_integer,
        expected="a whole number of 1 or more, or auto",
        metavar="N|auto",
        shown_default="the workload's",
    )
    epochs: int | None = setting(
        None,
        "Passes over the training data.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
        shown_default="the workload's",
    )
    steps: int | None = setting(
        None,
        "Optimizer steps, instead of --epochs.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
        shown_default="none",
    )
    learning_rate: float | None = setting(
        None,
        "Learning rate.",
        values.positive_number,
        expected="a number above 0",
        flag="lr",
        metavar="LR",
        shown_default="the workload's",
    )
    lr_scaling: str = setting(
        "none",
        "How the learning rate follows the batch size, from the workload's own batch size: none, linear (SGD) or "
        "sqrt (Adam).",
        values.one_of("none", "linear", "sqrt"),
        expected="one of none, linear, sqrt",
        metavar="RULE",
    )
    seed: int = setting(
        0, "Seed of initial weights and of the order of samples.", values.natural_number,
        expected="a whole number of 0 or more", metavar="N",
    )  # fmt: skip
    device: str = setting(
        "auto",
        "auto, cpu, cuda, cuda:1, mps, …; auto takes the first accelerator there is.",
        values.device,
        expected="auto, cpu, or an accelerator such as cuda, cuda:1, mps",
        metavar="NAME",
    )
    memory_budget_bytes: int | None = setting(
        None,
        "Memory the job may use, enforced: 6GiB, 512MiB.",
        values.byte_size,
        expected="a size above 0 with its unit, such as 6GiB or 512MiB",
        flag="memory-budget",
        metavar="SIZE",
        shown_default="what the device has free",
    )
    accumulate: int = setting(
        1,
        "Batches whose gradients are added up before each optimizer step.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
    )
    clip_norm: float | None = setting(
        None,
        "Clip the gradients' norm, after unscaling.",
        values.positive_number,
        expected="a number above 0",
        metavar="NORM",
        shown_default="no clipping",
    )
    processes: int = setting(
        1,
        "Train data-parallel in so many processes, each with a device, a batch and a memory budget of its own.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
    )
    loader_workers: int | None = setting(
        None,
        "Processes that load data beside each training process; 0, as on a CPU with a budget: between the steps.",
        values.natural_number,
        expected="a whole number of 0 or more",
        metavar="N",
        shown_default="the workload's",
    )
    channels_last: bool = switch("Keep image tensors in channels-last memory order.")
    compile: bool = switch("torch.compile the model.")
    synthetic: bool = switch(
        "Train on made-up batches of the real shapes: size and speed without the data; no quality is reported."
    )
    diagnose_every: int | None = setting(
        None,
        "Every N steps, look for overflow and underflow of float16 in the gradients of every layer.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        flag="diagnose",
        metavar="N",
        shown_default="never",
    )
    checkpoint_every: int | None = setting(
        None,
        "Every N steps, keep all that --resume needs with the MLflow run; the best and the last are kept.",
        values.positive_integer,
        expected="a whole number of 1 or more",
        metavar="N",
        shown_default="never",
    )
    timeout_seconds: float | None = setting(
        None,
        "Give up on a job after this long.",
        values.positive_number,
        expected="a number of seconds above 0",
        flag="timeout",
        metavar="SECONDS",
        shown_default="no limit",
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
    )
    probe: bool = False
    """Only as many steps as show whether this batch size fits and what it costs: see `amp_track.training.trainer`."""

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
        """All of it, for `from_json`."""
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


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of the processes that train a job together."""

    index: int = 0
    count: int = 1
    rendezvous: str = ""
    """The file through which they find each other."""


ALONE = Rank()


@dataclass(frozen=True, kw_only=True)
class JobFolder:
    """Where a job's process leaves files for its run: checkpoints, pictures, and the weights it ends with."""

    path: str
    resume_from: str | None = None
    """The checkpoint to go on from."""
    keep_weights: bool = False


@dataclass(frozen=True, kw_only=True)
class Support:
    """Whether something can be done on this device, and the reason, for the user to read."""

    supported: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a fresh process found out about a job's device and workload before anything is run or written."""

    device: str
    """As torch names it: `cpu`, `cuda:0`."""
    device_kind: str
    device_name: str
    free_bytes: int
    budget_support: Support
    precisions: tuple[tuple[str, Support], ...]
    workload_name: str
    workload_digest: str
    """Of the workload's source: an edge proven for other code is not an edge."""
    batch_size: int
    """The workload's own: what its learning rate was chosen for."""
    epochs: int
    learning_rate: float
    loader_workers: int
    options: tuple[tuple[str, str], ...]
    """Every option of the workload with the value it has in this job."""
    quality_name: str
    higher_is_better: bool
    training_samples: int
    """0 when the data was not loaded because the job is synthetic."""
    evaluation_samples: int
    dataset_digest: str
    versions: tuple[tuple[str, str], ...]

    def support(self, precision: str) -> Support:
        return dict(self.precisions)[precision]


def loads_in_its_own_process(device_kind: str, memory_budget_bytes: int | None) -> bool:
    """A CPU's budget is of one process, and its meter would count what loader workers share with it."""
    return device_kind == "cpu" and memory_budget_bytes is not None


def resolve(job: Job, found: Inspection) -> Job:
    """The job with the workload's own values in place of those the user left open, and the real device's name."""
    learning_rate = job.learning_rate if job.learning_rate is not None else found.learning_rate
    epochs = job.epochs if job.epochs is not None or job.steps is not None else found.epochs
    workers = job.loader_workers if job.loader_workers is not None else found.loader_workers // job.processes
    if loads_in_its_own_process(found.device_kind, job.memory_budget_bytes):
        workers = 0
    return dataclasses.replace(
        job,
        device=found.device,
        batch_size=job.batch_size if job.batch_size is not None else found.batch_size,
        epochs=epochs,
        learning_rate=learning_rate,
        loader_workers=workers,
        options=found.options,
    )
