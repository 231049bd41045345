"""Describe a job: everything that determines one run. Importing this takes milliseconds: no torch, MLflow or Optuna.

The fields of a Job are the only source of command-line flags (`amp_track.config.cli_params` reads the metadata), of the
parameters of `mlflow run -P`, and of the params in MLflow.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from amp_track.config import precisions, values
from amp_track.config.cli_params import Affects, Panel, setting, switch
from amp_track.config.precisions import Precision

DEFAULT_WORKLOAD = "experiments/digits.py"
MODEL_LIBRARIES = ("timm", "torchvision", "transformers")
"""The libraries whose models are targets by name, such as timm:resnet50."""
OUTPUT = "output.txt"
"""The file in a job's folder with the output of its command."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that determines one run.

    `None` means the workload's default. `resolve` replaces it, so that a resolved job holds the values that were used.
    """

    # fmt: off
    workload: str = DEFAULT_WORKLOAD
    command: tuple[str, ...] = ()
    """The words of a command to run instead, with placeholders; `workload` is then its script."""
    precision: str = setting("amp", values.precision, f"{precisions.described()}.", affects=Affects.TRIAL)
    batch_size: int | None = setting(
        None, values.positive_integer, "Samples per batch.", shown_default="the workload's", affects=Affects.TRIAL
    )
    eval_batch_size: int | Literal["auto"] | None = setting(
        None, values.eval_batch_size,
        "Samples per batch of an evaluation. auto finds the max batch of the evaluation too.",
        shown_default="same as the training's", affects=Affects.MAX_BATCH, panel=Panel.TRAINING
    )
    epochs: int | None = setting(
        None, values.positive_integer, "Passes over the training data.", shown_default="the workload's",
        affects=Affects.TRAINING, resumable=True
    )
    steps: int | None = setting(
        None, values.positive_integer, "Optimizer steps, instead of --epochs.", shown_default="none",
        affects=Affects.TRAINING, resumable=True
    )
    learning_rate: float | None = setting(
        None, values.positive_number, "Learning rate.", flag="lr", metavar="LR", shown_default="the workload's",
        affects=Affects.TRAINING
    )
    lr_scaling: str = setting(
        "none", values.one_of("none", "linear", "sqrt", metavar="RULE"),
        "Scale the learning rate with the batch size, relative to the workload's own: none, linear (SGD), sqrt (Adam).",
        affects=Affects.TRAINING, panel=Panel.TRAINING
    )
    seed: int = setting(
        0, values.seed, "Random seed of the initial weights and of the order of samples.", affects=Affects.TRAINING,
        panel=Panel.TRAINING
    )
    device: str = setting(
        "auto", values.device, "cpu, cuda, cuda:1, mps, … or auto: the first accelerator, else the CPU.",
        affects=Affects.MAX_BATCH, resumable=True
    )
    memory_budget_bytes: int | None = setting(
        None, values.memory_budget, "Memory limit of a job, such as 6GiB or 512MiB. It is enforced.",
        flag="memory-budget", shown_default="the device's free memory", affects=Affects.MAX_BATCH, resumable=True
    )
    grad_accum: int = setting(
        1, values.positive_integer, "Batches per optimizer step: their gradients are accumulated.",
        affects=Affects.MAX_BATCH, panel=Panel.TRAINING
    )
    max_grad_norm: float | None = setting(
        None, values.positive_number, "Clip the gradient norm to this value, after unscaling.",
        metavar="NORM", shown_default="no clipping", affects=Affects.MAX_BATCH, panel=Panel.TRAINING
    )
    nproc: int = setting(
        1, values.positive_integer,
        "Processes (ranks) for data-parallel training. Batch size and memory budget are per process.",
        affects=Affects.MAX_BATCH, panel=Panel.TRAINING
    )
    num_workers: int | None = setting(
        None, values.natural_number,
        "Data-loading processes per rank. 0 loads in the training process, as always on a CPU with a memory budget.",
        shown_default="the workload's", affects=Affects.TRAINING, resumable=True, panel=Panel.TRAINING
    )
    channels_last: bool = switch(
        "Store image tensors in channels-last memory format.", affects=Affects.MAX_BATCH, panel=Panel.TRAINING
    )
    compile: bool = switch("Compile the model with torch.compile.", affects=Affects.MAX_BATCH, panel=Panel.TRAINING)
    synthetic: bool = switch(
        "Train on synthetic batches of the real shapes: measures memory and speed without the data, reports no metric.",
        affects=Affects.MAX_BATCH, panel=Panel.TRAINING
    )
    grad_stats_every: int | None = setting(
        None, values.positive_integer,
        "Measure float16 overflow and underflow in the gradients of every layer, every N steps.",
        shown_default="never", affects=Affects.MAX_BATCH, resumable=True, panel=Panel.TRAINING
    )
    checkpoint_every: int | None = setting(
        None, values.positive_integer,
        "Save a checkpoint for --resume in the MLflow run every N steps. The best and the last are kept.",
        shown_default="never", affects=Affects.NOTHING, resumable=True, panel=Panel.TRAINING
    )
    job_timeout_seconds: float | None = setting(
        None, values.duration_seconds,
        "Time limit of one job, and of importing the workload and loading its data: 90s, 10m, 2h.", flag="job-timeout",
        shown_default="no limit", affects=Affects.NOTHING, resumable=True, panel=Panel.TRAINING
    )
    options: tuple[tuple[str, str], ...] = setting(
        (), values.option, "Set an option of the workload, such as width=32. Repeatable.", flag="set", repeatable=True,
        shown_default="the workload's", affects=Affects.MAX_BATCH
    )
    precision_words: tuple[tuple[str, str], ...] = setting(
        (), values.precision_words, "What {precision} stands for in a command: amp=--fp16, fp32=. Repeatable.",
        repeatable=True, shown_default="the precision's name", affects=Affects.MAX_BATCH, panel=Panel.MAX_BATCH
    )
    # fmt: on
    probe: bool = False
    """Whether to run only the steps that measure whether the batch fits; see `amp_track.training.trainer`."""
    probe_to_the_end: bool = True
    """Whether a probe of a one-epoch training also runs the end of the epoch: a smaller batch, and an evaluation."""
    worst_batch: bool = False
    """Whether to train on batches of the largest samples, if samples differ in size: every batch of a probe, and every
    second one of a longer run."""
    speed_readings: int = 1
    """How often a probe times its full steps. Several readings in one process show how much the speed varies. With 0 it
    makes only the steps that the peak memory needs."""
    epoch_steps: int | None = None
    """Optimizer steps of a shortened epoch; the last one is the last of the full epoch. Evaluation uses as many
    batches."""

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"--epochs: got {self.epochs} together with --steps {self.steps}, expected only one of them."
            )

    @property
    def samples_per_evaluation_batch(self) -> int | None:
        """The samples per batch of an evaluation: the training's, unless it has another number."""
        return self.eval_batch_size if isinstance(self.eval_batch_size, int) else self.batch_size

    def params(self) -> dict[str, str]:
        """Return every field by name, as text, for MLflow; unset fields are "None". Only a command has its words."""
        texts = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name in ("command", "precision_words") and not value:
                continue  # of a command only
            if item.name in ("options", "precision_words"):
                value = ",".join(f"{name}={text}" for name, text in value) or None
            if item.name == "command":
                value = shlex.join(value) or None
            texts[item.name] = str(value)
        return texts

    def as_json(self) -> str:
        """Return the job as text for `from_json`."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        values = json.loads(text)
        for name in ("options", "precision_words"):
            values[name] = tuple((key, value) for key, value in values.get(name, ()))
        values["command"] = tuple(values.get("command", ()))
        return Job(**values)

    @property
    def command_takes_precision(self) -> bool:
        """Whether the command has a place for the precision."""
        return any("{precision}" in word for word in self.command)

    def words(self, *, scratch: str) -> list[str]:
        """Return the words of the command, with the job's values in place of `{batch_size}` and other placeholders."""
        of_precision = dict(self.precision_words).get(self.precision)
        if of_precision is None:
            library = library_of(self.workload) if self.command_takes_precision else None
            of_precision = Precision.named(self.precision).in_tools.get(library or "", self.precision)
        values = {"{batch_size}": str(self.batch_size), "{scratch}": scratch, "{precision}": of_precision}
        words = []
        for word in self.command:
            if word == "{precision}":  # it may stand for several words, or none
                words += shlex.split(of_precision)
                continue
            for name, value in values.items():
                word = word.replace(name, value)
            words.append(word)
        return words

    @property
    def short_name(self) -> str:
        """`experiments/digits.py` and `package.digits:Digits` are both `digits`; `timm:resnet50` is `resnet50`."""
        module, colon, name = self.workload.partition(":")
        if library_of_model(self.workload) is not None:
            return Path(name).stem
        return module.rpartition(".")[2] if colon else Path(module).stem


