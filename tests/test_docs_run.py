"""Run every command and every piece of Python of README.md and docs/, or say why it cannot run in a test.

Those that take longer are marked nightly and run with less: see `SMALLER`. Commands whose output a page shows run as
written, from docs/examples.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from support import ROOT, tokens

import amp_track

sys.path.append(str(ROOT / "docs"))
import examples

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BRING_YOUR_OWN = ROOT / "experiments" / "bring_your_own"

ELSEWHERE = {
    r"make (search|test)\b": "CI runs it",
    r"(pip install|python3 -m venv) ": "needs a package registry",
    r"srun |amp-track worker mine --launcher (slurm|ray) ": "tests/workers/launchers",
    r"export MLFLOW_BACKEND_STORE_URI=|mlflow server ": "needs a database, and runs until Ctrl-C",
    r"export AMP_TRACK_STORAGE=": "needs servers: tests/integration/test_several_machines.py and test_postgresql.py",
    r"amp-track worker mine --device cuda:1": "needs two GPUs",
    r"(make gpu|python3 -m benchmarks\.gpu) ": "tests/benchmarks",
    r"mlflow run \.": "CI, and tests/integration/test_mlflow_run.py",
    r"amp-track ui": "runs until Ctrl-C: tests/integration/test_ui.py",
    r"torchrun --nnodes 2 ": "needs two machines: tests/integration/test_torchrun.py",
}
"""By pattern of a command's beginning, what runs it, or what it needs that no test has."""
SMALLER = {
    "max-batch -- ": "max-batch --memory-budget 128MiB -- ",
    "bf16   # def train_steps": "bf16 --memory-budget 128MiB   # def train_steps",
    '"my_module:Images")': '"my_module:Images", memory_budget="128MiB")',
    '"my_module:make_trainer")': '"my_module:make_trainer", memory_budget="128MiB")',
    "20GiB": "128MiB",
    "8GiB": "64MiB",
    "1GiB": "64MiB",
    "--time-limit 5m": "--time-limit 1s",
    "--workers 4": "--workers 2",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "width=16,256,1024": "width=16,32",
    "--seeds 5": "--seeds 2 --trials 2",
    "timm:vit_base_patch16_224": "timm:resnet18",
    "--image-size 384": "--image-size 64",
}
"""What is replaced in a command, so that a CPU runs it within seconds."""
SHORT = {
    "search": "--precision fp32 --trials 2 --max-batch-size 64 --confirm-steps 4",
    "max-batch": "--precision fp32 --max-batch-size 64 --confirm-steps 4",
    "compare": "--precision fp32,bf16 --steps 4",
}
"""What is added to a command, for the same."""
SCRIPT = """
if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", "--bs", type=int)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--use-bf16", action="store_true")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    is_16_bit = arguments.use_bf16 or arguments.precision == "bf16"
    task = Digits()
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters())
    for images, labels in torch.utils.data.DataLoader(task.train_data(), batch_size=arguments.batch_size):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_16_bit):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""Makes a workload a script too: the pages call both of them train.py."""


