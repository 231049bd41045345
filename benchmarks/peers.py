"""Other finders of the max batch, each run in a separate process: those of Lightning, accelerate and timm.

    python -m benchmarks.peers FINDER CASE

CASE is a JSON object. The answer is printed as a JSON object.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from amp_track.config.precisions import Precision
from benchmarks.processes import ENVIRONMENT

GPU_BUDGETS_MIB = (6144, None)
"""Budgets on a GPU: an emulated small GPU, and all memory."""
GPU_SAMPLES = {6144: 2**16, None: 2**20}
"""Dataset size by budget: more than fits."""
GPU_DISTINCT = 256
"""The number of generated samples, which are repeated."""
STEPS = 3
_MOST_SECONDS = 1800
PEERS = ("lightning binsearch", "lightning power", "accelerate", "timm")
_IMPORTS = {"lightning": "lightning.pytorch", "accelerate": "accelerate.utils", "timm": "timm.utils"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A max batch to find."""

    model: str
    precision: str
    budget_mib: int | None
    device: str

    @property
    def workload(self) -> str:
        return f"benchmarks.models:{self.model}"

    @property
    def budget_bytes(self) -> int | None:
        return self.budget_mib * 2**20 if self.budget_mib else None

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """Options of the workload: on a GPU, a larger dataset of repeated samples."""
        if self.device == "cpu":
            return ()
        return ("samples", str(GPU_SAMPLES[self.budget_mib])), ("distinct", str(GPU_DISTINCT))


def run_peer(case: Case, finder: str) -> dict[str, Any]:
    """Return the answer of a finder, or its error, and its number of trials."""
    library = finder.partition(" ")[0]
    # Imports do not count as memory of the finder. The first optimizer step would import torch._dynamo.
    importlib.import_module(_IMPORTS[library])
    import torch
    import torch._dynamo

    from amp_track.targets.workload import load_workload
    from amp_track.training.amp.precision import float32_precision
    from amp_track.training.devices.open import open_device

    workload: Any = load_workload(case.workload, case.options)
    data, eval_data = workload.train_data(), workload.eval_data()
    search = {"lightning": _lightning, "accelerate": _accelerate, "timm": _timm}[library]
    with float32_precision(Precision.named(case.precision)):
        if case.device != "cpu":
            torch.zeros(1, device=case.device)
        trials: list[int] = []
        # Start like a job of amp_track, in favor of the finders: with glibc's default malloc settings, Lightning
        # answered 288 and 144 in two runs, where 401 fit.
        open_device(case.device).begin(case.budget_bytes)
        answer, error = None, None
        try:
            answer = search(case, finder, workload, data, eval_data, trials)
        except Exception as problem:
            error = f"{type(problem).__name__}: {str(problem)[:120]}".splitlines()[0]
        return {
            "answer": answer,
            "probes": len(trials),
            "error": error,
        }


def _lightning(case: Case, finder: str, workload: Any, data: Any, eval_data: Any, trials: list[int]) -> int:
    import lightning.pytorch as pl
    from lightning.pytorch.tuner.tuning import Tuner
    from torch.utils.data import DataLoader

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.model = workload.model()

        def on_train_start(self) -> None:
            trials.append(self.batch_size)

        def training_step(self, batch: Any) -> Any:
            return workload.loss(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any) -> Any:
            return workload.loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return workload.optimizer(self.model.parameters(), workload.learning_rate)

        def train_dataloader(self) -> Any:
            return DataLoader(data, batch_size=self.batch_size, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(eval_data, batch_size=self.batch_size)

    name: Any = Precision.named(case.precision).in_tools["lightning"]
    trainer = pl.Trainer(
        accelerator="cpu" if case.device == "cpu" else "gpu", devices=1, precision=name, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, max_epochs=1,
    )  # fmt: skip
    mode: Any = finder.split()[1]
    # margin: the default reduces the answer by 5 %. max_val: the default stops at 8192.
    found = Tuner(trainer).scale_batch_size(Module(), mode=mode, steps_per_trial=STEPS, margin=0.0, max_val=len(data))
    assert found is not None
    return int(found)


def _accelerate(case: Case, finder: str, workload: Any, data: Any, eval_data: Any, trials: list[int]) -> int:
    """Start at the size of the dataset: the finder only decreases the batch size, by default from 128."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=len(data))
    def train(batch_size: int) -> int:
        trials.append(batch_size)
        _train(case, workload, data, batch_size)
        return batch_size

    return int(train())


def _timm(case: Case, finder: str, workload: Any, data: Any, eval_data: Any, trials: list[int]) -> int:
    """Retry with smaller batches like timm's benchmark.py, which starts at 256. Start at the size of the dataset."""
    import torch
    from timm.utils.decay_batch import check_batch_size_retry, decay_batch_step

    batch_size = len(data)
    while batch_size:
        trials.append(batch_size)
        try:
            torch.cuda.empty_cache()
            _train(case, workload, data, batch_size)
            return batch_size
        except RuntimeError as error:
            if not check_batch_size_retry(str(error)):
                raise
        batch_size = decay_batch_step(batch_size)
    raise RuntimeError("no batch size ran")


def _train(case: Case, workload: Any, data: Any, batch_size: int) -> None:
    """Make some training steps on a new model, as a script without a trainer does."""
    from torch.utils.data import DataLoader

    from benchmarks.bare import BareStep

    step = BareStep(workload, workload.model().to(case.device), case.precision, case.device)
    for _, (inputs, targets) in zip(range(STEPS), DataLoader(data, batch_size, shuffle=True), strict=False):
        step(inputs, targets)


def peer_command(case: Case, finder: str) -> list[str]:
    """Return the arguments of Python to run a finder."""
    return ["-W", "ignore", "-m", "benchmarks.peers", finder, json.dumps(dataclasses.asdict(case))]


def in_own_process(
    arguments: list[str], *, folder: str, environment: Mapping[str, str] = ENVIRONMENT
) -> tuple[Any, float]:
    """Return the JSON in the last line of a command's output, and its seconds including imports."""
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=_MOST_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        return {"error": f"its process timed out after {error.timeout:g} s"}, time.perf_counter() - started
    seconds = time.perf_counter() - started
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        last_line = (done.stderr.strip().splitlines() or ["no output"])[-1][:150]
        return {"error": f"its process exited with code {done.returncode}: {last_line}"}, seconds
    return json.loads(lines[-1]), seconds


def main() -> None:
    finder, case = sys.argv[1:]
    print(json.dumps(run_peer(Case(**json.loads(case)), finder)))


if __name__ == "__main__":
    main()