assert all(
    item.metadata["setting"].affects is not None for item in dataclasses.fields(Job) if "setting" in item.metadata
), "a flag of a Job without `affects` would be missing from the fingerprint of studies"


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A process of a data-parallel job."""

    index: int = 0
    count: int = 1
    local_index: int = 0
    """The index among the ranks of its machine; it chooses the device."""
    local_count: int = 1
    rendezvous: str = ""
    """The rendezvous address: file:///path on one machine, else tcp://host:port/name of a torch store."""


ALONE = Rank()


def ranks_of_one_machine(count: int, rendezvous: str = "") -> list[Rank]:
    """Return the ranks of `count` processes on one machine."""
    return [
        Rank(index=index, count=count, local_index=index, local_count=count, rendezvous=rendezvous)
        for index in range(count)
    ]


@dataclass(frozen=True, kw_only=True)
class JobFolder:
    """The folder in which a job process stores files for its run: checkpoints, plots and final weights."""

    path: str
    resume_from: str | None = None
    """The checkpoint to resume from."""
    keep_weights: bool = False
    keep_plots: bool = True


def library_of_model(reference: str) -> str | None:
    """Return the library of a model by name, such as timm for `timm:resnet50`; None for other targets."""
    library, colon, _ = reference.partition(":")
    return library if colon and library in MODEL_LIBRARIES else None


