"""Make texts for golden files from output, MLflow runs and pages, without values that vary by run or machine."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run
from support import Done, stores
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

_VARYING_TAGS = re.compile(r"amp_track\.(process|version\.\w+|workload_digest)|mlflow\.user")
_INLINE = ("a", "b", "button", "code", "em", "i", "small", "span", "strong")
_TICK_LABEL = re.compile(r"[−\d.,]+")


class TextFile(SingleFileSnapshotExtension):
    """One readable file per golden."""

    file_extension = "txt"
    _write_mode = WriteMode.TEXT


def normalized(text: str) -> str:
    """Replace values that vary by run or machine: ids, digests of settings, folders, the CPU's name."""
    numbers: dict[str, int] = {}

    def numbered(run: re.Match[str]) -> str:
        return f"<run {numbers.setdefault(run[0], len(numbers) + 1)}>"

    text = text.replace(str(Path.cwd()), "<folder>").replace(f"{Path(sys.executable).parent}/", "")
    for pattern, replacement in (
        (r"(?<=%22)[0-9a-f]{32}(?=%22)|\b[0-9a-f]{32}\b", numbered),
        (r"(?<=simulated0-)((?:\w+-)?)[0-9a-f]{6}\b", r"\1<digest>"),
        (r"(?m)\| [0-9a-f]{8}$", "| <run>"),
        (r"(?m)^mlflow\.source\.name = .*", "mlflow.source.name = <program>"),  # MLflow keeps the first of a process
        (r"(?s)(tiny\.py at \w+ on ).*?(, batch)", r"\1<CPU>\2"),
    ):
        text = re.sub(pattern, replacement, text)
    return text


def transcript(line: str, done: Done) -> str:
    """Return a command line with its exit code, stdout and stderr; JSON is indented, to give short diffs."""
    stdout = done.stdout
    if "--json" in line.split() and stdout:
        found = json.loads(stdout)
        if found.get("device", {}).get("kind") == "cpu":
            found["device"] = dict.fromkeys(found["device"], "<of this machine>")
        stdout = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    parts = [f"$ amp-track {line}\nexit code {done.returncode}\n"]
    parts += [f"--- {name}\n{text}" for name, text in (("stdout", stdout), ("stderr", done.stderr)) if text]
    return normalized("".join(parts))


def stored_runs() -> str:
    """Return the names of all runs, then tags, params and metrics of the parent and of one child of each kind."""
    client = MlflowClient(stores()["tracking_uri"])
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, order_by=["attributes.start_time ASC"])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run is not parent]
    first_of_kind = {run.data.tags["amp_track.kind"]: run for run in reversed(children)}
    lines = [f"{run.data.tags['amp_track.kind']}: {run.info.run_name} {run.info.status}" for run in children]
    descriptions = [_describe(client, run) for run in (parent, *reversed(first_of_kind.values()))]
    return normalized("\n\n".join(["\n".join([f"{len(children)} child runs", *lines]), *descriptions]) + "\n")


def _describe(client: MlflowClient, run: Run) -> str:
    lines = [f"=== {run.data.tags['amp_track.kind']}: {run.info.run_name} {run.info.status}"]
    tags = {name: "<…>" if _VARYING_TAGS.fullmatch(name) else value for name, value in run.data.tags.items()}
    for title, values in (("tags", tags), ("params", run.data.params)):
        lines += [f"--- {title}", *(f"{name} = {_readable(values[name])}" for name in sorted(values))]
    lines += ["--- metrics", *sorted(run.data.metrics)]
    lines += ["--- artifacts", *sorted(file.path for file in client.list_artifacts(run.info.run_id))]
    return "\n".join(lines)


def _readable(value: str) -> str:
    return json.dumps(json.loads(value), indent=1) if value.startswith("{") else value


class PageText(HTMLParser):
    """The visible text of an HTML page, one line per paragraph, heading or table row; no tick labels of plots."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self._open: list[str] = []
        self._parts: list[str] = []
        self.feed(html)
        lines = [re.sub(" +", " ", line).strip(" |") for line in "".join(self._parts).split("\n")]
        self.text = normalized("\n".join(line for line in lines if line) + "\n")

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("script", "style", "svg"):
            self._open.append(tag)
        self._parts.append(" | " if tag in ("td", "th") else "" if tag in _INLINE else "\n")

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()
        self._parts.append("" if tag in (*_INLINE, "td", "th") else "\n")

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside in ("script", "style") or (inside == "svg" and _TICK_LABEL.fullmatch(data.strip())):
            return
        self._parts.append(re.sub(r"\s+", " ", data))