@dataclass(frozen=True)
class Snippet:
    """A command, or a block of Python."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.strip().splitlines()[0][:60]}"


def fences(page: Path, language: str) -> Iterator[str]:
    for token in tokens(page):
        if token.type == "fence" and token.info == language:
            yield token.content


COMMANDS = [
    Snippet(page.name, line.removeprefix("$ "))
    for page in PAGES
    for block in fences(page, "console")
    for line in block.replace("\\\n", "").splitlines()
    if line.startswith("$ ")
]
PYTHON = [Snippet(page.name, block) for page in PAGES for block in fences(page, "python")]


def is_elsewhere(command: str) -> bool:
    return any(re.match(pattern, command) for pattern in ELSEWHERE)


def test_every_reason_not_to_run_a_command_is_that_of_a_command() -> None:
    assert len(COMMANDS) > 50
    unused = [pattern for pattern in ELSEWHERE if not any(re.match(pattern, each.text) for each in COMMANDS)]
    assert unused == []
    assert [text for text in SMALLER if not any(text in each.text for each in [*COMMANDS, *PYTHON])] == []


# ------------------------------------------------------------------------------------------------------- commands

RUN_PAGES = sorted({each.page for each in COMMANDS if not is_elsewhere(each.text)})
FIRST_PAGES = ("your-own-workload.md", "plan.md")
"""The commands that a new user runs first are slow tests, those of the other pages nightly ones."""


@pytest.fixture
def folder_of_a_reader(clean_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages name, and a home with one of them."""
    shutil.copytree(ROOT / "experiments", clean_folder / "experiments")
    (clean_folder / "project").mkdir()
    digits = (ROOT / "experiments" / "digits.py").read_text()
    for path in ("mine.py", "project/mine.py"):
        (clean_folder / path).write_text(digits)
    (clean_folder / "train.py").write_text(digits + SCRIPT)
    for name in ("plain_loop", "lightning_module", "transformers_trainer"):
        shutil.copy(BRING_YOUR_OWN / f"{name}.py", clean_folder)
    imported = "from {0} import *\n".format
    made = "def make_net():\n    return Classifier()\n\n\ndef make_data(batch_size):\n    return Images(batch_size)\n"
    (clean_folder / "my_module.py").write_text("".join(map(imported, MODULES)) + made)
    monkeypatch.setenv("HOME", str(clean_folder))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return clean_folder


MODULES = ("plain_loop", "lightning_module", "transformers_trainer")


def made_smaller(command: str) -> str:
    """Return a command that does the same with less."""
    for text, smaller in SMALLER.items():
        command = command.replace(text, smaller)
    command = command.partition("  #")[0]
    name = re.match(r"amp-track (\S+)", command)
    if name is not None and name[1] in SHORT:
        own = command.partition(" -- ")[0]
        added = [flag for flag in re.findall(r"--[\w-]+ \S+", SHORT[name[1]]) if flag.split()[0] not in own]
        command = command.replace(name[0], f"{name[0]} {' '.join(added)}", 1)
    return command


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page in FIRST_PAGES else pytest.mark.nightly) for page in RUN_PAGES],
)
def test_the_commands_of_a_page_run_in_their_order(page: str, folder_of_a_reader: Path) -> None:
    for snippet in COMMANDS:
        if snippet.page == page and not is_elsewhere(snippet.text):
            command = made_smaller(snippet.text)
            if command.startswith("amp-track init mine.py"):
                (folder_of_a_reader / "mine.py").unlink()  # the page writes its own
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_an_example_runs_as_its_page_shows_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "RECORDS", tmp_path)
    monkeypatch.setattr(examples, "SCREENSHOT", tmp_path / "report.png")
    examples.run_and_record(name)
    assert json.loads((tmp_path / f"{name}.json").read_text())["lines"]


def test_a_command_that_a_page_shows_prints_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "amp_track", "--version"], capture_output=True, text=True)
    assert done.stdout == f"amp-track {amp_track.__version__}\n"


# --------------------------------------------------------------------------------------------------------- Python

NEEDS_CUDA = "torch.cuda.memory."
SLOW_PYTHON = ("amp_track.max_batch(", "amp_track.train(", "lightning.max_batch(", "amp_track.watch(", "import timm")
"""Pieces that train in other processes, or import MLflow or a slow library."""