def library_of(script: str) -> str | None:
    """Return the library whose flags for the precision a script takes; None if it is not known to take any's."""
    try:
        text = Path(script).read_text(errors="replace")
    except OSError:  # a report may be made where it is not
        return None
    if "HfArgumentParser" in text:
        return "transformers"
    if "LightningCLI" in text:
        return "lightning"
    return "timm" if "timm" in text and "amp-dtype" in text else None


def loads_in_its_own_process(device_kind: str, memory_budget_bytes: int | None) -> bool:
    """Return whether a job loads data in its own process.

    A CPU budget limits one process, and its meter would count memory that is shared with data-loading processes.
    """
    return device_kind == "cpu" and memory_budget_bytes is not None


def steps_per_epoch(job: Job, training_samples: int) -> int:
    """Return the optimizer steps of an epoch, which may be shortened; the last step may have fewer samples."""
    assert job.batch_size is not None
    return steps_of_batches(job, math.ceil(training_samples / (job.batch_size * job.nproc)))


def steps_of_batches(job: Job, batches: int) -> int:
    """Return the optimizer steps of an epoch with that number of batches, which may be shortened."""
    steps = math.ceil(batches / job.grad_accum)
    return steps if job.epoch_steps is None else min(steps, job.epoch_steps)


def total_steps(job: Job, of_epoch: int) -> int:
    """Return the number of optimizer steps of a job whose epochs have `of_epoch` steps."""
    return job.steps if job.steps is not None else (job.epochs or 1) * of_epoch


def synthetic_samples(job: Job) -> int:
    """Return the samples of an epoch of synthetic data: 16 batches per process."""
    assert job.batch_size is not None
    return 16 * job.batch_size * job.nproc


def streamed_samples(job: Job) -> int:
    """Return the samples that a job takes from a data set without a length: its steps are one epoch."""
    assert job.batch_size is not None and job.steps is not None
    return job.steps * job.grad_accum * job.batch_size * job.nproc


def micro_batch(effective_batch_size: int, max_batch: int, *, multiple_of: int = 1) -> tuple[int, int] | None:
    """Return the largest batch that fits and divides the effective batch, and the batches per optimizer step.

    Return None if no multiple of `multiple_of` divides the effective batch.
    """
    low = [number for number in range(1, math.isqrt(effective_batch_size) + 1) if not effective_batch_size % number]
    divisors = [*low, *(effective_batch_size // number for number in low)]
    sizes = [size for size in divisors if size <= max_batch and not size % multiple_of]
    return (max(sizes), effective_batch_size // max(sizes)) if sizes else None


def scaled_learning_rate(job: Job, reference_batch_size: int) -> float:
    """Return the learning rate, scaled from the batch size of the workload to that of the job.

    `lr_scaling` is linear for SGD (Goyal et al., 1706.02677), a square root for Adam (Malladi et al., 2205.10287).
    """
    assert job.learning_rate is not None and job.batch_size is not None
    ratio = job.batch_size * job.nproc * job.grad_accum / reference_batch_size
    exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[job.lr_scaling]
    return float(job.learning_rate * ratio**exponent)
