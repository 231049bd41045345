"""The commands whose output the pages show: run as written, in an empty folder, and recorded with their machine.

A record is `docs/output/NAME.json`. The pages are made from the records, so that README.md and docs/ cannot disagree,
and a quick test can tell without running anything whether a page is stale.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = Path(__file__).parent / "output"
SCREENSHOT = Path(__file__).parent / "images" / "report.png"
COLUMNS = 100
_CHARTS = 4
"""How many charts of a page are shown: those of memory, speed and quality."""
_MEMORY = "experiments/digits.py --device cpu --memory-budget 64MiB"


@dataclass(frozen=True, kw_only=True)
class Example:
    """Commands that a page shows with what they print.

    Attributes:
        commands: run one after another with the same stores. `RUN_ID` stands for the run that the first one names.
        with_progress: show what goes to stderr too.
        keep: show only the lines that this regular expression finds.
        is_slow: it takes a minute or so: run only when asked to.
    """

    commands: tuple[str, ...]
    with_progress: bool = False
    keep: str = ""
    is_slow: bool = False


EXAMPLES = {
    "search": Example(commands=(f"amp-track search {_MEMORY}",), is_slow=True),
    "max-batch": Example(commands=(f"amp-track max-batch {_MEMORY}",), with_progress=True, is_slow=True),
    "seeds": Example(
        commands=("amp-track search experiments/digits.py --seeds 5 --trials 3 --epochs 3 --max-batch-size 64",),
        is_slow=True,
    ),
    "compare": Example(
        commands=("amp-track compare experiments/mlp.py --vary width=16,1024 --device cpu --seeds 3",),
        is_slow=True,
    ),
    "worker": Example(
        commands=(
            f"timeout -s INT 20 amp-track search {_MEMORY} --precision fp32 --trials 8 --study digits || true",
            "amp-track worker digits --workers 2",
        ),
        with_progress=True,
        keep="^(starting|resuming|worker|fp32|the same|amp-track: |To train|  amp-track train)",
        is_slow=True,
    ),
    "grad-stats": Example(
        commands=("amp-track train experiments/digits.py --lr 30 --grad-stats-every 20 --precision amp",)
    ),
    "grad-stats-fp32": Example(
        commands=("amp-track train experiments/digits.py --lr 30 --grad-stats-every 20 --precision fp32",), keep="^· "
    ),
    "dtypes": Example(commands=("amp-track dtypes experiments/digits.py --precision amp",)),
    "plan": Example(
        commands=('amp-track plan experiments/digits.py --memory-budget 64MiB --gpu "RTX 4090" --precision fp32,amp',)
    ),
    "explain": Example(
        commands=("amp-track explain experiments/digits.py --memory-budget 64MiB --batch-size 1024 --precision fp32",)
    ),
    "resume": Example(
        commands=(
            "amp-track train experiments/digits.py --precision fp32 --steps 60 --checkpoint-every 20",
            "amp-track train --resume RUN_ID --steps 120",
        )
    ),
}


def record_file(name: str) -> Path:
    return RECORDS / f"{name}.json"


def read_record(name: str) -> dict[str, Any]:
    """Return what was recorded of an example.

    Raises:
        SystemExit: there is no record, or it is of other commands than the example now has.
    """
    wanted = f"run `python docs/generate.py --run {name}`"
    if not record_file(name).is_file():
        raise SystemExit(f"{record_file(name)}: got no such file, expected the record of an example; {wanted}")
    record: dict[str, Any] = json.loads(record_file(name).read_text())
    if tuple(record["commands"]) != EXAMPLES[name].commands:
        raise SystemExit(f"{record_file(name)}: got a record of other commands than docs/examples.py has; {wanted}")
    return record


def run_and_record(name: str) -> None:
    """Run an example in an empty folder and write its record."""
    example = EXAMPLES[name]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "experiments", Path(folder) / "experiments")  # a link would lead out of the folder
        started = time.monotonic()
        lines, run_id = [], ""
        for command in example.commands:
            command = command.replace("RUN_ID", run_id)
            text = _output_of(command, folder, example)
            found = re.search(r"\b[0-9a-f]{32}\b", text)
            run_id = run_id or (found.group() if found is not None else "")
            shown = [line.rstrip() for line in text.splitlines() if re.search(example.keep, line)]
            lines += [f"$ {command}", *shown]
        seconds = time.monotonic() - started
        record = {"commands": example.commands, **_provenance(folder), "seconds": math.ceil(seconds), "lines": lines}
        if name == "search":
            record["summary"] = _search_summary(example.commands[0], folder)
            _keep_charts(name, folder)
            keep_screenshot(next(Path(folder).glob("mlruns/*/*/artifacts/report.html")))
    RECORDS.mkdir(exist_ok=True)
    record_file(name).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _keep_charts(name: str, folder: str) -> None:
    """Keep the first charts of the study's page as pictures, on white paper: a page of documentation may be dark."""
    page = next(Path(folder).glob("mlruns/*/*/artifacts/report.html")).read_text()
    titles = re.findall(r"<figcaption><strong>(.*?)</strong>", page)
    for old in RECORDS.glob(f"{name}-*.svg"):
        old.unlink()
    for number, (title, svg) in enumerate(zip(titles, re.findall(r"<svg .*?</svg>", page, re.DOTALL), strict=True), 1):
        if number > _CHARTS:
            break
        white = svg.replace("<svg ", '<svg style="background: white" ', 1)
        (RECORDS / f"{name}-{number}-{title.replace(' ', '-')}.svg").write_text(white + "\n")