def names_of_a_reader() -> dict[str, Any]:
    """Return what the pieces of Python use without defining it: the reader's own model, data and settings."""
    torch.manual_seed(0)

    class Net(torch.nn.Sequential):
        def __init__(self) -> None:
            super().__init__(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

        def cuda(self, device: object = None) -> Net:
            return self  # there is no GPU here

    def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(4)]

    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    generator, discriminator = (
        torch.nn.Sequential(torch.nn.Linear(*size), torch.nn.Sigmoid()) for size in ((6, 6), (6, 1))
    )
    from dataclasses import dataclass

    from torch.optim.lr_scheduler import OneCycleLR
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    parser = argparse.ArgumentParser()
    parser.parse_args = functools.partial(parser.parse_args, [])  # type: ignore[method-assign]
    return {
        "parser": parser,
        "torch": torch, "nn": torch.nn, "amp_track": amp_track, "Dataset": torch.utils.data.Dataset, "Net": Net,
        "dataclass": dataclass, "Workload": amp_track.Workload, "TrainStep": amp_track.TrainStep, "model": model,
        "optimizer": optimizer, "cross_entropy": torch.nn.functional.cross_entropy, "epochs": 1, "steps": 4,
        "loader": batches(), "batches_of_four": [batches()], "OneCycleLR": OneCycleLR, "AveragedModel": AveragedModel,
        "get_ema_multi_avg_fn": get_ema_multi_avg_fn, "scaler": scaler, "device": "cpu", "generator": generator,
        "discriminator": discriminator, "bce": torch.nn.functional.binary_cross_entropy_with_logits,
        "g_optimizer": torch.optim.Adam(generator.parameters()), "train": lambda: None, "loss": torch.tensor(1.0),
        "d_optimizer": torch.optim.Adam(discriminator.parameters()), "inputs": torch.randn(4, 6),
        "targets": torch.randint(3, (4,)), "loss_function": torch.nn.functional.cross_entropy,
        "step": amp_track.TrainStep(model, optimizer, torch.nn.functional.cross_entropy, "fp32"),
    }  # fmt: skip


def is_slow(snippet: Snippet) -> bool:
    return any(text in snippet.text for text in SLOW_PYTHON)


def run_python(snippet: Snippet) -> None:
    names = names_of_a_reader()
    if snippet.page == "gan.md" and "noise, real in loader" in snippet.text:
        names["loader"] = [(torch.randn(4, 6), torch.randn(4, 6))]
    text = snippet.text
    for large, smaller in SMALLER.items():
        text = text.replace(large, smaller)
    text = re.sub(
        r'((?:amp_track|lightning|transformers)\.max_batch\("[^)]*)\)', r"\1, max_batch_size=64, confirm_steps=4)", text
    )
    exec(compile(text, snippet.page, "exec"), names)


@pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32")  # of torch 2.9
@pytest.mark.parametrize(
    "snippet", [each for each in PYTHON if not is_slow(each) and NEEDS_CUDA not in each.text], ids=str
)
def test_a_piece_of_python_runs(snippet: Snippet, clean_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)  # a piece sets it
    with contextlib.redirect_stdout(None):
        run_python(snippet)


@pytest.mark.nightly
@pytest.mark.parametrize("snippet", [each for each in PYTHON if is_slow(each)], ids=str)
def test_a_piece_of_python_that_trains_runs(snippet: Snippet, folder_of_a_reader: Path) -> None:
    script = (
        "import sys; sys.path[:0] = ['.', *sys.argv[1:3]]; import test_docs_run as here; "
        "here.run_python(here.PYTHON[int(sys.argv[3])])"
    )
    arguments = [str(ROOT / "tests"), str(ROOT / "experiments"), str(PYTHON.index(snippet))]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------------- notebook

QUICKSTART = ROOT / "docs" / "quickstart.ipynb"


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def kinds_shown(notebook: Any) -> set[str]:
    return {kind for output in outputs(notebook) for kind in output.get("data", {})}


def test_the_quickstart_shows_its_table_and_plot_and_no_path_of_a_machine() -> None:
    notebook = nbformat.read(QUICKSTART, as_version=4)
    assert {"text/html", "image/png"} <= kinds_shown(notebook)
    assert any("amp-track train mine.py" in output.get("text", "") for output in outputs(notebook))
    shown = json.dumps([output for output in outputs(notebook) if "image/png" not in output.get("data", {})])
    assert not re.search(r"(^|[\s\"'])/(home|root|tmp|work)/", shown)


@pytest.mark.slow
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of the client, not ours
def test_the_quickstart_runs_from_top_to_bottom(clean_folder: Path) -> None:
    notebook = nbformat.read(QUICKSTART, as_version=4)
    stored = [cell.source for cell in notebook.cells]
    for cell in notebook.cells:
        cell.pop("outputs", None) if cell.cell_type == "markdown" else cell.update(outputs=[])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(clean_folder)}}).execute()
    assert [cell.source for cell in notebook.cells] == stored
    assert {"text/html", "image/png"} <= kinds_shown(notebook)
    assert [output for output in outputs(notebook) if output.output_type == "error"] == []
