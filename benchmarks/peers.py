"""Other finders of the largest batch, each run in a process of its own: Lightning's batch size scaler and accelerate's.

    python -m benchmarks.peers FINDER CASE

prints a finder's answer for a case, which is a JSON object, as one.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.processes import ENVIRONMENT

GPU_BUDGETS_MIB = (6144, None)
"""On a GPU: an emulated small card, and the whole one."""
GPU_SAMPLES = {6144: 2**16, None: 2**20}
"""By budget: more than fits."""
GPU_DISTINCT = 256
"""As many samples are made, and repeated."""
STEPS = 3
PEERS = ("lightning binsearch", "lightning power", "accelerate")


@dataclasses.dataclass(frozen=True)
class Case:
    """One question: how many samples fit?"""

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
        """On a CPU the model's own data; on a GPU more than fits, of which little is made."""
        if self.device == "cpu":
            return ()
        return ("samples", str(GPU_SAMPLES[self.budget_mib])), ("distinct", str(GPU_DISTINCT))


def run_peer(case: Case, finder: str) -> dict[str, Any]:
    """The peer's answer, how many trials it ran and how long it took, imports and data left out."""
    # Imports count neither as the peer's time nor as its memory; the first step of an optimizer would import the last.
    importlib.import_module("lightning.pytorch" if finder.startswith("lightning") else "accelerate.utils")
    import torch
    import torch._dynamo

    from amp_track.training.amp.precision import Precision, float32_precision
    from amp_track.training.devices.open import open_device
    from amp_track.workload import load_workload

    workload: Any = load_workload(case.workload, case.options)
    data, eval_data = workload.train_data(), workload.eval_data()
    search = _lightning if finder.startswith("lightning") else _accelerate
    with float32_precision(Precision.named(case.precision)):
        if case.device != "cpu":
            torch.zeros(1, device=case.device)
        trials: list[int] = []
        # As amp_track's jobs begin, in the peers' favour: with glibc's own malloc settings Lightning answers 288 and
        # 144 in two runs where 401 fit.
        open_device(case.device).begin(case.budget_bytes)
        started = time.perf_counter()
        answer, error = None, None
        try:
            answer = search(case, finder, workload, data, eval_data, trials)
        except Exception as problem:
            error = f"{type(problem).__name__}: {str(problem)[:120]}".splitlines()[0]
        return {
            "answer": answer,
            "probes": len(trials),
            "wall_seconds": time.perf_counter() - started,
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

    names: dict[str, Any] = {"fp32": "32-true", "tf32": "32-true", "amp": "16-mixed", "bf16": "bf16-mixed"}
    trainer = pl.Trainer(
        accelerator="cpu" if case.device == "cpu" else "gpu", devices=1, precision=names[case.precision], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, max_epochs=1,
    )  # fmt: skip
    mode: Any = finder.split()[1]
    # margin=0: by default it then takes 5 % off what it found. max_val: by default it stops at 8192.
    found = Tuner(trainer).scale_batch_size(Module(), mode=mode, steps_per_trial=STEPS, margin=0.0, max_val=len(data))
    assert found is not None
    return int(found)


def _accelerate(case: Case, finder: str, workload: Any, data: Any, eval_data: Any, trials: list[int]) -> int:
    """Begins at the whole data set: it only goes down, and its default of 128 is an answer only if that is too much."""
    import torch
    from accelerate.utils import find_executable_batch_size
    from torch.utils.data import DataLoader

    from amp_track.training.amp.precision import Precision

    precision = Precision.named(case.precision)

    @find_executable_batch_size(starting_batch_size=len(data))
    def train(batch_size: int) -> int:
        trials.append(batch_size)
        model = workload.model().to(case.device)
        optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
        scaler = torch.amp.GradScaler(case.device, enabled=case.precision == "amp")
        for _, (inputs, targets) in zip(range(STEPS), DataLoader(data, batch_size, shuffle=True), strict=False):
            with precision.autocast(case.device):
                loss = workload.loss(model(inputs.to(case.device)), targets.to(case.device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return batch_size

    return int(train())


def peer_command(case: Case, finder: str) -> list[str]:
    """What Python is called with to run a peer."""
    return ["-W", "ignore", "-m", "benchmarks.peers", finder, json.dumps(dataclasses.asdict(case))]


def in_own_process(arguments: list[str], *, folder: str, limit_seconds: float = 1800) -> tuple[Any, float]:
    """The JSON that a command prints last, and its seconds, imports and all."""
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=limit_seconds,
        )
    except subprocess.TimeoutExpired as error:
        return {"error": f"its process took more than {error.timeout:g} s"}, time.perf_counter() - started
    seconds = time.perf_counter() - started
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        said = (done.stderr.strip().splitlines() or ["without a word"])[-1][:150]
        return {"error": f"its process ended with code {done.returncode}: {said}"}, seconds
    return json.loads(lines[-1]), seconds


def main() -> None:
    finder, case = sys.argv[1:]
    print(json.dumps(run_peer(Case(**json.loads(case)), finder)))


if __name__ == "__main__":
    main()