def keep_screenshot(page: Path) -> None:
    """Keep the top of a study's page as README.md shows it, in light colors; nothing if there is no Chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("no Chromium: the screenshot of README.md stays as it is", file=sys.stderr)
        return
    from PIL import Image

    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--blink-settings=preferredColorScheme=1"]
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "page.png"
        sized = ["--window-size=1280,800", f"--screenshot={shot}"]
        subprocess.run([chromium, *flags, *sized, page.as_uri()], check=True, capture_output=True)
        colors = Image.open(shot).convert("RGB").quantize(64)  # a tenth of the bytes, and nobody sees it
        colors.save(SCREENSHOT, optimize=True)


def _output_of(command: str, folder: str, example: Example) -> str:
    """What a command prints. Both streams in the order of their lines where both are wanted."""
    done = _run(command, folder, stderr=subprocess.STDOUT if example.with_progress else subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"{command}: got exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def _run(command: str, folder: str, *, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent.resolve()), os.environ.get("PATH", "")]),
        "PYTHONPATH": str(ROOT),
        "COLUMNS": str(COLUMNS),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        environment.pop(variable, None)
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=stderr
    )


def _provenance(folder: str) -> dict[str, Any]:
    """The machine, its device as `--json` names it, with its instruction sets, the versions and the day."""
    report = json.loads(_run("amp-track dtypes experiments/digits.py --precision fp32 --json", folder).stdout)
    device = report["device"]
    return {
        "device": f"{device['name']} ({device['capability']})" if device["capability"] else device["name"],
        "cores": os.cpu_count(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "mlflow", "optuna")},
        "date": datetime.date.today().isoformat(),
    }


def _search_summary(command: str, folder: str) -> list[dict[str, Any]]:
    """The numbers of README.md's table. The same search asked for again repeats nothing, and prints them as JSON; the
    updates of each training are in the table that it keeps with its MLflow run."""
    result = json.loads(_run(f"{command} --json", folder).stdout)
    table = json.loads(Path(result["report"]).with_name("trials.json").read_text())
    trials = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    from amp_track.results.recommendation import made_few_optimizer_steps

    rows = []
    for precision, found in result["precisions"].items():
        of_precision = [trial for trial in trials if trial["precision"] == precision and trial["metric"] is not None]
        if "skipped" in found:
            continue
        untrained = {"batch_size": found["max_batch"], "samples_per_second": found["samples_per_second"]}
        at_max_batch = next((trial for trial in of_precision if trial["batch_size"] == found["max_batch"]), untrained)
        best = max(of_precision, key=lambda trial: float(trial["metric"]), default=untrained)
        wanted = ("batch_size", "samples_per_second", "metric", "optimizer_steps")
        steps: list[Any] = [trial.get("optimizer_steps") for trial in (at_max_batch, best)]
        rows.append(
            {
                "precision": precision,
                "at_max_batch": {name: at_max_batch.get(name) for name in wanted},
                "best": {name: best.get(name) for name in wanted},
                "made_few_optimizer_steps": None not in steps and made_few_optimizer_steps(*steps),
            }
        )
    return rows
